// A product shared out among a team, and what happens to each finished piece.
#pragma once

#include <algorithm>

#include "linear.h"
#include "scratch.h"

namespace di {

// Rows [first, last) times `count` panels that follow each other, TOGETHER or one;
// out: [last - first, count, PANEL].
void multiply_integer(const Linear&, const Rows&, int64_t panel, int64_t count, int64_t first,
                      int64_t last, float* out);
// The same for one panel; `stride` from row to row of out, room for weights as floats.
void multiply_float(const Linear&, const Rows&, int64_t panel, int64_t first, int64_t last,
                    float* out, int64_t stride, void* room);

// Memory for rows as a product wants them, and for what each thread needs besides.
struct Workspace {
  uint8_t* quants;
  float* scales;
  float* sums;
  float* floats;
  uint8_t* rooms;
  float* pieces;
  int64_t room;
  int64_t capacity;  // rows

  Workspace(Call& call, int64_t rows, int64_t widest, int threads)
      : quants(call.take<uint8_t>(2 * rows * widest)),
        scales(call.take<float>(rows * (widest / GROUP + 1) * 2)),
        sums(call.take<float>(rows * (widest / GROUP + 1))),
        floats(call.take<float>(rows * widest)),
        rooms(call.take<uint8_t>(threads * ((room_bytes(widest) + 63) / 64 * 64))),
        pieces(call.take<float>(threads * 4 * BLOCK * PANEL)),
        room((room_bytes(widest) + 63) / 64 * 64),
        capacity(rows) {}

  Rows rows(int64_t count, int64_t k) const {
    return {floats, k, quants, scales, sums, count, capacity};
  }
  void* room_of(const Team& team) const { return rooms + team.rank * room; }
  float* pieces_of(const Team& team) const { return pieces + team.rank * 4 * BLOCK * PANEL; }

  // Take one group of some rows in that follow each other; x: [count, GROUP].
  void quantize_group(const Linear& linear, int64_t group, int64_t row, const float* x,
                      int64_t count) const {
    const int64_t place = group * capacity + row;
    quantize_row(linear.bits, x, count * GROUP, 1, quants + place * GROUP * linear.bits / 8,
                 scales + place * linear.spans(), sums + place);
  }

  // Take a row in, in the form that the linear multiplies.
  void put(const Linear& linear, int64_t row, const float* x) const {
    const int64_t k = linear.k;
    if (is_integer(linear.format))
      quantize_row(linear.bits, x, k, capacity, quants + row * GROUP * linear.bits / 8,
                   scales + row * linear.spans(), sums + row);
    else
      std::memcpy(floats + row * k, x, size_t(k) * 4);
  }
};

// Multiply `count` panels, TOGETHER or one, and add the bias; out: [last - first, count, PANEL].
inline void multiply_panels(const Linear& linear, const Rows& rows, int64_t panel, int64_t count,
                            int64_t first, int64_t last, float* out, void* room) {
  if (is_integer(linear.format))
    multiply_integer(linear, rows, panel, count, first, last, out);
  for (int64_t p = 0; p < count; p++, panel++, out += PANEL) {
    const int64_t stride = count * PANEL;
    if (!is_integer(linear.format))
      multiply_float(linear, rows, panel, first, last, out, stride, room);
    if (!linear.bias) continue;
    const int64_t begin = panel * PANEL, width = std::min<int64_t>(PANEL, linear.n - begin);
    for (int64_t row = 0; row < last - first; row++)
      for (int64_t i = 0; i < width; i++) out[row * stride + i] += linear.bias[begin + i];
  }
}

// The panels of unit `unit` of a product, and `finish(row, first output, count, values)` for each
// row of them.
template <typename F>
inline void multiply_unit(const Linear& linear, const Rows& rows, int64_t unit, int64_t first,
                          int64_t last, const Workspace& space, const Team& team, F&& finish) {
  float* pieces = space.pieces_of(team);
  const int64_t panel = unit * TOGETHER, begin = panel * PANEL;
  const int64_t panels = std::min<int64_t>(TOGETHER, linear.num_panels() - panel);
  multiply_panels(linear, rows, panel, panels, first, last, pieces, space.room_of(team));
  const int64_t count = std::min<int64_t>(panels * PANEL, linear.n - begin);
  for (int64_t row = first; row < last; row++)
    finish(row, begin, count, pieces + (row - first) * panels * PANEL);
}

inline int64_t num_units(const Linear& linear) {
  return (linear.num_panels() + TOGETHER - 1) / TOGETHER;
}

// Call `work(row)` for every row, each once; a few are taken at a time.
template <typename F>
inline void each_row(Team& team, int64_t rows, F&& work) {
  const int64_t few = std::min<int64_t>(16, std::max<int64_t>(1, rows / (team.size * 4)));
  for (int64_t first = team.next() * few; first < rows; first = team.next() * few)
    for (int64_t row = first; row < std::min(first + few, rows); row++) work(row);
}

// Call `work(block's first row, its end, unit)` for every block of rows and unit, each once. Units
// lie one after another in memory; those that follow each other are handed out `team.size` pieces
// apart, so that threads of one speed read a stretch of memory each.
template <typename F>
inline void share(Team& team, int64_t rows, int64_t units, F&& work) {
  if (!rows) return;
  const int64_t blocks = (rows + BLOCK - 1) / BLOCK;
  // Of one size, since a few rows that are left over would cost as much as many; whole tiles.
  const int64_t block = ((rows + blocks - 1) / blocks + 7) / 8 * 8;
  const int64_t chunk = std::max<int64_t>(1, units / (team.size * 8));
  const int64_t each = ((units + chunk - 1) / chunk + team.size - 1) / team.size;
  for (int64_t item = team.next(); item < blocks * each * team.size; item = team.next()) {
    const int64_t first = item / (each * team.size) * block, place = item % (each * team.size);
    const int64_t begin = (place % team.size * each + place / team.size) * chunk;
    for (int64_t unit = begin; unit < std::min(begin + chunk, units); unit++)
      work(first, std::min(first + block, rows), unit);
  }
}

// rows x linear; `finish(row, first output, count, values)` gets each finished piece once.
template <typename F>
inline void product(const Linear& linear, const Rows& rows, const Workspace& space, Team& team,
                    F&& finish) {
  share(team, rows.count, num_units(linear), [&](int64_t first, int64_t last, int64_t unit) {
    multiply_unit(linear, rows, unit, first, last, space, team, finish);
  });
}

}  // namespace di
