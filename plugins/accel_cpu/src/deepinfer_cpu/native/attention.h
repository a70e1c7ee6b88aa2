// Attention over pages, as the step programme and the attention component call it. Plain structs:
// Python fills them with ctypes, so every change here is a change in `deepinfer_cpu.structs`.
//
// A key head's page holds its keys dimension by dimension, [key_dim, page_size], so that vectors run
// over positions, and its values position by position, [page_size, padded value_dim]. Every number
// of a result is a fixed chain of operations: scores of a block of BLOCK positions, its softmax, its
// weighted values, blocks put together in ascending order. Whatever else is computed in the same
// step, in whichever tiles and by however many threads, a row has the same bits.
#pragma once

#include "pool.h"

namespace di {

enum KvType : int32_t { KV_F32 = 0, KV_BF16 = 1, KV_F16 = 2, KV_I8 = 3 };

// One cache group in one step; the arrays are the batch's own (`deepinfer_core.batch`).
struct AttentionPlan {
  const int32_t* positions;     // [num_tokens]
  const int32_t* query_starts;  // [num_sequences + 1]
  const int32_t* block_tables;  // [num_sequences, max_pages]
  const int32_t* visible_from;  // [num_sequences]
  const int64_t* write_slots;   // [num_tokens], -1 where nothing is written
  float* scratch;               // for cutting long sequences into pieces, or null: never cut
  int64_t scratch_size;         // floats
  int32_t num_tokens;
  int32_t num_sequences;
  int32_t max_pages;
  int32_t reserved;
};

// One layer: its memory and constants.
struct AttentionLayer {
  void* keys;           // [num_pages, num_kv_heads, key_dim, page_size] of kv_type
  void* values;         // [num_pages, num_kv_heads, page_size, padded(value_dim)]
  float* key_scales;    // [num_pages, num_kv_heads, page_size] of KV_I8, else null
  float* value_scales;  // likewise
  const float* sinks;   // [num_query_heads] or null
  float scale;
  float softcap;   // 0 = off
  int32_t window;  // 0 = unlimited
  int32_t kv_type;
  int32_t page_size;  // a power of two
  int32_t num_query_heads;
  int32_t num_kv_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t reserved;
};

// Numbers that a stored value takes; what is beyond value_dim is zero from allocation on.
inline int padded(int value_dim) { return (value_dim + 15) & ~15; }

// Write the keys and values of one token, all key heads: k [num_kv_heads, key_dim], v likewise.
void write_kv(const AttentionLayer& layer, int64_t slot, const float* k, const float* v);

// Attention of every token over what was written, this step's rows included. Work is shared out by
// `team.next()`; the caller puts a barrier before and after.
// q: row t begins at q + t * q_stride, [num_query_heads, key_dim]; out likewise with value_dim.
void attend(const AttentionLayer& layer, const AttentionPlan& plan, const float* q,
            int64_t q_stride, float* out, int64_t out_stride, Team& team);

}  // namespace di
