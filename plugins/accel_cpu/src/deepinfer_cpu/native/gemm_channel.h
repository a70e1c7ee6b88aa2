// Products whose weights and activations have 8 bits, with one scale for each output and one for each
// row (W8A8). Sums are exact integers over the whole inner dimension, so every level gives the same.
//
//   A panel: 16 scales (f32), then for every 4 inputs 16 x 4 bytes, the weights plus 128. Inputs are
//   filled up to a multiple of 64 with zeros, in rows too.
//
// Plain structs: Python fills them with ctypes, so every change here is a change in
// `deepinfer_cpu.structs`.
#pragma once

#include "dot.h"

namespace di {

constexpr int64_t STRIDE = 64;  // inputs are filled up to a multiple of it

struct ChannelLinear {
  const uint8_t* panels;
  const float* bias;  // [n] or null
  int64_t n;          // outputs
  int64_t k;          // inputs

  int64_t inputs() const { return (k + STRIDE - 1) / STRIDE * STRIDE; }
  int64_t num_panels() const { return (n + PANEL - 1) / PANEL; }
  int64_t panel_bytes() const { return PANEL * 4 + inputs() * PANEL; }
};

// Rows as integers: quants [count, inputs], scales and sums of quants [count].
struct ChannelRows {
  const int8_t* quants;
  const float* scales;
  const int32_t* sums;
};

// Rows [first, last) times a panel; out [last - first, PANEL].
void multiply_channel(const ChannelLinear& linear, const ChannelRows& rows, int64_t panel,
                      int64_t first, int64_t last, float* out);

}  // namespace di
