// Panels of integer weights times some rows, whose numbers have 16 bits or 8.
//
// Every output is made by the same operations whatever the number of rows: in each group of 32
// inputs integers are summed up exactly, for every span that shares an activation scale; spans and
// groups are then put together in f32, ascending. One panel at a time: two would let an activation
// that was loaded serve twice, but what limits is arithmetic, and half of the rows' sums would fit.
#pragma once

#include "linear.h"

namespace di {

constexpr int64_t AHEAD = 2560;        // bytes
constexpr int STEP_BYTES = 4 * PANEL;  // of the weights of a step, unpacked
constexpr int CHUNKS = 4;              // of a group

// Weights of a group as they are kept.
template <int FORMAT, typename X>
struct Packed {
  const uint8_t* at;

  // Panels follow each other in memory, and few are long enough for the hardware to notice.
  void fetch_ahead() const {
    for (int line = 0; line < int(group_bytes(FORMAT)); line += 64)
      __builtin_prefetch(at + AHEAD + line);
  }

  // Call `use(step, weights)` for every X::STEP inputs of a quarter of the group.
  template <typename F>
  void each_step(int chunk, F&& use) const {
    pairs w[VECS];
    if constexpr (FORMAT == Q8_0) {
#pragma GCC unroll 4
      for (int pair = chunk * 4; pair < chunk * 4 + 4; pair++) {
        for (int i = 0; i < VECS; i++)
          w[i] = widen((const int8_t*)data() + pair * 2 * PANEL + i * 2 * F32S);
        use(pair, w);
      }
    } else {
      pairs raw[VECS];
      for (int i = 0; i < VECS; i++)
        raw[i] = load_pairs(data() + chunk * 4 * PANEL + i * 4 * F32S);
      const auto each = [&](int step, auto&& take) {
        for (int i = 0; i < VECS; i++) w[i] = take(raw[i]);
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
  const uint8_t* data() const { return at + (FORMAT == Q4_1 ? 64 : 32); }
};

// The same, unpacked before.
template <typename X>
struct Unpacked {
  static constexpr int STEPS = GROUP / X::STEP;

  alignas(64) uint8_t numbers[STEPS][STEP_BYTES];

  template <typename Weights>
  explicit Unpacked(const Weights& weights) {
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      weights.each_step(chunk, [&](int step, const pairs* w) {
        for (int i = 0; i < VECS; i++) store_pairs(numbers[step] + i * 4 * F32S, w[i]);
      });
  }

  template <typename F>
  void each_step(int chunk, F&& use) const {
#pragma GCC unroll 4
    for (int step = chunk * (STEPS / CHUNKS); step < (chunk + 1) * (STEPS / CHUNKS); step++) {
      pairs w[VECS];
      for (int i = 0; i < VECS; i++) w[i] = load_pairs(numbers[step] + i * 4 * F32S);
      use(step, w);
    }
  }
};

// Scales of a group's weights.
template <int FORMAT>
struct Scales {
  f32v scale[VECS], minimum[VECS];

  explicit Scales(const uint8_t* group) {
    for (int i = 0; i < VECS; i++) {
      const uint16_t* d = (const uint16_t*)group + i * F32S;
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

// Add what one group gives to R rows; out: [R, PANEL].
template <int FORMAT, typename X, int R, typename Weights>
inline void add_group(const Weights& weights, const Scales<FORMAT>& d, const Activations<X>& x,
                      float* out) {
  constexpr int STEPS = GROUP / X::STEP / X::SPANS;
  f32v part[R][VECS];
#pragma GCC unroll 2
  for (int span = 0; span < X::SPANS; span++) {
    pairs sum[R][VECS];
#pragma GCC unroll 4
    for (int chunk = span * CHUNKS / X::SPANS; chunk < (span + 1) * CHUNKS / X::SPANS; chunk++)
      weights.each_step(chunk, [&](int step, const pairs* w) {
        for (int r = 0; r < R; r++) {
          const pairs same = same_lane(x.quants + r * GROUP + X::STEP * step);
          for (int i = 0; i < VECS; i++)
            sum[r][i] = step % STEPS ? X::add(sum[r][i], w[i], same) : X::first(w[i], same);
        }
      });
    for (int r = 0; r < R; r++) {
      const f32v scale = splat(x.scales[r * X::SPANS + span]);
      for (int i = 0; i < VECS; i++) {
        const f32v whole = to_floats(X::total(sum[r][i]));
        part[r][i] = span ? fma(whole, scale, part[r][i]) : whole * scale;
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < VECS; i++) {
      float* to = out + (r * VECS + i) * F32S;
      f32v total = fma(part[r][i], d.scale[i], load(to));
      if constexpr (FORMAT != Q8_0) total = fma(d.minimum[i], splat(x.sums[r]), total);
      store(to, total);
    }
}

// The same for the rows [row, last), R at a time and then fewer.
template <int FORMAT, typename X, int R, typename Weights>
inline void add_group_to(const Weights& weights, const Scales<FORMAT>& d, const Rows& rows,
                         int64_t row, int64_t last, int64_t g, float* out) {
  for (; row + R <= last; row += R, out += R * PANEL) {
    add_group<FORMAT, X, R>(weights, d, Activations<X>(rows, row, g), out);
    // Without it the compiler keeps the weights, which stay the same, in registers and the sums in
    // memory.
    __asm__ volatile("" : : : "memory");
  }
  if constexpr (R > 1) {
    if (row < last) add_group_to<FORMAT, X, R / 2>(weights, d, rows, row, last, g, out);
  }
}

// One row times a panel.
template <int FORMAT, typename X>
void integer_row(const Linear& linear, const Rows& rows, int64_t panel, int64_t row, float* out) {
  const uint8_t* head = linear.panels + panel * linear.panel_bytes();
  alignas(64) float total[PANEL] = {};  // nothing else points there: it stays in registers
  for (int64_t g = 0; g < linear.k / GROUP; g++) {
    const Packed<FORMAT, X> packed{head + g * group_bytes(FORMAT)};
    packed.fetch_ahead();
    add_group<FORMAT, X, 1>(packed, Scales<FORMAT>(packed.at), Activations<X>(rows, row, g), total);
  }
  std::memcpy(out, total, sizeof total);
}

// Rows [first, last) times a panel; out: [last - first, PANEL].
template <int FORMAT, typename X>
void integer_panel(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                   int64_t last, float* out) {
  constexpr int MOST = DI_AVX512 ? 8 : 4;  // rows whose sums fit into registers
  const int64_t count = last - first;
  if (count == 1) return integer_row<FORMAT, X>(linear, rows, panel, first, out);
  const uint8_t* head = linear.panels + panel * linear.panel_bytes();
  std::memset(out, 0, size_t(count) * PANEL * sizeof(float));
  for (int64_t g = 0; g < linear.k / GROUP; g++) {
    const Packed<FORMAT, X> packed{head + g * group_bytes(FORMAT)};
    const Scales<FORMAT> scales(packed.at);
    packed.fetch_ahead();
    if (count <= MOST)
      add_group_to<FORMAT, X, MOST>(packed, scales, rows, first, last, g, out);
    else
      add_group_to<FORMAT, X, MOST>(Unpacked<X>(packed), scales, rows, first, last, g, out);
  }
}

}  // namespace di
