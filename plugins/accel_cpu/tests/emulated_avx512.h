// The AVX-512 intrinsics that the kernels use, computed by SIMDe (libsimde-dev) or, where its
// release lacks them, by plain loops: for machines without those instructions. Included before
// everything else, together with -DDI_AVX512=1.
#pragma once

#include <immintrin.h>

#define SIMDE_X86_AVX512F_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512BW_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512VL_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512DQ_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512VNNI_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

template <typename To, typename From>
inline To di_convert(From from) {
  return (To)__builtin_convertvector(from, To);
}

typedef float di_f32x16 __attribute__((vector_size(64), may_alias));
typedef int32_t di_i32x16 __attribute__((vector_size(64), may_alias));
typedef uint32_t di_u32x16 __attribute__((vector_size(64), may_alias));
typedef int16_t di_i16x32 __attribute__((vector_size(64), may_alias));
typedef uint16_t di_u16x16 __attribute__((vector_size(32), may_alias));
typedef int8_t di_i8x32 __attribute__((vector_size(32), may_alias));
typedef int8_t di_i8x16 __attribute__((vector_size(16), may_alias));

#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(v) ((__m512)di_convert<di_f32x16>((di_i32x16)(v)))
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(v) ((__m512i)di_convert<di_u32x16>((di_u16x16)(v)))
#undef _mm512_cvtepi8_epi16
#define _mm512_cvtepi8_epi16(v) ((__m512i)di_convert<di_i16x32>((di_i8x32)(v)))
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(v) ((__m512i)di_convert<di_i32x16>((di_i8x16)(v)))

inline __m512 di_cvtph_ps(__m256i halves) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  di_f32x16 out;
  for (int i = 0; i < 8; i++) out[i] = low[i], out[i + 8] = high[i];
  return (__m512)out;
}
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(v) di_cvtph_ps(v)

inline __m512i di_cvtps_epi32(__m512 v) {
  di_i32x16 out;
  for (int i = 0; i < 16; i++) out[i] = int32_t(__builtin_nearbyintf(((di_f32x16)v)[i]));
  return (__m512i)out;
}
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(v) di_cvtps_epi32(v)
