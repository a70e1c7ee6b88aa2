// Rows are put in the order of their experts, so that each expert's weights meet a block of rows at
// once. A row's numbers do not depend on the others: products have one order of addition whatever
// the block, and contributions are added in ascending expert id.
#include "experts.h"

#include <utility>
#include <vector>

#include "product.h"
#include "rows.h"

namespace di {
namespace {

// Rows that are routed together: bounds the memory for copies of them, one for each expert chosen.
constexpr int64_t ROUTED = 512;

// Consecutive places of one expert, at most BLOCK.
struct Part {
  int64_t expert, first, last;
};

class Routing {
 public:
  // ids: [rows, chosen], each within 0 .. count-1.
  Routing(const int64_t* ids, int64_t rows, int64_t chosen, int64_t count)
      : row_of(size_t(rows * chosen)), place_of(size_t(rows * chosen)) {
    std::vector<int64_t> next(size_t(count) + 1);
    for (int64_t i = 0; i < rows * chosen; i++) next[size_t(ids[i]) + 1]++;
    for (int64_t expert = 0; expert < count; expert++) {
      const int64_t first = next[size_t(expert)], last = first + next[size_t(expert) + 1];
      for (int64_t at = first; at < last; at += BLOCK)
        parts.push_back({expert, at, std::min(at + BLOCK, last)});
      next[size_t(expert) + 1] = last;
    }
    for (int64_t i = 0; i < rows * chosen; i++) {
      place_of[size_t(i)] = next[size_t(ids[i])]++;
      row_of[size_t(place_of[size_t(i)])] = i / chosen;
    }
  }

  std::vector<Part> parts;         // ascending in expert
  std::vector<int64_t> row_of;     // by place
  std::vector<int64_t> place_of;   // by row and choice
};

// silu(gate) * up, or with limits.
void activate(const Experts& experts, const float* gate, const float* up, float* out) {
  const int64_t size = experts.intermediate;
  if (experts.alpha == 1 && experts.offset == 0 && std::isinf(experts.limit))
    return silu_mul(gate, up, size, out);
  const f32v most = splat(experts.limit), least = -most;
  each_vector(size, gate, up, out, [&](f32v g, f32v u) {
    g = g > most ? most : g;  // NaN stays
    u = u > most ? most : u < least ? least : u;
    return g / (splat(1.0f) + vexp(splat(-experts.alpha) * g)) * (u + splat(experts.offset));
  });
}

// A product of every part with its expert's weights; `finish` as in `product`.
template <typename F>
void products(const Routing& routing, const Linear* const* linears, const Workspace& space,
              Team& team, F&& finish) {
  const int64_t panels = linears[0]->num_panels();
  const int64_t chunk = std::max<int64_t>(1, panels / (team.size * 8));
  const int64_t chunks = (panels + chunk - 1) / chunk, total = int64_t(routing.parts.size());
  for (int64_t item = team.next(); item < total * chunks; item = team.next()) {
    const Part& part = routing.parts[size_t(item / chunks)];
    const Linear& linear = *linears[part.expert];
    const Rows rows = space.rows(int64_t(routing.row_of.size()), linear.k);
    const int64_t begin = item % chunks * chunk;
    for (int64_t panel = begin; panel < std::min(begin + chunk, panels); panel++)
      multiply_piece(linear, rows, panel, part.first, part.last, space, team, finish);
  }
}

struct Input {
  const float* x;
  int64_t x_stride;
  const int64_t* ids;    // [rows, chosen]
  const float* weights;  // likewise
  int64_t rows;
  int64_t chosen;
};

void run(const Experts& experts, const Input& input, float* out) {
  const int64_t hidden = experts.hidden, size = experts.intermediate;
  const int64_t chosen = input.chosen, places = input.rows * chosen;
  const Routing routing(input.ids, input.rows, chosen, experts.count);
  std::vector<int64_t> expert_of(static_cast<size_t>(places));
  for (const Part& part : routing.parts)
    std::fill(&expert_of[size_t(part.first)], &expert_of[size_t(part.last) - 1] + 1, part.expert);

  Call call;
  const Workspace in(call, places, hidden, num_threads()), middle(call, places, size, num_threads());
  float* wide = call.take<float>(places * std::max(2 * size, hidden));
  float* acts = call.take<float>(num_threads() * size);
  together([&](Team& team) {
    for (int64_t place = team.next(); place < places; place = team.next())
      in.put(*experts.gate_up[expert_of[size_t(place)]], place,
             input.x + routing.row_of[size_t(place)] * input.x_stride);
    team.barrier();
    products(routing, experts.gate_up, in, team,
             [&](int64_t place, int64_t at, int64_t count, const float* values) {
               std::memcpy(wide + place * 2 * size + at, values, size_t(count) * 4);
             });
    team.barrier();
    float* act = acts + team.rank * size;
    for (int64_t place = team.next(); place < places; place = team.next()) {
      const float* gate = wide + place * 2 * size;
      activate(experts, gate, gate + size, act);
      middle.put(*experts.down[expert_of[size_t(place)]], place, act);
    }
    team.barrier();
    products(routing, experts.down, middle, team,
             [&](int64_t place, int64_t at, int64_t count, const float* values) {
               std::memcpy(wide + place * hidden + at, values, size_t(count) * 4);
             });
    team.barrier();
    std::vector<std::pair<int64_t, float>> order(static_cast<size_t>(chosen));
    for (int64_t row = team.next(); row < input.rows; row = team.next()) {
      for (int64_t i = 0; i < chosen; i++)
        order[size_t(i)] = {routing.place_of[size_t(row * chosen + i)],
                            input.weights[row * chosen + i]};
      std::sort(order.begin(), order.end());
      float* to = out + row * hidden;
      std::fill(to, to + hidden, 0.0f);
      for (const auto& [place, weight] : order)
        for (int64_t i = 0; i < hidden; i++) to[i] += wide[place * hidden + i] * weight;
    }
  });
}

}  // namespace
}  // namespace di

using namespace di;

// x: [rows, hidden] with row stride x_stride; ids, weights: [rows, chosen]; out: [rows, hidden].
// Returns -1, or an id that is not one of an expert; then nothing was computed.
DI_EXPORT int64_t di_experts(const Experts* experts, const float* x, int64_t x_stride,
                             const int64_t* ids, const float* weights, int64_t rows,
                             int64_t chosen, float* out) {
  for (int64_t i = 0; i < rows * chosen; i++)
    if (ids[i] < 0 || ids[i] >= experts->count) return ids[i] < 0 ? experts->count : ids[i];
  for (int64_t first = 0; first < rows; first += ROUTED) {
    const Input input{x + first * x_stride, x_stride,       ids + first * chosen,
                      weights + first * chosen, std::min(ROUTED, rows - first), chosen};
    run(*experts, input, out + first * experts->hidden);
  }
  return -1;
}
