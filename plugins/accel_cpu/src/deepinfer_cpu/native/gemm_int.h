// One panel of integer weights times some rows, whose numbers have 16 bits or 8.
//
// Every output is made by the same operations whatever the number of rows: in each group of 32
// inputs integers are summed up exactly, for every span that shares an activation scale; spans and
// groups are then put together in f32, ascending.
#pragma once

#include "linear.h"

namespace di {

constexpr int64_t AHEAD = 2560;        // bytes
constexpr int STEP_BYTES = 4 * PANEL;  // of the weights of a step, unpacked
constexpr int CHUNKS = 4;              // of a group

// Weights of a group as they are kept.
template <int FORMAT, typename X>
struct Packed {
  const uint8_t* at;  // the group

  void fetch_ahead() const {
    // Panels follow each other in memory, and few are long enough for the hardware to notice.
    for (int line = 0; line < int(group_bytes(FORMAT)); line += 64)
      __builtin_prefetch(at + AHEAD + line);
  }

  // Call `use(step, weights)` for every X::STEP inputs of a quarter of the group.
  template <typename F>
  void each_step(int chunk, F&& use) const {
    const uint8_t* data = at + (FORMAT == Q4_1 ? 64 : 32);
    pairs raw[VECS], w[VECS];
    if constexpr (FORMAT == Q8_0) {
#pragma GCC unroll 4
      for (int pair = chunk * 4; pair < chunk * 4 + 4; pair++) {
        for (int v = 0; v < VECS; v++)
          w[v] = widen((const int8_t*)data + pair * 2 * PANEL + v * 2 * F32S);
        use(pair, w);
      }
      return;
    }
    for (int v = 0; v < VECS; v++) raw[v] = load_pairs(data + chunk * 4 * PANEL + v * 4 * F32S);
    if constexpr (X::STEP == 4) {
      for (int v = 0; v < VECS; v++) w[v] = low_nibbles(raw[v]);
      use(chunk * 2, w);
      for (int v = 0; v < VECS; v++) w[v] = high_nibbles(raw[v]);
      use(chunk * 2 + 1, w);
    } else {
      for (int v = 0; v < VECS; v++) w[v] = nibbles<0>(raw[v]);
      use(chunk * 4, w);
      for (int v = 0; v < VECS; v++) w[v] = nibbles<1>(raw[v]);
      use(chunk * 4 + 1, w);
      for (int v = 0; v < VECS; v++) w[v] = nibbles<2>(raw[v]);
      use(chunk * 4 + 2, w);
      for (int v = 0; v < VECS; v++) w[v] = nibbles<3>(raw[v]);
      use(chunk * 4 + 3, w);
    }
  }
};

// The same, unpacked before.
template <typename X>
struct Unpacked {
  const uint8_t* at;  // [GROUP / X::STEP, PANEL, X::STEP] numbers

  template <typename F>
  void each_step(int chunk, F&& use) const {
    constexpr int STEPS = GROUP / X::STEP / CHUNKS;
#pragma GCC unroll 4
    for (int step = chunk * STEPS; step < chunk * STEPS + STEPS; step++) {
      pairs w[VECS];
      for (int v = 0; v < VECS; v++) w[v] = load_pairs(at + step * STEP_BYTES + v * 4 * F32S);
      use(step, w);
    }
  }
};

// Scales of a group's weights.
template <int FORMAT>
struct Scales {
  f32v scale[VECS], minimum[VECS];

  explicit Scales(const uint8_t* group) {
    const uint16_t* d = (const uint16_t*)group;
    for (int v = 0; v < VECS; v++) {
      scale[v] = load_f16(d + v * F32S);
      if constexpr (FORMAT == Q4_1) minimum[v] = load_f16(d + PANEL + v * F32S);
      if constexpr (FORMAT == Q4_0) minimum[v] = scale[v] * splat(-8.0f);
    }
  }
};

// The activations of some rows.
template <typename X>
struct Activations {
  const typename X::Number* quants;
  const float* scales;
  const float* sums;
  int64_t groups;

  Activations(const Rows& rows, int64_t row, int64_t groups)
      : quants((const typename X::Number*)rows.quants + row * groups * GROUP),
        scales(rows.scales + row * groups * X::SPANS),
        sums(rows.sums + row * groups),
        groups(groups) {}
};

// Add what one group gives to R rows.
template <int FORMAT, typename X, int R, typename Weights>
inline void add_group(const Weights& weights, const Scales<FORMAT>& d, const Activations<X>& x,
                      int64_t g, f32v (*total)[VECS]) {
  constexpr int STEPS = GROUP / X::STEP / X::SPANS;
#pragma GCC unroll 2
  for (int span = 0; span < X::SPANS; span++) {
    pairs sum[R][VECS];
#pragma GCC unroll 4
    for (int chunk = span * CHUNKS / X::SPANS; chunk < (span + 1) * CHUNKS / X::SPANS; chunk++)
      weights.each_step(chunk, [&](int step, const pairs* w) {
        for (int r = 0; r < R; r++) {
          const pairs same = same_lane(x.quants + (r * x.groups + g) * GROUP + X::STEP * step);
          for (int v = 0; v < VECS; v++)
            sum[r][v] = step % STEPS ? X::add(sum[r][v], w[v], same) : X::first(w[v], same);
        }
      });
    for (int r = 0; r < R; r++) {
      const f32v scale = splat(x.scales[(r * x.groups + g) * X::SPANS + span]);
      for (int v = 0; v < VECS; v++) {
        const f32v part = to_floats(X::total(sum[r][v]));
        total[r][v] = fma(part, d.scale[v] * scale, total[r][v]);
      }
    }
  }
  if constexpr (FORMAT != Q8_0)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECS; v++)
        total[r][v] = fma(d.minimum[v], splat(x.sums[r * x.groups + g]), total[r][v]);
}

// R rows times one panel; `group_at(g)` gives the weights of a group, `head` is the panel's start.
template <int FORMAT, typename X, int R, typename GroupAt>
inline void tile(const uint8_t* head, GroupAt&& group_at, const Activations<X>& x, float* out) {
  f32v total[R][VECS] = {};
  for (int64_t g = 0; g < x.groups; g++)
    add_group<FORMAT, X, R>(group_at(g), Scales<FORMAT>(head + g * group_bytes(FORMAT)), x, g,
                            total);
  std::memcpy(out, total, sizeof total);
}

template <int FORMAT, typename X, int R, typename GroupAt>
inline void tiles(const uint8_t* head, GroupAt&& group_at, const Rows& rows, int64_t groups,
                  int64_t row, int64_t last, float* out) {
  for (; row + R <= last; row += R, out += R * PANEL)
    tile<FORMAT, X, R>(head, group_at, Activations<X>(rows, row, groups), out);
  if constexpr (R > 1) {
    if (row < last) tiles<FORMAT, X, R / 2>(head, group_at, rows, groups, row, last, out);
  }
}

template <int FORMAT, typename X>
void integer_panel(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                   int64_t last, float* out, void* room) {
  constexpr int MOST = DI_AVX512 ? 8 : 4;
  const int64_t groups = linear.k / GROUP;
  const uint8_t* head = linear.panels + panel * linear.panel_bytes();
  auto packed = [&](int64_t g) {
    const Packed<FORMAT, X> weights{head + g * group_bytes(FORMAT)};
    weights.fetch_ahead();
    return weights;
  };
  // A panel that is unpacked fills the nearest cache; up to here, unpacking again is cheaper.
  if (last - first <= 4 * MOST)
    return tiles<FORMAT, X, MOST>(head, packed, rows, groups, first, last, out);
  constexpr int64_t ROOM = GROUP / X::STEP * STEP_BYTES;  // of a group
  uint8_t* ready = static_cast<uint8_t*>(room);
  for (int64_t g = 0; g < groups; g++)
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      packed(g).each_step(chunk, [&](int step, const pairs* w) {
        for (int v = 0; v < VECS; v++)
          store_pairs(ready + g * ROOM + step * STEP_BYTES + v * 4 * F32S, w[v]);
      });
  auto unpacked = [&](int64_t g) { return Unpacked<X>{ready + g * ROOM}; };
  tiles<FORMAT, X, MOST>(head, unpacked, rows, groups, first, last, out);
}

}  // namespace di
