// All layers of a decoder in one call.
#pragma once

#include "attention.h"
#include "linear.h"

namespace di {

struct DecoderLayer {
  const float* input_norm;   // [hidden]
  const float* middle_norm;  // [hidden]
  const float* q_norm;       // [head_dim] or null
  const float* k_norm;       // likewise
  const Linear* qkv;
  const Linear* output;
  const Linear* gate_up;     // gate's outputs, then up's
  const Linear* down;
  const AttentionLayer* attention;
  int32_t group;             // index of the attention plan
  int32_t use_rope;
};

struct Decoder {
  const DecoderLayer* layers;
  const Linear* embedding;
  const float* final_norm;  // [hidden]
  const float* cos;         // [positions, half]
  const float* sin;
  int64_t num_layers;
  int64_t hidden;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t intermediate;
  int64_t half;
  float eps;
  int32_t reserved;
};

struct Step {
  const int64_t* token_ids;           // [rows]
  const int32_t* positions;           // [rows]
  const AttentionPlan* const* plans;  // by group
  const int32_t* wanted;              // [num_wanted] rows, ascending
  float* const* taps;                 // [num_layers + 1]: embedding, layers; null = not asked for
  float* out;                         // [num_wanted, hidden], normed
  int64_t rows;
  int64_t num_wanted;
};

}  // namespace di
