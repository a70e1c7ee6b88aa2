// Vectors of F32S floats: what the compiler makes of them depends on the level. Operators are
// GCC's; products and sums are never contracted, `fma` is written where it is meant.
#pragma once

#include <cmath>

#include "numbers.h"

namespace di {

#if DI_AVX512
constexpr int F32S = 16;
#elif DI_NEON
constexpr int F32S = 4;
#else
constexpr int F32S = 8;
#endif

typedef float f32v __attribute__((vector_size(F32S * 4)));
typedef int32_t i32v __attribute__((vector_size(F32S * 4)));

inline f32v load(const float* p) {
  f32v v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, f32v v) { std::memcpy(p, &v, sizeof v); }

inline f32v splat(float x) {
#if DI_AVX512
  return (f32v)_mm512_set1_ps(x);
#elif DI_AVX2
  return (f32v)_mm256_set1_ps(x);
#elif DI_NEON
  return (f32v)vdupq_n_f32(x);
#else
  return f32v{x, x, x, x, x, x, x, x};
#endif
}

inline f32v fma(f32v a, f32v b, f32v c) {
#if DI_AVX512
  return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif DI_AVX2
  return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif DI_NEON
  return (f32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// b where either is NaN, as in `a > b ? a : b`, of which GCC makes two instructions.
inline f32v vmax(f32v a, f32v b) {
#if DI_AVX512
  return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#elif DI_AVX2
  return (f32v)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline f32v vmin(f32v a, f32v b) {
#if DI_AVX512
  return (f32v)_mm512_min_ps((__m512)a, (__m512)b);
#elif DI_AVX2
  return (f32v)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

inline f32v load_bf16(const uint16_t* p) {
#if DI_AVX512
  __m256i raw = _mm256_loadu_si256((const __m256i*)p);
  return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
#elif DI_AVX2
  __m128i raw = _mm_loadu_si128((const __m128i*)p);
  return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
#elif DI_NEON
  return (f32v)vshll_n_u16(vld1_u16(p), 16);
#else
  f32v v;
  for (int i = 0; i < F32S; i++) v[i] = from_bf16(p[i]);
  return v;
#endif
}

inline f32v load_f16(const uint16_t* p) {
#if DI_AVX512
  return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif DI_AVX2
  return (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif DI_NEON
  return (f32v)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  f32v v;
  for (int i = 0; i < F32S; i++) v[i] = from_f16(p[i]);
  return v;
#endif
}

// As `to_bf16`, lane by lane.
inline void store_bf16(uint16_t* p, f32v v) {
  typedef uint16_t narrow __attribute__((vector_size(F32S * 2)));
  typedef uint32_t u32v __attribute__((vector_size(F32S * 4)));
  const u32v bits = (u32v)v, top = bits >> 16;
  const u32v near = (bits + 0x7fffu + (top & 1)) >> 16;
  const u32v found = (bits & 0x7fffffffu) > 0x7f800000u ? top | 0x40 : near;
  const narrow packed = __builtin_convertvector(found, narrow);
  std::memcpy(p, &packed, sizeof packed);
}

inline void store_bf16(uint16_t* p, const float* from, int count) {
  int i = 0;
  for (; i + F32S <= count; i += F32S) store_bf16(p + i, load(from + i));
  for (; i < count; i++) p[i] = to_bf16(from[i]);
}

// Halves onto each other, in one fixed order.
template <typename V, typename F>
inline auto folded(V v, F&& both) {
  typedef decltype(v[0] + v[0]) Number;
  if constexpr (sizeof(V) == 2 * sizeof(Number)) {
    return both(v[0], v[1]);
  } else {
    typedef Number half __attribute__((vector_size(sizeof(V) / 2)));
    half low, high;
#if DI_AVX512  // GCC would take the whole vector through memory
    if constexpr (sizeof(V) == 64) {
      low = (half)_mm512_castsi512_si256((__m512i)v);
      high = (half)_mm512_extracti64x4_epi64((__m512i)v, 1);
      return folded(both(low, high), both);
    }
#endif
    std::memcpy(&low, &v, sizeof low);
    std::memcpy(&high, (const char*)&v + sizeof low, sizeof high);
    return folded(both(low, high), both);
  }
}

inline float sum(f32v v) {
  return folded(v, [](auto a, auto b) { return a + b; });
}

inline float largest(f32v v) {
  return folded(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Lane i: all lanes of v[i] put together, in one order for every i; v is overwritten.
template <int STEP = 1, typename V, typename F>
inline V each_folded(V* v, F&& both) {
  if constexpr (STEP == F32S) {
    return v[0];
  } else {
    i32v low, high;  // lanes of a pair of vectors that meet: those of the first, then of the second
    for (int i = 0; i < F32S; i++) {
      low[i] = i & STEP ? i - STEP + F32S : i;
      high[i] = i & STEP ? i + F32S : i + STEP;
    }
    for (int i = 0; i < F32S / (2 * STEP); i++)
      v[i] = both(__builtin_shuffle(v[2 * i], v[2 * i + 1], low),
                  __builtin_shuffle(v[2 * i], v[2 * i + 1], high));
    return each_folded<2 * STEP>(v, both);
  }
}

// The nearest integers, of ties the even one; anything where x is none or too large.
inline i32v to_integers(f32v x) {
#if DI_AVX512
  return (i32v)_mm512_cvtps_epi32((__m512)x);
#elif DI_AVX2
  return (i32v)_mm256_cvtps_epi32((__m256)x);
#else
  for (int i = 0; i < F32S; i++) x[i] = std::fabs(x[i]) < 0x1p23f ? x[i] : 0;
  return __builtin_convertvector((x + 0x1.8p23f) - 0x1.8p23f, i32v);
#endif
}

// Round to the nearest integer, ties to even.
inline f32v nearest(f32v x) {
  const f32v magic = splat(0x1.8p23f);
  return (x + magic) - magic;
}

// e^x; at most 2 ulp off between -87 and 88, clamped outside.
inline f32v vexp(f32v x) {
  x = vmin(vmax(x, splat(-87.3f)), splat(88.0f));
  f32v n = nearest(x * splat(1.44269504f));
  f32v r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  f32v p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  i32v exponent = (__builtin_convertvector(n, i32v) + 127) << 23;
  return p * (f32v)exponent;
}

}  // namespace di
