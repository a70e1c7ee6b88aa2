// What attention does with one block of positions: scores, softmax, weighted values. Each number is
// made by the same operations however many rows are computed together.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace di {

constexpr int BLOCK = 64;  // positions; blocks begin at multiples of it
constexpr int LANES = BLOCK / F32S;
constexpr int MAX_ROWS = 6;  // rows whose sums fit into registers together

// Numbers as pages hold them.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// x in every lane; `0 + x` would be an addition, since it turns -0 into 0.
inline f32v all(float x) { return x - f32v{}; }

inline f32v load_as(const float* p) { return load(p); }
inline f32v load_as(const Bf16* p) { return load_bf16(&p->bits); }
inline f32v load_as(const F16* p) { return load_f16(&p->bits); }
inline f32v load_as(const int8_t* p) {
#if DI_AVX512
  return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif DI_AVX2
  return (f32v)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  f32v v;
  for (int i = 0; i < F32S; i++) v[i] = p[i];
  return v;
#endif
}

inline float load_one(const float* p) { return *p; }
inline float load_one(const Bf16* p) { return from_bf16(p->bits); }
inline float load_one(const F16* p) { return from_f16(p->bits); }
inline float load_one(const int8_t* p) { return *p; }

// 2^x for x <= 0, within 2 ulp; 0 below -126. NaN stays NaN.
inline f32v power_of_two(f32v x) {
  const f32v magic = all(0x1.8p23f), whole = x + magic, f = x - (whole - magic);
  f32v p = all(1.5353358e-4f);
  p = fma(p, f, all(1.3398876e-3f));
  p = fma(p, f, all(9.6184374e-3f));
  p = fma(p, f, all(5.5503324e-2f));
  p = fma(p, f, all(2.4022648e-1f));
  p = fma(p, f, all(6.9314720e-1f));
  p = fma(p, f, all(1.0f));
  const f32v scaled = (f32v)((i32v)p + ((i32v)whole << 23));
  return x < all(-126.0f) ? f32v{} : scaled;
}

inline float power_of_two(float x) { return power_of_two(all(x))[0]; }

// Scores of R rows against C vectors of positions: products added in ascending dimension.
template <typename E, int R, int C>
inline void score_part(const float* q, int64_t q_stride, const E* k, int64_t k_stride, int dim,
                       float* scores) {
  f32v sums[R][C] = {};
  for (int d = 0; d < dim; d++) {
    f32v keys[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) keys[c] = load_as(k + d * k_stride + c * F32S);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const f32v x = all(q[r * q_stride + d]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = fma(x, keys[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(scores + r * BLOCK + c * F32S, sums[r][c]);
}

// Call `work(std::integral_constant<int, R>, first row)` for tiles of at most MAX_ROWS rows.
template <typename F>
inline void row_tiles(int rows, F&& work) {
  for (int r = 0; r < rows; r += MAX_ROWS) {
    switch (std::min(rows - r, MAX_ROWS)) {
      case 1: work(std::integral_constant<int, 1>(), r); break;
      case 2: work(std::integral_constant<int, 2>(), r); break;
      case 3: work(std::integral_constant<int, 3>(), r); break;
      case 4: work(std::integral_constant<int, 4>(), r); break;
      case 5: work(std::integral_constant<int, 5>(), r); break;
      default: work(std::integral_constant<int, 6>(), r);
    }
  }
}

// How many vectors R rows take at once, for two in three registers to hold sums.
constexpr int columns(int rows) { return rows == 1 ? 8 : rows <= 3 || DI_AVX512 ? 4 : 2; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

template <typename E, int R>
void score_rows(const float* q, int64_t q_stride, const E* k, int64_t k_stride, int dim, int lanes,
                float* scores) {
  constexpr int C = smaller(columns(R), LANES);
  for (int lane = 0; lane < lanes; lane += C * F32S)
    score_part<E, R, C>(q, q_stride, k + lane, k_stride, dim, scores + lane);
}

// Weighted values of R rows, C vectors of them: added in ascending position from `low` to `high`.
template <typename E, int R, int C>
inline void mix_part(const float* weights, const E* v, int64_t v_stride, int low, int high,
                     float* out, int64_t out_stride) {
  f32v sums[R][C] = {};
  for (int j = low; j < high; j++) {
    f32v values[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) values[c] = load_as(v + j * v_stride + c * F32S);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const f32v x = all(weights[r * BLOCK + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = fma(x, values[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * out_stride + c * F32S, sums[r][c]);
}

template <typename E, int R>
void mix_rows(const float* weights, const E* v, int64_t v_stride, int low, int high, float* out,
              int width) {
  constexpr int C = columns(R);
  int at = 0;
  for (; at + C * F32S <= width; at += C * F32S)
    mix_part<E, R, C>(weights, v + at, v_stride, low, high, out + at, width);
  for (; at < width; at += F32S)
    mix_part<E, R, 1>(weights, v + at, v_stride, low, high, out + at, width);
}

// The same for any number of rows, as many at once as fit.
template <typename E>
void score(const float* q, int64_t q_stride, int rows, const E* k, int64_t k_stride, int dim,
           int lanes, float* scores) {
  row_tiles(rows, [&](auto count, int r) {
    score_rows<E, count>(q + r * q_stride, q_stride, k, k_stride, dim, lanes, scores + r * BLOCK);
  });
}

template <typename E>
void mix(const float* weights, int rows, const E* v, int64_t v_stride, int low, int high,
         float* out, int width) {
  row_tiles(rows, [&](auto count, int r) {
    mix_rows<E, count>(weights + r * BLOCK, v, v_stride, low, high, out + int64_t(r) * width, width);
  });
}

// Scores of one row and block become weights relative to the largest, which is returned; `mass` is
// their sum, lane by lane. Hidden positions carry -inf and get weight 0.
inline float weigh(float* scores, f32v& mass) {
  f32v top = load(scores);
  for (int i = 1; i < LANES; i++) top = vmax(top, load(scores + i * F32S));
  const float peak = largest(top);
  mass = f32v{};
  for (int i = 0; i < LANES; i++) {
    const f32v weight = power_of_two(load(scores + i * F32S) - all(peak));
    store(scores + i * F32S, weight);
    mass += weight;
  }
  return peak;
}

// softcap * tanh(score / softcap), in units of log2(e).
inline f32v capped(f32v score, float softcap) {
  constexpr float LOG2E = 1.44269504f;
  const f32v y = score * all(1 / softcap);
  const f32v size = y < f32v{} ? -y : y;
  const f32v e = power_of_two(size * all(-2 * LOG2E));
  const f32v t = (all(1.0f) - e) / (all(1.0f) + e);
  return (y < f32v{} ? -t : t) * all(softcap * LOG2E);
}

inline void cap(float* scores, float softcap) {
  for (int i = 0; i < LANES; i++)
    store(scores + i * F32S, capped(load(scores + i * F32S), softcap));
}

}  // namespace di
