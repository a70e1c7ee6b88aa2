#include "gemm_int.h"

#include <algorithm>

namespace di {
namespace {

constexpr int AT_ONCE = 16;  // spans

// Spans of numbers that share a scale each, at most AT_ONCE of them. `quants_at(span)` says where a
// span's integers go; scales and sums of its numbers are given back.
template <typename X, typename F>
void quantize_spans(const float* x, int count, F&& quants_at, float* scales, float* sums) {
  typedef typename X::Number narrow __attribute__((vector_size(F32S * sizeof(typename X::Number))));
  constexpr int SPAN = GROUP / X::SPANS;
  alignas(64) float factors[AT_ONCE];
  i32v parts[AT_ONCE] = {};
  for (int span = 0; span < count; span++) {
    i32v& most = parts[span];  // bits without sign: in the order of sizes, infinity and NaN last
    for (int i = 0; i < SPAN; i += F32S) {
      const i32v size = (i32v)load(x + span * SPAN + i) & 0x7fffffff;
      most = size > most ? size : most;
    }
  }
  for (int i = 0; i < AT_ONCE; i += F32S) {
    const f32v peak = (f32v)each_folded(parts + i, [](i32v a, i32v b) { return a > b ? a : b; });
    store(scales + i, peak / splat(X::MOST) + (peak - peak));
    store(factors + i, peak > splat(0x1p-100f) ? splat(X::MOST) / peak : f32v{});
  }
  for (int span = 0; span < count; span++) {
    const f32v factor = splat(factors[span]);
    typename X::Number* to = quants_at(span);
    i32v total{};
    for (int i = 0; i < SPAN; i += F32S) {
      const i32v whole = to_integers(load(x + span * SPAN + i) * factor);
      const narrow packed = __builtin_convertvector(whole, narrow);
      std::memcpy(to + i, &packed, sizeof packed);
      total += whole;
    }
    parts[span] = total;
  }
  for (int i = 0; i < AT_ONCE; i += F32S) {
    const i32v total = each_folded(parts + i, [](i32v a, i32v b) { return a + b; });
    store(sums + i, load(scales + i) * __builtin_convertvector(total, f32v));
  }
}

template <typename X>
void quantize(const float* x, int64_t count, int64_t capacity, void* quants, float* scales,
              float* sums) {
  constexpr int SPAN = GROUP / X::SPANS;
  const int64_t spans = count / SPAN;
  for (int64_t first = 0; first < spans; first += AT_ONCE) {
    const int some = int(std::min<int64_t>(AT_ONCE, spans - first));
    const auto place = [&](int64_t span) { return span / X::SPANS * capacity; };
    alignas(64) float scale[AT_ONCE], total[AT_ONCE];
    quantize_spans<X>(
        x + first * SPAN, some,
        [&](int span) {
          return static_cast<typename X::Number*>(quants) + place(first + span) * GROUP +
                 (first + span) % X::SPANS * SPAN;
        },
        scale, total);
    for (int span = 0; span < some; span += X::SPANS) {
      float together = 0;
      for (int i = 0; i < X::SPANS; i++) {
        scales[place(first + span) * X::SPANS + i] = scale[span + i];
        together += total[span + i];
      }
      sums[place(first + span)] = together;
    }
  }
}

}  // namespace

void quantize_row(int32_t bits, const float* x, int64_t count, int64_t capacity, void* quants,
                  float* scales, float* sums) {
  (bits == 8 ? quantize<Bytes> : quantize<Words>)(x, count, capacity, quants, scales, sums);
}

void multiply_integer(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                      int64_t last, float* out) {
  const bool bytes = linear.bits == 8;
  const auto multiply =
      linear.format == Q4_0   ? bytes ? integer_panel<Q4_0, Bytes> : integer_panel<Q4_0, Words>
      : linear.format == Q4_1 ? bytes ? integer_panel<Q4_1, Bytes> : integer_panel<Q4_1, Words>
                              : integer_panel<Q8_0, Words>;
  multiply(linear, rows, panel, first, last, out);
}

}  // namespace di
