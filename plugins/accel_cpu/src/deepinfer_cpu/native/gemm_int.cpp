#include "gemm_int.h"

namespace di {
namespace {

// A span of numbers that share a scale; returns their sum.
template <typename X>
float quantize_span(const float* x, typename X::Number* quants, float& scale) {
  constexpr int SPAN = GROUP / X::SPANS;
  f32v part[SPAN / F32S], most{}, poison{};
  for (int i = 0; i < SPAN / F32S; i++) {
    part[i] = load(x + i * F32S);
    most = vmax(most, vmax(part[i], -part[i]));
    poison += part[i] * splat(0.0f);
  }
  const float peak = largest(most);
  scale = peak / X::MOST + sum(poison);
  const f32v factor = splat(peak > 0x1p-100f ? X::MOST / peak : 0.0f);
  int32_t rounded[SPAN];
  i32v total{};
  for (int i = 0; i < SPAN / F32S; i++) {
    const f32v clamped = vmax(vmin(part[i] * factor, splat(X::MOST)), splat(-X::MOST));
    const i32v whole = __builtin_convertvector(nearest(clamped), i32v);
    std::memcpy(rounded + i * F32S, &whole, sizeof whole);
    total += whole;
  }
  int32_t count = 0;
  for (int i = 0; i < F32S; i++) count += total[i];
  for (int i = 0; i < SPAN; i++) quants[i] = typename X::Number(rounded[i]);
  return scale * float(count);
}

template <typename X>
void quantize(const float* x, int64_t k, void* quants, float* scales, float* sums) {
  typename X::Number* to = static_cast<typename X::Number*>(quants);
  constexpr int SPAN = GROUP / X::SPANS;
  for (int64_t g = 0; g < k / GROUP; g++) {
    float total = 0;
    for (int span = 0; span < X::SPANS; span++, x += SPAN, to += SPAN)
      total += quantize_span<X>(x, to, *scales++);
    sums[g] = total;
  }
}

}  // namespace

void quantize_row(int32_t bits, const float* x, int64_t k, void* quants, float* scales,
                  float* sums) {
  (bits == 8 ? quantize<Bytes> : quantize<Words>)(x, k, quants, scales, sums);
}

void multiply_integer(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                      int64_t last, float* out, void* room) {
  const bool bytes = linear.bits == 8;
  const auto multiply =
      linear.format == Q4_0   ? bytes ? integer_panel<Q4_0, Bytes> : integer_panel<Q4_0, Words>
      : linear.format == Q4_1 ? bytes ? integer_panel<Q4_1, Bytes> : integer_panel<Q4_1, Words>
                              : integer_panel<Q8_0, Words>;
  multiply(linear, rows, panel, first, last, out, room);
}

}  // namespace di
