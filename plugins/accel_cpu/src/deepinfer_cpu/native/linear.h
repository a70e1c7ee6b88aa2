// Products of activations with packed weights. A weight of n outputs is stored as panels of 16
// outputs side by side; the last panel is filled up with zeros.
//
//   Q4_0, Q4_1, Q8_0: per panel and group of 32 inputs: 16 scales (f16), for Q4_1 16 minima (f16),
//     then 4 bit: 4 chunks of 8 inputs, in each 16 words of 32 bits. For activations of 16 bits
//     the even inputs are nibbles 0 to 3 of a word and the odd ones nibbles 4 to 7; for those of
//     8 bits the first four inputs are the low nibbles of its bytes, the others the high ones;
//     8 bit: 16 pairs of inputs, in each 16 x 2 bytes.
//   BF16, F32: per panel and input: 16 numbers.
//
// Whatever the number of rows, each output is summed up in one order: integers exactly within a
// group, groups ascending, in f32; floats input by input.
#pragma once

#include "dot.h"
#include "pool.h"

namespace di {

enum Format : int32_t { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2, BF16 = 3, F32 = 4 };

inline bool is_integer(int32_t format) { return format <= Q8_0; }

constexpr int64_t group_bytes(int32_t format) {
  return format == Q4_0 ? 32 + 256 : format == Q4_1 ? 64 + 256 : 32 + 512;
}

constexpr int64_t BLOCK = 96;  // most rows that are multiplied with a panel at a time

struct Linear {
  const uint8_t* panels;
  const float* bias;  // [n] or null
  int64_t n;          // outputs
  int64_t k;          // inputs
  int32_t format;
  int32_t bits;  // of a number that meets integer weights: 16, or 8 with weights of 4 bits

  int64_t spans() const { return bits == 8 ? 2 : 1; }  // scales of a group of activations
  int64_t num_panels() const { return (n + PANEL - 1) / PANEL; }
  int64_t panel_bytes() const {
    return is_integer(format) ? k / GROUP * group_bytes(format)
                              : k * PANEL * (format == BF16 ? 2 : 4);
  }
};

// Rows that are multiplied: floats, or integers of Linear::bits. Integers lie group by group, so
// that the rows of a group are neighbours.
struct Rows {
  const float* floats;  // row i at i * stride
  int64_t stride;
  const void* quants;   // [k / GROUP, capacity, GROUP]
  const float* scales;  // [k / GROUP, capacity, spans]
  const float* sums;    // [k / GROUP, capacity], of each group's numbers
  int64_t count;
  int64_t capacity;
};

// Quantise some groups of one row: x is about quants * scales. The pointers are at the first group;
// each following one is `capacity` rows on. NaN and infinity make the group's scale NaN.
void quantize_row(int32_t bits, const float* x, int64_t count, int64_t capacity, void* quants,
                  float* scales, float* sums);

// Scratch for the unpacked weights of a panel.
inline int64_t room_bytes(int64_t k) { return k * PANEL * 4 + 64; }

}  // namespace di
