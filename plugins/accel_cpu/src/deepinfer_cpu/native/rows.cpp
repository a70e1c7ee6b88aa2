// Entry points of single ops on rows. Rows of x begin x_stride numbers apart, results are dense.
#include "rows.h"

#include "pool.h"
#include "scratch.h"

using namespace di;

namespace {

// Call `work(row)` for every row; a team is worth its start from some thousand numbers on.
template <typename F>
void each_row(int64_t rows, int64_t size, F&& work) {
  Call call;
  if (rows * size < 16384) {
    for (int64_t row = 0; row < rows; row++) work(row);
    return;
  }
  const int64_t chunk = 4096 / size + 1;
  together([&](Team& team) {
    for (int64_t at = team.next() * chunk; at < rows; at = team.next() * chunk)
      for (int64_t row = at; row < at + chunk && row < rows; row++) work(row);
  });
}

}  // namespace

DI_EXPORT void di_rms_norm(const float* x, int64_t x_stride, const float* weight, float eps,
                           int64_t rows, int64_t size, float* out) {
  each_row(rows, size,
           [&](int64_t r) { rms_norm(x + r * x_stride, weight, eps, size, out + r * size); });
}

// x += delta, out = norm of x.
DI_EXPORT void di_add_rms_norm(float* x, int64_t x_stride, const float* delta,
                               int64_t delta_stride, const float* weight, float eps, int64_t rows,
                               int64_t size, float* out) {
  each_row(rows, size, [&](int64_t r) {
    float* row = x + r * x_stride;
    for (int64_t i = 0; i < size; i++) row[i] += delta[r * delta_stride + i];
    rms_norm(row, weight, eps, size, out + r * size);
  });
}

// x: [rows, heads, size], rows x_stride and heads head_stride apart; out dense; cos, sin: [rows, half].
DI_EXPORT void di_rope(const float* x, int64_t x_stride, int64_t head_stride, const float* cos,
                       const float* sin, int64_t rows, int64_t heads, int64_t size, int64_t half,
                       float* out) {
  each_row(rows, heads * size, [&](int64_t r) {
    for (int64_t h = 0; h < heads; h++) {
      float* head = out + (r * heads + h) * size;
      std::memcpy(head, x + r * x_stride + h * head_stride, size_t(size) * 4);
      rotate(head, cos + r * half, sin + r * half, half);
    }
  });
}

// gate_up: [rows, 2 * size]; out: [rows, size].
DI_EXPORT void di_silu_mul(const float* gate_up, int64_t stride, int64_t rows, int64_t size,
                           float* out) {
  each_row(rows, size, [&](int64_t r) {
    const float* row = gate_up + r * stride;
    silu_mul(row, row + size, size, out + r * size);
  });
}
