// The parallel part of a draft pass in one call: a few rows for each sequence, which see each other
// and keys and values that were made of the target's layer outputs.
#pragma once

#include "decoder.h"

namespace di {

struct DraftBlock {
  Decoder decoder;                   // no embedding; its layers have neither pages nor groups
  const Linear* context;             // target layer outputs side by side -> hidden
  const float* context_norm;         // [hidden]
  const Linear* const* keys_values;  // by layer: hidden -> keys, then values
  const Linear* head;
};

// What the rows of one sequence see of the past in one layer.
struct DraftPast {
  const float* keys;    // [count, num_kv_heads, head_dim]
  const float* values;  // likewise
  int64_t count;
};

struct DraftStep {
  const float* anchors;      // [num_sequences, hidden], the first row of each
  const float* mask;         // [hidden], every other row
  const int32_t* positions;  // [rows]
  const DraftPast* past;     // [num_layers, num_sequences]
  const int32_t* unseen;     // [num_layers, rows]: first positions of the past that a row cannot see
  float* out;                // [num_sequences, wanted, head outputs]
  int64_t num_sequences;
  int64_t block;   // rows of a sequence
  int64_t wanted;  // first ones of them that are asked for
};

// The sequential part: a bias of each row's logits by the token before it.
struct DraftChain {
  enum Kind : int32_t { VANILLA = 0, GATED = 1, RNN = 2 };

  const float* table;   // [vocabulary, rank], embeds the token before
  const float* inner;   // GATED: [rank, rank]; RNN: [3 * rank, 2 * rank], of state and embedding
  const float* sure;    // [rank] of the confidence head, or null
  const Linear* bias;   // rank -> draft vocabulary
  const int64_t* ids;   // [draft vocabulary], what each is in the vocabulary
  int64_t rank;
  int32_t kind;
  int32_t says;         // whether there is a confidence head
};

struct DraftChainStep {
  const float* rows;       // [num_sequences, wanted, stride]: logits, then what the row adds to the
                           // inner product of GATED or RNN, then to the confidence
  const int64_t* anchors;  // [num_sequences]
  int64_t* tokens;         // [num_sequences, wanted]: the likeliest ones, one after another
  float* confidence;       // [num_sequences, wanted], logits
  int64_t num_sequences;
  int64_t wanted;
  int64_t stride;
};

struct DraftContext {
  const float* features;     // [rows, context inputs]
  const int32_t* positions;  // [rows]
  float* const* keys;        // by layer: [rows, num_kv_heads, head_dim]
  float* const* values;      // likewise
  int64_t rows;
};

}  // namespace di
