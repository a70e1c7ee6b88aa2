// Dot products of integers: vectors with one 32 bit lane for each output, of which each holds
// neighbours along the inner dimension: two weights of 16 bits, or four of 8.
#pragma once

#include "simd.h"

namespace di {

constexpr int PANEL = 16;               // outputs that are packed side by side
constexpr int VECS = PANEL / F32S;      // vectors of a panel
constexpr int GROUP = 32;               // numbers that share a scale

#if DI_AVX512
typedef __m512i pairs;
inline pairs load_pairs(const void* p) { return _mm512_loadu_si512(p); }
inline void store_pairs(void* p, pairs v) { _mm512_storeu_si512(p, v); }
inline pairs zero_pairs() { return _mm512_setzero_si512(); }
inline pairs same_lane(const void* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return _mm512_set1_epi32(both);
}
inline pairs dot(pairs sum, pairs w, pairs x) { return _mm512_dpwssd_epi32(sum, w, x); }
inline pairs first_dot(pairs w, pairs x) { return dot(zero_pairs(), w, x); }
// Nibble j of both halves of each lane.
template <int J>
inline pairs nibbles(pairs raw) {
  if (J == 0) return _mm512_and_si512(raw, _mm512_set1_epi16(15));
  if (J == 3) return _mm512_srli_epi16(raw, 12);
  return _mm512_and_si512(_mm512_srli_epi16(raw, 4 * J), _mm512_set1_epi16(15));
}
inline pairs dot_bytes(pairs sum, pairs w, pairs x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline pairs first_dot_bytes(pairs w, pairs x) { return dot_bytes(zero_pairs(), w, x); }
inline pairs whole(pairs sum) { return sum; }
inline pairs low_nibbles(pairs raw) { return _mm512_and_si512(raw, _mm512_set1_epi8(15)); }
inline pairs high_nibbles(pairs raw) { return low_nibbles(_mm512_srli_epi16(raw, 4)); }
inline pairs widen(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
inline f32v to_floats(pairs v) { return (f32v)_mm512_cvtepi32_ps(v); }
#elif DI_AVX2
typedef __m256i pairs;
inline pairs load_pairs(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_pairs(void* p, pairs v) { _mm256_storeu_si256((__m256i*)p, v); }
inline pairs zero_pairs() { return _mm256_setzero_si256(); }
inline pairs same_lane(const void* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return _mm256_set1_epi32(both);
}
inline pairs first_dot(pairs w, pairs x) { return _mm256_madd_epi16(w, x); }
inline pairs dot(pairs sum, pairs w, pairs x) {
  // As intrinsics, GCC computes many products first and spills them.
  pairs product;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
          : "+x"(sum), "=&x"(product)
          : "x"(w), "x"(x));
  return sum;
}
template <int J>
inline pairs nibbles(pairs raw) {
  if (J == 0) return _mm256_and_si256(raw, _mm256_set1_epi16(15));
  if (J == 3) return _mm256_srli_epi16(raw, 12);
  return _mm256_and_si256(_mm256_srli_epi16(raw, 4 * J), _mm256_set1_epi16(15));
}
// Lanes hold two sums of 16 bits each, which have room for 8 weights of 4 bits each.
inline pairs first_dot_bytes(pairs w, pairs x) { return _mm256_maddubs_epi16(w, x); }
inline pairs dot_bytes(pairs sum, pairs w, pairs x) {
  pairs product;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
          : "+x"(sum), "=&x"(product)
          : "x"(w), "x"(x));
  return sum;
}
inline pairs whole(pairs sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
inline pairs low_nibbles(pairs raw) { return _mm256_and_si256(raw, _mm256_set1_epi8(15)); }
inline pairs high_nibbles(pairs raw) { return low_nibbles(_mm256_srli_epi16(raw, 4)); }
inline pairs widen(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
inline f32v to_floats(pairs v) { return (f32v)_mm256_cvtepi32_ps(v); }
#else
typedef int16_t pairs __attribute__((vector_size(F32S * 4)));
inline pairs load_pairs(const void* p) {
  pairs v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store_pairs(void* p, pairs v) { std::memcpy(p, &v, sizeof v); }
inline pairs zero_pairs() { return pairs{}; }
inline pairs same_lane(const void* p) {
  int32_t lane;
  std::memcpy(&lane, p, 4);
  return (pairs)(i32v{} + lane);
}
inline pairs dot(pairs sum, pairs w, pairs x) {
  i32v total = (i32v)sum;
  for (int i = 0; i < F32S; i++)
    total[i] += int32_t(w[2 * i]) * x[2 * i] + int32_t(w[2 * i + 1]) * x[2 * i + 1];
  return (pairs)total;
}
inline pairs first_dot(pairs w, pairs x) { return dot(zero_pairs(), w, x); }
template <int J>
inline pairs nibbles(pairs raw) {
  typedef uint16_t halves __attribute__((vector_size(F32S * 4)));
  return (pairs)(((halves)raw >> (4 * J)) & 15);
}
inline pairs dot_bytes(pairs sum, pairs w, pairs x) {
  i32v total = (i32v)sum;
  uint8_t weights[sizeof sum];
  int8_t numbers[sizeof sum];
  std::memcpy(weights, &w, sizeof w);
  std::memcpy(numbers, &x, sizeof x);
  for (int i = 0; i < 4 * F32S; i++) total[i / 4] += weights[i] * numbers[i];
  return (pairs)total;
}
inline pairs first_dot_bytes(pairs w, pairs x) { return dot_bytes(zero_pairs(), w, x); }
inline pairs whole(pairs sum) { return sum; }
inline pairs low_nibbles(pairs raw) { return raw & int16_t(0x0f0f); }
inline pairs high_nibbles(pairs raw) { return low_nibbles(raw >> 4); }
inline pairs widen(const int8_t* p) {
  pairs v;
  for (int i = 0; i < 2 * F32S; i++) v[i] = p[i];
  return v;
}
inline f32v to_floats(pairs v) { return __builtin_convertvector((i32v)v, f32v); }
#endif

// Activations of 16 and of 8 bits: how their products are formed.
struct Words {
  typedef int16_t Number;
  static constexpr float MOST = 32767.0f;
  static constexpr int STEP = 2;   // inputs of a lane
  static constexpr int SPANS = 1;  // of a group that have scales of their own
  static pairs first(pairs w, pairs x) { return first_dot(w, x); }
  static pairs add(pairs sum, pairs w, pairs x) { return dot(sum, w, x); }
  static pairs total(pairs sum) { return sum; }
};

struct Bytes {
  typedef int8_t Number;
  static constexpr float MOST = 127.0f;
  static constexpr int STEP = 4;
  static constexpr int SPANS = 2;
  static pairs first(pairs w, pairs x) { return first_dot_bytes(w, x); }
  static pairs add(pairs sum, pairs w, pairs x) { return dot_bytes(sum, w, x); }
  static pairs total(pairs sum) { return whole(sum); }
};

}  // namespace di
