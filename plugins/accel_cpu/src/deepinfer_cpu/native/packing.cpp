// Weights from the blocks of a GGUF file, or from floats, to panels; and back, row by row.
#include "packing.h"

#include <algorithm>

#include "product.h"

namespace di {
namespace {

constexpr int64_t block_bytes(int32_t format) {
  return format == Q4_0 ? 18 : format == Q4_1 ? 20 : 34;
}

// Input i of a block of 4 bit weights: a byte holds inputs i and i + 16.
inline uint32_t nibble(const uint8_t* data, int i) {
  return i < 16 ? data[i] & 15u : data[i - 16] >> 4;
}

// Place of input i among the 8 nibbles of its word.
inline int place(int32_t bits, int i) {
  return bits == 8 ? i % 4 * 2 + i % 8 / 4 : i % 8 / 2 + (i & 1) * 4;
}

void pack_group(int32_t format, int32_t bits, const uint8_t* block, uint8_t* group, int lane) {
  std::memcpy(group + 2 * lane, block, 2);
  const uint8_t* data = block + 2;
  uint8_t* out = group + 32;
  if (format == Q4_1) {
    std::memcpy(group + 32 + 2 * lane, block + 2, 2);
    data += 2;
    out += 32;
  }
  if (format == Q8_0) {
    for (int i = 0; i < GROUP; i++) out[i / 2 * 2 * PANEL + 2 * lane + (i & 1)] = data[i];
    return;
  }
  for (int chunk = 0; chunk < 4; chunk++) {
    uint32_t word = 0;
    for (int i = 0; i < 8; i++) word |= nibble(data, chunk * 8 + i) << (4 * place(bits, i));
    std::memcpy(out + chunk * 4 * PANEL + 4 * lane, &word, 4);
  }
}

void unpack_group(int32_t format, int32_t bits, const uint8_t* group, int lane, float* out) {
  const float scale = from_f16(((const uint16_t*)group)[lane]);
  const uint8_t* data = group + 32;
  float minimum = 0;
  if (format == Q4_1) {
    minimum = from_f16(((const uint16_t*)group)[PANEL + lane]);
    data += 32;
  }
  for (int i = 0; i < GROUP; i++) {
    if (format == Q8_0) {
      out[i] = scale * float(int8_t(data[i / 2 * 2 * PANEL + 2 * lane + (i & 1)]));
      continue;
    }
    uint32_t word;
    std::memcpy(&word, data + i / 8 * 4 * PANEL + 4 * lane, 4);
    const float q = float((word >> (4 * place(bits, i))) & 15);
    out[i] = format == Q4_0 ? scale * (q - 8) : scale * q + minimum;
  }
}

}  // namespace

void unpack_row(const Linear& linear, int64_t output, float* out) {
  if (output < 0 || output >= linear.n) {
    std::fill(out, out + linear.k, from_bits(0x7fc00000u));
    return;
  }
  const uint8_t* head = linear.panels + output / PANEL * linear.panel_bytes();
  const int lane = int(output % PANEL);
  if (is_integer(linear.format)) {
    for (int64_t g = 0; g < linear.k / GROUP; g++)
      unpack_group(linear.format, linear.bits, head + g * group_bytes(linear.format), lane,
                   out + g * GROUP);
    return;
  }
  for (int64_t i = 0; i < linear.k; i++)
    out[i] = linear.format == BF16 ? from_bf16(((const uint16_t*)head)[i * PANEL + lane])
                                   : ((const float*)head)[i * PANEL + lane];
}

}  // namespace di

using namespace di;

DI_EXPORT int64_t di_packed_bytes(const Linear* linear) {
  return linear->num_panels() * linear->panel_bytes();
}

// Fill linear->panels from rows as stored: blocks, or [n, k] of bf16 or f32.
DI_EXPORT void di_pack(const Linear* linear, const uint8_t* rows) {
  Call call;
  uint8_t* panels = const_cast<uint8_t*>(linear->panels);
  const int64_t k = linear->k, size = linear->format == BF16 ? 2 : 4;
  const bool integer = is_integer(linear->format);
  const int64_t row_bytes = integer ? k / GROUP * block_bytes(linear->format) : k * size;
  together([&](Team& team) {
    share(team, 1, linear->num_panels(), [&](int64_t, int64_t, int64_t panel) {
      uint8_t* head = panels + panel * linear->panel_bytes();
      if ((panel + 1) * PANEL > linear->n) std::memset(head, 0, size_t(linear->panel_bytes()));
      for (int lane = 0; lane < PANEL && panel * PANEL + lane < linear->n; lane++) {
        const uint8_t* row = rows + (panel * PANEL + lane) * row_bytes;
        if (integer) {
          for (int64_t g = 0; g < k / GROUP; g++)
            pack_group(linear->format, linear->bits, row + g * block_bytes(linear->format),
                       head + g * group_bytes(linear->format), lane);
        } else {
          for (int64_t i = 0; i < k; i++)
            std::memcpy(head + (i * PANEL + lane) * size, row + i * size, size_t(size));
        }
      }
    });
  });
}

// Rows of an embedding: ids [count], each within 0 .. n-1; out [count, k].
DI_EXPORT void di_embedding(const Linear* linear, const int64_t* ids, int64_t count, float* out) {
  Call call;
  together([&](Team& team) {
    for (int64_t i = team.next(); i < count; i = team.next())
      unpack_row(*linear, ids[i], out + i * linear->k);
  });
}
