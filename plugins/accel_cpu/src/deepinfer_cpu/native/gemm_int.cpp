#include "gemm_int.h"

namespace di {
namespace {

// A span of numbers that share a scale; returns their sum.
template <typename X>
float quantize_span(const float* x, typename X::Number* quants, float& scale) {
  typedef typename X::Number narrow __attribute__((vector_size(F32S * sizeof(typename X::Number))));
  constexpr int SPAN = GROUP / X::SPANS;
  f32v part[SPAN / F32S];
  i32v most{};  // bits without sign: in the order of sizes, infinity and NaN last
  for (int i = 0; i < SPAN / F32S; i++) {
    part[i] = load(x + i * F32S);
    const i32v size = (i32v)part[i] & 0x7fffffff;
    most = size > most ? size : most;
  }
  const float peak = from_bits(uint32_t(largest(most)));
  scale = peak / X::MOST + (peak - peak);
  const f32v factor = splat(peak > 0x1p-100f ? X::MOST / peak : 0.0f);
  i32v total{};
  for (int i = 0; i < SPAN / F32S; i++) {
    const f32v clamped = vmax(vmin(part[i] * factor, splat(X::MOST)), splat(-X::MOST));
    const i32v whole = __builtin_convertvector(nearest(clamped), i32v);
    const narrow packed = __builtin_convertvector(whole, narrow);
    std::memcpy(quants + i * F32S, &packed, sizeof packed);
    total += whole;
  }
  return scale * float(sum(total));
}

template <typename X>
void quantize(const float* x, int64_t count, int64_t capacity, void* quants, float* scales,
              float* sums) {
  typename X::Number* to = static_cast<typename X::Number*>(quants);
  constexpr int SPAN = GROUP / X::SPANS;
  for (int64_t g = 0; g < count / GROUP; g++) {
    float total = 0;
    for (int span = 0; span < X::SPANS; span++, x += SPAN)
      total += quantize_span<X>(x, to + g * capacity * GROUP + span * SPAN,
                                scales[g * capacity * X::SPANS + span]);
    sums[g * capacity] = total;
  }
}

template <int P>
void multiply_some(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                   int64_t last, float* out) {
  const bool bytes = linear.bits == 8;
  const auto multiply =
      linear.format == Q4_0   ? bytes ? integer_panels<Q4_0, Bytes, P> : integer_panels<Q4_0, Words, P>
      : linear.format == Q4_1 ? bytes ? integer_panels<Q4_1, Bytes, P> : integer_panels<Q4_1, Words, P>
                              : integer_panels<Q8_0, Words, P>;
  multiply(linear, rows, panel, first, last, out);
}

}  // namespace

void quantize_row(int32_t bits, const float* x, int64_t count, int64_t capacity, void* quants,
                  float* scales, float* sums) {
  (bits == 8 ? quantize<Bytes> : quantize<Words>)(x, count, capacity, quants, scales, sums);
}

void multiply_integer(const Linear& linear, const Rows& rows, int64_t panel, int64_t count,
                      int64_t first, int64_t last, float* out) {
  (count == TOGETHER ? multiply_some<TOGETHER> : multiply_some<1>)(linear, rows, panel, first,
                                                                   last, out);
}

}  // namespace di
