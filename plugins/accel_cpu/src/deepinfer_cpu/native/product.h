// A product shared out among a team, and what happens to each finished piece.
#pragma once

#include <algorithm>

#include "linear.h"
#include "scratch.h"

namespace di {

// Rows [first, last) times a panel; out: [last - first, PANEL].
void multiply_integer(const Linear&, const Rows&, int64_t panel, int64_t first, int64_t last,
                      float* out);
// The same; room for weights as floats.
void multiply_float(const Linear&, const Rows&, int64_t panel, int64_t first, int64_t last,
                    float* out, void* room);

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

// Multiply a panel and add the bias; out: [last - first, PANEL].
inline void multiply_panel(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                           int64_t last, float* out, void* room) {
  if (is_integer(linear.format))
    multiply_integer(linear, rows, panel, first, last, out);
  else
    multiply_float(linear, rows, panel, first, last, out, room);
  if (!linear.bias) return;
  const int64_t begin = panel * PANEL, width = std::min<int64_t>(PANEL, linear.n - begin);
  for (int64_t row = 0; row < last - first; row++)
    for (int64_t i = 0; i < width; i++) out[row * PANEL + i] += linear.bias[begin + i];
}

// One panel, and `finish(row, first output, count, values)` for each row of it.
template <typename F>
inline void multiply_piece(const Linear& linear, const Rows& rows, int64_t panel, int64_t first,
                           int64_t last, const Workspace& space, const Team& team, F&& finish) {
  float* piece = space.pieces_of(team);
  multiply_panel(linear, rows, panel, first, last, piece, space.room_of(team));
  const int64_t begin = panel * PANEL, count = std::min<int64_t>(PANEL, linear.n - begin);
  for (int64_t row = first; row < last; row++)
    finish(row, begin, count, piece + (row - first) * PANEL);
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
  share(team, rows.count, linear.num_panels(), [&](int64_t first, int64_t last, int64_t panel) {
    multiply_piece(linear, rows, panel, first, last, space, team, finish);
  });
}

}  // namespace di
