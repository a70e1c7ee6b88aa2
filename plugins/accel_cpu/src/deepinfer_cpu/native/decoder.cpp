#include "layers.h"
#include "packing.h"

namespace di {
namespace {

class Run : Layers {
 public:
  Run(Call& call, const Decoder& decoder, const Step& step)
      : Layers(call, decoder, step.rows),
        step_(step),
        rest_(call.take<float>(step.rows * decoder.hidden)) {}

  void operator()(Team& team) {
    embed(team);
    tap(team, 0);
    for (int64_t index = 0; index < model_.num_layers; index++) {
      const DecoderLayer& layer = model_.layers[index];
      const bool last = index + 1 == model_.num_layers;
      attention(team, layer);
      const bool fewer = last && step_.num_wanted < step_.rows && !step_.taps[index + 1];
      float* x = fewer ? rest_ : x_;
      const int64_t rows = fewer ? step_.num_wanted : step_.rows;
      output(team, layer, x, rows, fewer ? step_.wanted : nullptr);
      feed_forward(team, layer, x, rows);
      tap(team, index + 1);
      if (last) finish(team, x, fewer);
    }
  }

 private:
  void embed(Team& team) {
    each_row(team, step_.rows, [&](int64_t row) {
      unpack_row(*model_.embedding, step_.token_ids[row], x_ + row * model_.hidden);
    });
    team.barrier();
  }

  void tap(Team& team, int64_t index) {
    if (!step_.taps[index]) return;
    const int64_t hidden = model_.hidden;
    each_row(team, step_.rows, [&](int64_t row) {
      std::memcpy(step_.taps[index] + row * hidden, x_ + row * hidden, size_t(hidden) * 4);
    });
    team.barrier();
  }

  void attention(Team& team, const DecoderLayer& layer) {
    const int64_t width = heads_ * model_.head_dim;
    project(team, layer);
    const AttentionPlan& plan = *step_.plans[layer.group];
    each_row(team, rows_, [&](int64_t row) { place(layer, plan, row, qkv_ + row * width); });
    team.barrier();
    attend(*layer.attention, plan, qkv_, width, mixed_, model_.num_heads * model_.head_dim, team);
    team.barrier();
  }

  // Norm and turn one token's queries and keys, and write its keys and values.
  void place(const DecoderLayer& layer, const AttentionPlan& plan, int64_t row, float* heads) {
    turn(layer, step_.positions[row], heads);
    const float* keys = heads + model_.num_heads * model_.head_dim;
    if (plan.write_slots[row] >= 0)
      write_kv(*layer.attention, plan.write_slots[row], keys,
               keys + model_.num_kv_heads * model_.head_dim);
  }

  void finish(Team& team, const float* x, bool fewer) {
    const int64_t hidden = model_.hidden;
    each_row(team, step_.num_wanted, [&](int64_t i) {
      rms_norm(x + (fewer ? i : step_.wanted[i]) * hidden, model_.final_norm, model_.eps, hidden,
               step_.out + i * hidden);
    });
  }

  const Step& step_;
  float* rest_;  // residual stream of the rows that are wanted
};

}  // namespace
}  // namespace di

DI_EXPORT void di_decoder(const di::Decoder* decoder, const di::Step* step) {
  di::Call call;
  di::Run run(call, *decoder, *step);
  di::together([&](di::Team& team) { run(team); });
}
