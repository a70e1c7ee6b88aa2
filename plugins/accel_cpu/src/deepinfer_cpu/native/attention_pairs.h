// The same as in attention_kernels.h for pages of bfloat16, where the processor adds up products of
// pairs of such numbers: two dimensions of a key, or the values of two positions, meet in a lane of
// 32 bits. Queries and weights are rounded to bfloat16, sums are float32.
//
// A pair is added by one instruction, ascending, whether its numbers come from pages or from a
// block that was put into pairs before, and a hidden position adds zero; so the bits of a row do
// not depend on what is computed with it.
#pragma once

#include "attention_kernels.h"

#ifndef DI_BF16_PAIRS
#if DI_AVX512 && defined(__AVX512BF16__)
#define DI_BF16_PAIRS 1
#else
#define DI_BF16_PAIRS 0
#endif
#endif

namespace di {

#if DI_BF16_PAIRS
inline f32v add_pairs(f32v sum, i32v a, i32v b) {
  return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

inline i32v all_pairs(uint32_t pair) { return (i32v)_mm512_set1_epi32(int32_t(pair)); }

inline i32v load_whole(const uint32_t* p) { return (i32v)_mm512_loadu_si512(p); }

// Lane i: low[i] and high[i]; null = zeros.
inline i32v pairs_of(const Bf16* low, const Bf16* high) {
  const auto load = [](const Bf16* p) {
    return p ? _mm256_loadu_si256((const __m256i*)p) : _mm256_setzero_si256();
  };
  const __m512i a = _mm512_cvtepu16_epi32(load(low)), b = _mm512_cvtepu16_epi32(load(high));
  return (i32v)_mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

// 2^x for x <= 0 within 4e-6 of it, which weights in bfloat16 do not tell apart; 2^0 is 1.
inline f32v power_for_pairs(f32v x) {
  const f32v f = (f32v)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  f32v p = fma(all(1.3426684774e-2f), f, all(5.2242472768e-2f));
  p = fma(p, f, all(2.4128019810e-1f));
  p = fma(p, f, all(6.9304484129e-1f));
  p = fma(p, f, all(1.0f));
  return (f32v)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// What a row makes of a block's scores, as `weigh` does, for the positions [low, high): weights, which
// are stored in pairs of neighbours, their largest score and, lane by lane, their sum.
inline float weigh_pairs(const f32v* scores, int low, int high, uint32_t* pairs, float* mass) {
  const uint64_t seen = ~uint64_t(0) >> (BLOCK - high) & ~uint64_t(0) << low;
  const __m512 never = _mm512_set1_ps(-__builtin_inff());
  f32v part[LANES];
  for (int i = 0; i < LANES; i++)
    part[i] = (f32v)_mm512_mask_mov_ps(never, __mmask16(seen >> (i * F32S)), (__m512)scores[i]);
  const float peak = largest(vmax(vmax(part[0], part[1]), vmax(part[2], part[3])));
  f32v total{};
  for (int i = 0; i < LANES; i++) {
    part[i] = power_for_pairs(part[i] - all(peak));
    total += part[i];
  }
  for (int i = 0; i < LANES; i += 2)
    _mm512_storeu_si512(pairs + i * F32S / 2,
                        (__m512i)_mm512_cvtne2ps_pbh((__m512)part[i + 1], (__m512)part[i]));
  store(mass, total);
  return peak;
}

// Keys and values of one block in pages: dimension by dimension, position by position.
struct PagedPairs {
  const Bf16* keys;
  const Bf16* values;
  int64_t key_stride;
  int width;

  i32v key(int pair, int dim, int lane) const {
    const Bf16* low = keys + 2 * pair * key_stride + lane;
    return pairs_of(low, 2 * pair + 1 < dim ? low + key_stride : nullptr);
  }
  i32v value(int pair, int low, int high, int lane) const {
    const Bf16* first = values + int64_t(2 * pair) * width + lane;
    return pairs_of(2 * pair >= low ? first : nullptr, 2 * pair + 1 < high ? first + width : nullptr);
  }
};

// The same put into pairs: [pairs of dimensions, BLOCK] and [pairs of positions, width].
struct ReadyPairs {
  const uint32_t* keys;
  const uint32_t* values;
  int width;

  i32v key(int pair, int, int lane) const { return load_whole(keys + pair * BLOCK + lane); }
  i32v value(int pair, int, int, int lane) const { return load_whole(values + pair * width + lane); }
};

// Weights of R rows for a block. q: [rows, pairs] with `q_stride`; `seen(row)` gives the positions
// that a row sees, from and to; weights: [rows, BLOCK / 2], mass: [rows, F32S], top: [rows].
template <int R, typename View, typename F>
void weigh_rows(const uint32_t* q, int64_t q_stride, const View& view, int dim, float softcap,
                F&& seen, uint32_t* weights, float* mass, float* top) {
  f32v sums[R][LANES] = {};
  for (int pair = 0; pair < (dim + 1) / 2; pair++) {
    i32v keys[LANES];
#pragma GCC unroll 8
    for (int c = 0; c < LANES; c++) keys[c] = view.key(pair, dim, c * F32S);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const i32v x = all_pairs(q[r * q_stride + pair]);
#pragma GCC unroll 8
      for (int c = 0; c < LANES; c++) sums[r][c] = add_pairs(sums[r][c], x, keys[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    if (softcap)
      for (int c = 0; c < LANES; c++) sums[r][c] = capped(sums[r][c], softcap);
    const auto [low, high] = seen(r);
    top[r] = weigh_pairs(sums[r], low, high, weights + r * (BLOCK / 2), mass + r * F32S);
  }
}

// C vectors of weighted values of R rows, each given to `put(row, lane, values)`.
// weights: [rows, BLOCK / 2].
template <int R, int C, typename View, typename F>
inline void mix_pairs_part(const uint32_t* weights, const View& view, int low, int high, int lane,
                           F&& put) {
  f32v sums[R][C] = {};
  for (int pair = low / 2; pair < (high + 1) / 2; pair++) {
    i32v values[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) values[c] = view.value(pair, low, high, lane + c * F32S);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const i32v x = all_pairs(weights[r * (BLOCK / 2) + pair]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = add_pairs(sums[r][c], x, values[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) put(r, lane + c * F32S, sums[r][c]);
}

template <int R, typename View, typename F>
void mix_pairs(const uint32_t* weights, const View& view, int low, int high, F&& put) {
  constexpr int C = 4;
  int lane = 0;
  for (; lane + C * F32S <= view.width; lane += C * F32S)
    mix_pairs_part<R, C>(weights, view, low, high, lane, put);
  for (; lane < view.width; lane += F32S)
    mix_pairs_part<R, 1>(weights, view, low, high, lane, put);
}
#endif

}  // namespace di
