// Panels of integer weights times some rows, whose numbers have 16 bits or 8.
//
// Every output is made by the same operations whatever the number of rows: in each group of 32
// inputs integers are summed up exactly, for every span that shares an activation scale; spans and
// groups are then put together in f32, ascending. Where registers are many, two panels are made at
// once, so that an activation that was loaded serves twice.
#pragma once

#include "linear.h"

namespace di {

constexpr int64_t AHEAD = 2560;        // bytes
constexpr int STEP_BYTES = 4 * PANEL;  // of the weights of a step, unpacked
constexpr int CHUNKS = 4;              // of a group

// Weights of a group, of P panels, as they are kept.
template <int FORMAT, typename X, int P>
struct Packed {
  const uint8_t* at;  // the group in the first panel
  int64_t stride;     // from panel to panel

  // Panels follow each other in memory, and few are long enough for the hardware to notice. Those
  // that are read together are passed over: `left` bytes of this one are to come.
  void fetch_ahead(int64_t left) const {
    const uint8_t* next = at + AHEAD + (left <= AHEAD ? (P - 1) * stride : 0);
    for (int p = 0; p < P; p++)
      for (int line = 0; line < int(group_bytes(FORMAT)); line += 64)
        __builtin_prefetch(next + p * stride + line);
  }

  // Call `use(step, weights)` for every X::STEP inputs of a quarter of the group.
  template <typename F>
  void each_step(int chunk, F&& use) const {
    pairs w[P * VECS];
    if constexpr (FORMAT == Q8_0) {
#pragma GCC unroll 4
      for (int pair = chunk * 4; pair < chunk * 4 + 4; pair++) {
        for (int i = 0; i < P * VECS; i++)
          w[i] = widen((const int8_t*)data(i / VECS) + pair * 2 * PANEL + i % VECS * 2 * F32S);
        use(pair, w);
      }
    } else {
      pairs raw[P * VECS];
      for (int i = 0; i < P * VECS; i++)
        raw[i] = load_pairs(data(i / VECS) + chunk * 4 * PANEL + i % VECS * 4 * F32S);
      const auto each = [&](int step, auto&& take) {
        for (int i = 0; i < P * VECS; i++) w[i] = take(raw[i]);
        use(step, w);
      };
      if constexpr (X::STEP == 4) {
        each(chunk * 2, low_nibbles);
        each(chunk * 2 + 1, high_nibbles);
      } else {
        each(chunk * 4, nibbles<0>);
        each(chunk * 4 + 1, nibbles<1>);
        each(chunk * 4 + 2, nibbles<2>);
        each(chunk * 4 + 3, nibbles<3>);
      }
    }
  }

 private:
  const uint8_t* data(int panel) const {
    return at + panel * stride + (FORMAT == Q4_1 ? 64 : 32);
  }
};

// The same, unpacked before.
template <typename X, int P>
struct Unpacked {
  static constexpr int STEPS = GROUP / X::STEP;

  alignas(64) uint8_t numbers[STEPS][P * STEP_BYTES];

  template <typename Weights>
  explicit Unpacked(const Weights& weights) {
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      weights.each_step(chunk, [&](int step, const pairs* w) {
        for (int i = 0; i < P * VECS; i++) store_pairs(numbers[step] + i * 4 * F32S, w[i]);
      });
  }

  template <typename F>
  void each_step(int chunk, F&& use) const {
#pragma GCC unroll 4
    for (int step = chunk * (STEPS / CHUNKS); step < (chunk + 1) * (STEPS / CHUNKS); step++) {
      pairs w[P * VECS];
      for (int i = 0; i < P * VECS; i++) w[i] = load_pairs(numbers[step] + i * 4 * F32S);
      use(step, w);
    }
  }
};

// Scales of a group's weights.
template <int FORMAT, int P>
struct Scales {
  f32v scale[P * VECS], minimum[P * VECS];

  Scales(const uint8_t* group, int64_t stride) {
    for (int i = 0; i < P * VECS; i++) {
      const uint16_t* d = (const uint16_t*)(group + i / VECS * stride) + i % VECS * F32S;
      scale[i] = load_f16(d);
      if constexpr (FORMAT == Q4_1) minimum[i] = load_f16(d + PANEL);
      if constexpr (FORMAT == Q4_0) minimum[i] = scale[i] * splat(-8.0f);
    }
  }
};

// The activations of one group, from some row on.
template <typename X>
struct Activations {
  const typename X::Number* quants;  // [rows, GROUP]
  const float* scales;               // [rows, X::SPANS]
  const float* sums;                 // [rows]

  Activations(const Rows& rows, int64_t row, int64_t group)
      : quants((const typename X::Number*)rows.quants + (group * rows.capacity + row) * GROUP),
        scales(rows.scales + (group * rows.capacity + row) * X::SPANS),
        sums(rows.sums + group * rows.capacity + row) {}
};

// Add what one group gives to R rows of P panels; out: [R, P, PANEL].
template <int FORMAT, typename X, int R, int P, typename Weights>
inline void add_group(const Weights& weights, const Scales<FORMAT, P>& d, const Activations<X>& x,
                      float* out) {
  constexpr int STEPS = GROUP / X::STEP / X::SPANS, WIDE = P * VECS;
  f32v part[R][WIDE];
#pragma GCC unroll 2
  for (int span = 0; span < X::SPANS; span++) {
    pairs sum[R][WIDE];
#pragma GCC unroll 4
    for (int chunk = span * CHUNKS / X::SPANS; chunk < (span + 1) * CHUNKS / X::SPANS; chunk++)
      weights.each_step(chunk, [&](int step, const pairs* w) {
        for (int r = 0; r < R; r++) {
          const pairs same = same_lane(x.quants + r * GROUP + X::STEP * step);
          for (int i = 0; i < WIDE; i++)
            sum[r][i] = step % STEPS ? X::add(sum[r][i], w[i], same) : X::first(w[i], same);
        }
      });
    for (int r = 0; r < R; r++) {
      const f32v scale = splat(x.scales[r * X::SPANS + span]);
      for (int i = 0; i < WIDE; i++) {
        const f32v whole = to_floats(X::total(sum[r][i]));
        part[r][i] = span ? fma(whole, scale, part[r][i]) : whole * scale;
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < WIDE; i++) {
      float* to = out + (r * WIDE + i) * F32S;
      f32v total = fma(part[r][i], d.scale[i], load(to));
      if constexpr (FORMAT != Q8_0) total = fma(d.minimum[i], splat(x.sums[r]), total);
      store(to, total);
    }
}

// On its own: where the compiler sees that weights stay the same from rows to rows, it keeps them in
// registers and the sums in memory.
template <int FORMAT, typename X, int R, int P, typename Weights>
__attribute__((noinline)) void add_group_apart(const Weights& weights, const Scales<FORMAT, P>& d,
                                               const Activations<X>& x, float* out) {
  add_group<FORMAT, X, R, P>(weights, d, x, out);
}

// The same for the rows [row, last), R at a time and then fewer.
template <int FORMAT, typename X, int R, int P, typename Weights>
inline void add_group_to(const Weights& weights, const Scales<FORMAT, P>& d, const Rows& rows,
                         int64_t row, int64_t last, int64_t g, float* out) {
  for (; row + R <= last; row += R, out += R * P * PANEL)
    add_group_apart<FORMAT, X, R, P>(weights, d, Activations<X>(rows, row, g), out);
  if constexpr (R > 1) {
    if (row < last) add_group_to<FORMAT, X, R / 2, P>(weights, d, rows, row, last, g, out);
  }
}

// One row times one panel.
template <int FORMAT, typename X>
void integer_panel(const Linear& linear, const Rows& rows, int64_t panel, int64_t row, float* out) {
  const int64_t stride = linear.panel_bytes();
  const uint8_t* head = linear.panels + panel * stride;
  alignas(64) float total[PANEL] = {};
  for (int64_t g = 0; g < linear.k / GROUP; g++) {
    const Packed<FORMAT, X, 1> packed{head + g * group_bytes(FORMAT), stride};
    packed.fetch_ahead(stride);
    add_group<FORMAT, X, 1, 1>(packed, Scales<FORMAT, 1>(packed.at, stride),
                               Activations<X>(rows, row, g), total);
  }
  std::memcpy(out, total, sizeof total);
}

// Rows [first, last) times P panels; out: [last - first, P, PANEL].
template <int FORMAT, typename X, int P>
void integer_panels(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                    int64_t last, float* out) {
  // Rows whose sums fit into registers; those of spans take as many again.
  constexpr int MOST = DI_AVX512 ? 8 : 4, UNPACKED_MOST = DI_AVX512 && X::SPANS > 1 ? 4 : MOST;
  constexpr int64_t BYTES = group_bytes(FORMAT);
  if (last - first == 1) {  // limited by memory, which is read fastest in one line
    for (int p = 0; p < P; p++)
      integer_panel<FORMAT, X>(linear, rows, panel + p, first, out + p * PANEL);
    return;
  }
  const int64_t groups = linear.k / GROUP, stride = linear.panel_bytes();
  const uint8_t* head = linear.panels + panel * stride;
  std::memset(out, 0, size_t(last - first) * P * PANEL * sizeof(float));
  for (int64_t g = 0; g < groups; g++) {
    const Packed<FORMAT, X, P> packed{head + g * BYTES, stride};
    const Scales<FORMAT, P> scales(packed.at, stride);
    packed.fetch_ahead(stride - g * BYTES);
    if (last - first <= MOST) {
      add_group_to<FORMAT, X, MOST>(packed, scales, rows, first, last, g, out);
    } else {
      const Unpacked<X, P> unpacked(packed);
      add_group_to<FORMAT, X, UNPACKED_MOST>(unpacked, scales, rows, first, last, g, out);
    }
  }
}

}  // namespace di
