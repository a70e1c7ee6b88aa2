// Narrow floating point numbers in memory.
#pragma once

#include "level.h"

namespace di {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float from_bf16(uint16_t value) { return from_bits(uint32_t(value) << 16); }

// Round to nearest, ties to even, as torch does; NaN stays NaN.
inline uint16_t to_bf16(float value) {
  uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline float from_f16(uint16_t value) {
#if DI_AVX2
  return _cvtsh_ss(value);
#else
  uint32_t sign = uint32_t(value & 0x8000) << 16, exponent = (value >> 10) & 31;
  uint32_t fraction = value & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | (fraction << 13));
  if (exponent) return from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
  float tiny = float(fraction) * 0x1p-24f;
  return sign ? -tiny : tiny;
#endif
}

// Round to nearest, ties to even; too large becomes infinite.
inline uint16_t to_f16(float value) {
#if DI_AVX2
  return uint16_t(_cvtss_sh(value, 0));
#else
  const uint32_t bits = to_bits(value), size = bits & 0x7fffffffu;
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  if (size > 0x7f800000u) return uint16_t(sign | 0x7e00 | ((size >> 13) & 0x3ff));
  if (size >= 0x477ff000u) return uint16_t(sign | 0x7c00);
  if (size < 0x38800000u) return uint16_t(sign | (to_bits(from_bits(size) + 0.5f) & 0x7fff));
  return uint16_t(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1)) >> 13));
#endif
}

}  // namespace di
