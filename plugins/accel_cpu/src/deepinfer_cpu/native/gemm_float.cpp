// One panel of floating point weights times some rows, in f32.
#include "linear.h"

namespace di {
namespace {

inline f32v read(const uint16_t* p) { return load_bf16(p); }
inline f32v read(const float* p) { return load(p); }

template <int R, typename T>
inline void tile(const T* weights, int64_t k, const float* x, int64_t stride, float* out) {
  f32v total[R][VECS] = {};
  for (int64_t i = 0; i < k; i++) {
    f32v w[VECS];
    for (int v = 0; v < VECS; v++) w[v] = read(weights + i * PANEL + v * F32S);
    for (int r = 0; r < R; r++) {
      const f32v value = splat(x[r * stride + i]);
      for (int v = 0; v < VECS; v++) total[r][v] = fma(w[v], value, total[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECS; v++) store(out + r * PANEL + v * F32S, total[r][v]);
}

template <int R, typename T>
inline void row_tiles(const T* weights, int64_t k, const Rows& rows, int64_t first, int64_t last,
                      float* out) {
  int64_t row = first;
  for (; row + R <= last; row += R)
    tile<R>(weights, k, rows.floats + row * rows.stride, rows.stride, out + (row - first) * PANEL);
  if constexpr (R > 1) {
    if (row < last) row_tiles<R / 2>(weights, k, rows, row, last, out + (row - first) * PANEL);
  }
}

}  // namespace

void multiply_float(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                    int64_t last, float* out, void* room) {
  constexpr int MOST = DI_AVX512 ? 8 : 4;
  const uint8_t* head = linear.panels + panel * linear.panel_bytes();
  if (linear.format == F32)
    return row_tiles<MOST>((const float*)head, linear.k, rows, first, last, out);
  if (last - first <= MOST)
    return row_tiles<MOST>((const uint16_t*)head, linear.k, rows, first, last, out);
  float* wide = static_cast<float*>(room);
  for (int64_t i = 0; i < linear.k * PANEL; i += F32S)
    store(wide + i, load_bf16((const uint16_t*)head + i));
  row_tiles<MOST>(wide, linear.k, rows, first, last, out);
}

}  // namespace di
