// What the layers of a decoder and of a draft block have in common: one call's memory for some rows,
// and every stage of a layer but attention itself.
#pragma once

#include <vector>

#include "decoder.h"
#include "product.h"
#include "rows.h"

namespace di {

// So few rows are normed and quantised by every thread for itself: cheaper than to wait.
constexpr int64_t FEW = 2;

class Layers {
 protected:
  Layers(Call& call, const Decoder& decoder, int64_t rows)
      : model_(decoder),
        rows_(rows),
        heads_(decoder.num_heads + 2 * decoder.num_kv_heads),
        copies_(rows <= FEW ? num_threads() : 1),
        x_(call.take<float>(rows * decoder.hidden)),
        qkv_(call.take<float>(rows * heads_ * decoder.head_dim)),
        mixed_(call.take<float>(rows * decoder.num_heads * decoder.head_dim)),
        normed_(call.take<float>(num_threads() * decoder.hidden)),
        act_(call, rows, decoder.intermediate, num_threads()) {
    const int64_t widest = std::max(decoder.hidden, decoder.num_heads * decoder.head_dim);
    for (int i = 0; i < copies_; i++) in_.emplace_back(call, rows, widest, num_threads());
  }

  // Rows of a stage that every thread does for itself, or that are shared out.
  template <typename F>
  void each(Team& team, int64_t rows, F&& work) {
    if (rows <= FEW && copies_ > 1) {
      if (!team.join()) return;
      for (int64_t row = 0; row < rows; row++) work(row);
      return;
    }
    each_row(team, rows, work);
    team.barrier();
  }

  Workspace& in(const Team& team, int64_t rows) {
    return in_[rows <= FEW && copies_ > 1 ? size_t(team.rank) : 0];
  }

  void norm(Team& team, const float* x, const float* weight, const Linear& next, int64_t rows) {
    const int64_t hidden = model_.hidden;
    Workspace& space = in(team, rows);
    float* normed = normed_ + team.rank * hidden;
    each(team, rows, [&](int64_t row) {
      rms_norm(x + row * hidden, weight, model_.eps, hidden, normed);
      space.put(next, row, normed);
    });
  }

  // qkv of all rows.
  void project(Team& team, const DecoderLayer& layer) {
    const int64_t width = heads_ * model_.head_dim;
    norm(team, x_, layer.input_norm, *layer.qkv, rows_);
    const Workspace& space = in(team, rows_);
    product(*layer.qkv, space.rows(rows_, layer.qkv->k), space, team,
            [&](int64_t row, int64_t begin, int64_t count, const float* values) {
              std::memcpy(qkv_ + row * width + begin, values, size_t(count) * 4);
            });
    team.barrier();
  }

  // Norm and turn one token's queries and keys.
  void turn(const DecoderLayer& layer, int64_t position, float* heads) {
    const int64_t dim = model_.head_dim, queries = model_.num_heads;
    const int64_t turned = queries + model_.num_kv_heads, at = position * model_.half;
    for (int64_t h = 0; h < turned; h++) {
      float* head = heads + h * dim;
      const float* weight = h < queries ? layer.q_norm : layer.k_norm;
      if (weight) rms_norm(head, weight, model_.eps, dim, head);
      if (layer.use_rope) rotate(head, model_.cos + at, model_.sin + at, model_.half);
    }
  }

  // x = residual + mixed x output, of all rows or of those `wanted`.
  void output(Team& team, const DecoderLayer& layer, float* x, int64_t rows,
              const int32_t* wanted) {
    const int64_t hidden = model_.hidden, width = model_.num_heads * model_.head_dim;
    Workspace& space = in(team, rows);
    each(team, rows, [&](int64_t row) {
      space.put(*layer.output, row, mixed_ + (wanted ? wanted[row] : row) * width);
    });
    product(*layer.output, space.rows(rows, width), space, team,
            [&](int64_t row, int64_t begin, int64_t count, const float* values) {
              const float* old = x_ + (wanted ? wanted[row] : row) * hidden + begin;
              float* to = x + row * hidden + begin;
              for (int64_t i = 0; i < count; i++) to[i] = old[i] + values[i];
            });
    team.barrier();
  }

  void feed_forward(Team& team, const DecoderLayer& layer, float* x, int64_t rows) {
    const int64_t hidden = model_.hidden;
    norm(team, x, layer.middle_norm, *layer.gate_up, rows);
    gate_up(team, layer, in(team, rows), rows);
    team.barrier();
    product(*layer.down, act_.rows(rows, model_.intermediate), act_, team,
            [&](int64_t row, int64_t begin, int64_t count, const float* values) {
              float* to = x + row * hidden + begin;
              for (int64_t i = 0; i < count; i++) to[i] += values[i];
            });
    team.barrier();
  }

  // silu(gate) * up in the form that `down` multiplies: a group of 32 at a time.
  void gate_up(Team& team, const DecoderLayer& layer, const Workspace& space, int64_t rows) {
    const Linear& linear = *layer.gate_up;
    const Rows input = space.rows(rows, linear.k);
    const int64_t size = model_.intermediate, groups = size / GROUP, half = size / PANEL;
    share(team, rows, groups, [&](int64_t first, int64_t last, int64_t group) {
      // Two panels of gates and two of ups, each [last - first, PANEL].
      float* const pieces = space.pieces_of(team);
      const auto piece = [&](int64_t i) { return pieces + i * BLOCK * PANEL; };
      for (int64_t i = 0; i < 4; i++)
        multiply_panel(linear, input, i / 2 * half + 2 * group + i % 2, first, last, piece(i),
                       space.room_of(team));
      constexpr int64_t SOME = 8;
      float act[SOME][GROUP];
      for (int64_t from = first; from < last; from += SOME) {
        const int64_t count = std::min(SOME, last - from);
        for (int64_t row = 0; row < count; row++)
          for (int64_t i = 0; i < 2; i++) {
            const int64_t at = (from + row - first) * PANEL;
            silu_mul(piece(i) + at, piece(i + 2) + at, PANEL, act[row] + i * PANEL);
          }
        if (is_integer(layer.down->format))
          act_.quantize_group(*layer.down, group, from, act[0], count);
        else
          for (int64_t row = 0; row < count; row++)
            std::memcpy(act_.floats + (from + row) * size + group * GROUP, act[row], sizeof act[row]);
      }
    });
  }

  const Decoder& model_;
  const int64_t rows_;
  const int64_t heads_;
  const int copies_;
  float* x_;       // residual stream
  float* qkv_;
  float* mixed_;
  float* normed_;  // a row for each thread
  Workspace act_;
  std::vector<Workspace> in_;
};

}  // namespace di
