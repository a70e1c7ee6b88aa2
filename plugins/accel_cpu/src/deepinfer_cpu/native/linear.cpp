// Entry points of single ops over packed weights.
#include "product.h"

using namespace di;

// y = x W^T + b.  x: [rows, k] with row stride x_stride, out: [rows, n] likewise.
DI_EXPORT void di_linear(const Linear* linear, const float* x, int64_t x_stride, int64_t rows,
                         float* out, int64_t out_stride) {
  Call call;
  const Workspace space(call, rows, linear->k, num_threads());
  together([&](Team& team) {
    each_row(team, rows, [&](int64_t row) { space.put(*linear, row, x + row * x_stride); });
    team.barrier();
    product(*linear, space.rows(rows, linear->k), space, team,
            [&](int64_t row, int64_t begin, int64_t count, const float* values) {
              std::memcpy(out + row * out_stride + begin, values, size_t(count) * 4);
            });
  });
}
