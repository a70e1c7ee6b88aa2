#include "gemm_int.h"

namespace di {

void quantize_row(const float* x, int64_t k, int16_t* quants, float* scales, float* sums) {
  for (int64_t g = 0; g < k / GROUP; g++, x += GROUP, quants += GROUP) {
    f32v part[GROUP / F32S], most{}, poison{};
    for (int i = 0; i < GROUP / F32S; i++) {
      part[i] = load(x + i * F32S);
      most = vmax(most, vmax(part[i], -part[i]));
      poison += part[i] * splat(0.0f);
    }
    const float peak = largest(most);
    scales[g] = peak / 32767.0f + sum(poison);
    const f32v factor = splat(peak > 0x1p-100f ? 32767.0f / peak : 0.0f);
    int32_t total = 0;
    for (int i = 0; i < GROUP / F32S; i++) {
      const f32v clamped = vmax(vmin(part[i] * factor, splat(32767.0f)), splat(-32767.0f));
      const i32v rounded = __builtin_convertvector(nearest(clamped), i32v);
      for (int j = 0; j < F32S; j++) {
        quants[i * F32S + j] = int16_t(rounded[j]);
        total += rounded[j];
      }
    }
    sums[g] = scales[g] * float(total);
  }
}

void multiply_integer(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                      int64_t last, float* out, void* room) {
  switch (linear.format) {
    case Q4_0: return integer_panel<Q4_0>(linear, rows, panel, first, last, out, room);
    case Q4_1: return integer_panel<Q4_1>(linear, rows, panel, first, last, out, room);
    default: return integer_panel<Q8_0>(linear, rows, panel, first, last, out, room);
  }
}

}  // namespace di
