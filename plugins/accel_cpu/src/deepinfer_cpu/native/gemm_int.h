// One panel of integer weights times some rows.
#pragma once

#include "linear.h"

namespace di {

constexpr int64_t AHEAD = 2560;  // bytes

// Where the 16 bit weights of a group come from: unpacked as they are used, or before.
template <int FORMAT>
struct Packed {
  const uint8_t* at;  // the group

  template <typename F>
  inline void each_pair(F&& use) const {
    const uint8_t* data = at + (FORMAT == Q4_1 ? 64 : 32);
    // Panels follow each other in memory, and few are long enough for the hardware to notice.
    for (int line = 0; line < int(group_bytes(FORMAT)); line += 64)
      __builtin_prefetch(at + AHEAD + line);
    if constexpr (FORMAT == Q8_0) {
#pragma GCC unroll 4
      for (int pair = 0; pair < GROUP / 2; pair++) {
        pairs w[VECS];
        for (int v = 0; v < VECS; v++)
          w[v] = widen((const int8_t*)data + pair * 2 * PANEL + v * 2 * F32S);
        use(pair, w);
      }
    } else {
      for (int chunk = 0; chunk < 4; chunk++) {
        pairs raw[VECS], w[VECS];
        for (int v = 0; v < VECS; v++)
          raw[v] = load_pairs(data + chunk * 4 * PANEL + v * 4 * F32S);
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
  }
};

struct Ready {
  const int16_t* at;  // [GROUP / 2, PANEL, 2]

  template <typename F>
  inline void each_pair(F&& use) const {
#pragma GCC unroll 4
    for (int pair = 0; pair < GROUP / 2; pair++) {
      pairs w[VECS];
      for (int v = 0; v < VECS; v++) w[v] = load_pairs(at + pair * 2 * PANEL + v * 2 * F32S);
      use(pair, w);
    }
  }
};

// R rows times one panel. `group_at(g)` gives the weights of a group, `head` the panel's start.
template <int FORMAT, int R, typename GroupAt>
inline void integer_tile(const uint8_t* head, int64_t groups, GroupAt&& group_at,
                         const int16_t* quants, const float* scales, const float* sums,
                         float* out) {
  const int64_t k = groups * GROUP;
  f32v total[R][VECS] = {};
  for (int64_t g = 0; g < groups; g++) {
    pairs sum[R][VECS];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECS; v++) sum[r][v] = zero_pairs();
    const int16_t* x = quants + g * GROUP;
    group_at(g).each_pair([&](int pair, const pairs* w) {
      for (int r = 0; r < R; r++) {
        const pairs both = same_pair(x + r * k + 2 * pair);
        for (int v = 0; v < VECS; v++) sum[r][v] = dot(sum[r][v], w[v], both);
      }
    });
    const uint16_t* d = (const uint16_t*)(head + g * group_bytes(FORMAT));
    for (int v = 0; v < VECS; v++) {
      const f32v scale = load_f16(d + v * F32S);
      f32v minimum{};
      if constexpr (FORMAT == Q4_1) minimum = load_f16(d + PANEL + v * F32S);
      if constexpr (FORMAT == Q4_0) minimum = scale * splat(-8.0f);
      for (int r = 0; r < R; r++) {
        const f32v both = scale * splat(scales[r * groups + g]);
        total[r][v] = fma(to_floats(sum[r][v]), both, total[r][v]);
        if constexpr (FORMAT != Q8_0)
          total[r][v] = fma(minimum, splat(sums[r * groups + g]), total[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECS; v++) store(out + r * PANEL + v * F32S, total[r][v]);
}

template <int FORMAT, int R, typename GroupAt>
inline void integer_rows(const uint8_t* head, int64_t groups, GroupAt&& group_at, const Rows& rows,
                         int64_t first, int64_t last, float* out) {
  int64_t row = first;
  for (; row + R <= last; row += R)
    integer_tile<FORMAT, R>(head, groups, group_at, rows.quants + row * groups * GROUP,
                            rows.scales + row * groups, rows.sums + row * groups,
                            out + (row - first) * PANEL);
  if constexpr (R > 1) {
    if (row < last)
      integer_rows<FORMAT, R / 2>(head, groups, group_at, rows, row, last,
                                  out + (row - first) * PANEL);
  }
}

template <int FORMAT>
inline void integer_panel(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                          int64_t last, float* out, void* room) {
  constexpr int MOST = DI_AVX512 ? 8 : 4;
  const int64_t groups = linear.k / GROUP;
  const uint8_t* head = linear.panels + panel * linear.panel_bytes();
  auto packed = [&](int64_t g) { return Packed<FORMAT>{head + g * group_bytes(FORMAT)}; };
  if (last - first <= MOST) {
    integer_rows<FORMAT, MOST>(head, groups, packed, rows, first, last, out);
    return;
  }
  int16_t* ready = static_cast<int16_t*>(room);
  for (int64_t g = 0; g < groups; g++)
    packed(g).each_pair([&](int pair, const pairs* w) {
      for (int v = 0; v < VECS; v++)
        store_pairs(ready + (g * GROUP / 2 + pair) * 2 * PANEL + v * 2 * F32S, w[v]);
    });
  auto unpacked = [&](int64_t g) { return Ready{ready + g * GROUP * PANEL}; };
  integer_rows<FORMAT, MOST>(head, groups, unpacked, rows, first, last, out);
}

}  // namespace di
