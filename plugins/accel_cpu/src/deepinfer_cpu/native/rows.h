// Ops on one row at a time.
#pragma once

#include "simd.h"

namespace di {

// x / sqrt(mean(x^2) + eps) * weight; out may be x.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
  f32v squares{};
  int64_t i = 0;
  for (; i + F32S <= size; i += F32S) {
    const f32v v = load(x + i);
    squares = fma(v, v, squares);
  }
  float total = sum(squares);
  for (int64_t j = i; j < size; j++) total += x[j] * x[j];
  const float factor = 1.0f / std::sqrt(total / float(size) + eps);
  for (i = 0; i + F32S <= size; i += F32S)
    store(out + i, load(x + i) * splat(factor) * load(weight + i));
  for (; i < size; i++) out[i] = x[i] * factor * weight[i];
}

// Rotate the leading 2 * half numbers of a head in place.
inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + F32S <= half; i += F32S) {
    const f32v a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

inline f32v silu(f32v x) { return x / (splat(1.0f) + vexp(-x)); }

// out = f(a, b) for `size` numbers; every number is computed alike wherever it stands.
template <typename F>
inline void each_vector(int64_t size, const float* a, const float* b, float* out, F&& f) {
  int64_t i = 0;
  for (; i + F32S <= size; i += F32S) store(out + i, f(load(a + i), load(b + i)));
  if (i == size) return;
  float parts[2][F32S] = {};
  std::memcpy(parts[0], a + i, size_t(size - i) * 4);
  std::memcpy(parts[1], b + i, size_t(size - i) * 4);
  store(parts[0], f(load(parts[0]), load(parts[1])));
  std::memcpy(out + i, parts[0], size_t(size - i) * 4);
}

inline void silu_mul(const float* gate, const float* up, int64_t size, float* out) {
  each_vector(size, gate, up, out, [](f32v g, f32v u) { return silu(g) * u; });
}

}  // namespace di
