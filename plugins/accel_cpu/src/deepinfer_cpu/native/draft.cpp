#include "draft.h"

#include "layers.h"

namespace di {
namespace {

class Block : Layers {
 public:
  Block(Call& call, const DraftBlock& block, const DraftStep& step)
      : Layers(call, block.decoder, step.num_sequences * step.block),
        block_(block),
        step_(step),
        weights_(call.take<float>(num_threads() * longest_)) {}

  void operator()(Team& team) {
    each_row(team, rows_, [&](int64_t row) { begin(row); });
    team.barrier();
    for (int64_t index = 0; index < model_.num_layers; index++) {
      const DecoderLayer& layer = model_.layers[index];
      project(team, layer);
      const int64_t width = heads_ * model_.head_dim;
      each_row(team, rows_,
               [&](int64_t row) { turn(layer, step_.positions[row], qkv_ + row * width); });
      team.barrier();
      each_row(team, rows_ * model_.num_heads,
               [&](int64_t item) { attend(team, index, item / model_.num_heads, item % model_.num_heads); });
      team.barrier();
      output(team, layer, x_, rows_, nullptr);
      feed_forward(team, layer, x_, rows_);
    }
    head(team);
  }

 private:
  int64_t longest() const {
    int64_t most = 0;
    for (int64_t i = 0; i < block_.decoder.num_layers * step_.num_sequences; i++)
      most = std::max(most, step_.past[i].count);
    return most + step_.block;
  }

  void begin(int64_t row) {
    const int64_t hidden = model_.hidden, place = row % step_.block;
    const float* from = place ? step_.mask : step_.anchors + row / step_.block * hidden;
    std::memcpy(x_ + row * hidden, from, size_t(hidden) * 4);
  }

  // One head of one row over the past it sees, then over its whole block.
  void attend(const Team& team, int64_t layer, int64_t row, int64_t head) {
    const int64_t dim = model_.head_dim, kv = head * model_.num_kv_heads / model_.num_heads;
    const int64_t sequence = row / step_.block, stride = model_.num_kv_heads * dim;
    const DraftPast& past = step_.past[layer * step_.num_sequences + sequence];
    const int64_t unseen = step_.unseen[layer * rows_ + row], seen = past.count - unseen;
    const int64_t width = heads_ * dim, own = sequence * step_.block;
    const float* query = qkv_ + row * width + head * dim;
    const float* block_keys = qkv_ + own * width + (model_.num_heads + kv) * dim;
    const float* block_values = block_keys + stride;
    const float* keys = past.keys + unseen * stride + kv * dim;
    const float* values = past.values + unseen * stride + kv * dim;
    float* weights = weights_ + team.rank * longest_;
    const int64_t total = seen + step_.block;
    const float scale = 1.0f / std::sqrt(float(dim));
    float top = -INFINITY;
    for (int64_t i = 0; i < total; i++) {
      const float* key = i < seen ? keys + i * stride : block_keys + (i - seen) * width;
      weights[i] = dot(query, key, dim) * scale;
      top = std::max(top, weights[i]);
    }
    const float mass = exponentials(weights, total, top);
    float* out = mixed_ + (row * model_.num_heads + head) * dim;
    std::memset(out, 0, size_t(dim) * 4);
    for (int64_t i = 0; i < total; i++) {
      const float* value = i < seen ? values + i * stride : block_values + (i - seen) * width;
      add(out, value, weights[i] / mass, dim);
    }
  }

  static float dot(const float* a, const float* b, int64_t size) {
    f32v total{};
    int64_t i = 0;
    for (; i + F32S <= size; i += F32S) total = fma(load(a + i), load(b + i), total);
    float found = sum(total);
    for (; i < size; i++) found += a[i] * b[i];
    return found;
  }

  static void add(float* to, const float* x, float factor, int64_t size) {
    int64_t i = 0;
    for (; i + F32S <= size; i += F32S) store(to + i, fma(load(x + i), splat(factor), load(to + i)));
    for (; i < size; i++) to[i] += x[i] * factor;
  }

  // x = exp(x - top); returns the sum.
  static float exponentials(float* x, int64_t size, float top) {
    each_vector(size, x, x, x, [&](f32v a, f32v) { return vexp(a - splat(top)); });
    float total = 0.0f;
    for (int64_t i = 0; i < size; i++) total += x[i];
    return total;
  }

  void head(Team& team) {
    const int64_t hidden = model_.hidden, outputs = block_.head->n;
    const int64_t rows = step_.num_sequences * step_.wanted;
    Workspace& space = in_[0];
    each_row(team, rows, [&](int64_t row) {
      const int64_t at = row / step_.wanted * step_.block + row % step_.wanted;
      float* normed = normed_ + team.rank * hidden;
      rms_norm(x_ + at * hidden, model_.final_norm, model_.eps, hidden, normed);
      space.put(*block_.head, row, normed);
    });
    team.barrier();
    product(*block_.head, space.rows(rows, hidden), space, team,
            [&](int64_t row, int64_t begin, int64_t count, const float* values) {
              std::memcpy(step_.out + row * outputs + begin, values, size_t(count) * 4);
            });
  }

  const DraftBlock& block_;
  const DraftStep& step_;
  const int64_t longest_ = longest();  // past and block of a row
  float* weights_;  // of one head, a row for each thread
};

class Chain {
 public:
  Chain(Call& call, const DraftChain& chain, const DraftChainStep& step)
      : chain_(chain),
        step_(step),
        outs_(call.take<float>(step.num_sequences * chain.rank)),
        states_(call.take<float>(step.num_sequences * chain.rank)),
        best_(call.take<Best>(num_threads() * step.num_sequences)),
        space_(call, step.num_sequences, chain.rank, num_threads()) {
    std::memset(states_, 0, size_t(step.num_sequences * chain.rank) * 4);
  }

  void operator()(Team& team) {
    for (int64_t place = 0; place < step_.wanted; place++) {
      each_row(team, step_.num_sequences, [&](int64_t sequence) { begin(place, sequence); });
      team.barrier();
      product(*chain_.bias, space_.rows(step_.num_sequences, chain_.rank), space_, team,
              [&](int64_t sequence, int64_t first, int64_t count, const float* values) {
                look(team, row(place, sequence) + first, sequence, first, count, values);
              });
      team.barrier();
      each_row(team, step_.num_sequences, [&](int64_t sequence) { end(place, sequence); });
      team.barrier();
    }
  }

 private:
  struct Best {
    float value;
    int64_t index;
  };

  const float* row(int64_t place, int64_t sequence) const {
    return step_.rows + (sequence * step_.wanted + place) * step_.stride;
  }

  static float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

  static float dot(const float* a, const float* b, int64_t size) {
    float total = 0.0f;
    for (int64_t i = 0; i < size; i++) total += a[i] * b[i];
    return total;
  }

  // What the bias is made of, and the confidence: both by the token before.
  void begin(int64_t place, int64_t sequence) {
    const int64_t rank = chain_.rank;
    const int64_t token = place ? step_.tokens[sequence * step_.wanted + place - 1]
                                : step_.anchors[sequence];
    const float* embedded = chain_.table + token * rank;
    const float* parts = row(place, sequence) + chain_.bias->n;
    float* out = outs_ + sequence * rank;
    std::memcpy(out, embedded, size_t(rank) * 4);
    if (chain_.kind == DraftChain::GATED) {
      for (int64_t i = 0; i < rank; i++)
        out[i] *= sigmoid(parts[i] + dot(chain_.inner + i * rank, embedded, rank));
      parts += rank;
    } else if (chain_.kind == DraftChain::RNN) {
      recur(parts, embedded, states_ + sequence * rank, out);
      parts += 3 * rank;
    }
    space_.put(*chain_.bias, sequence, out);
    if (chain_.says)
      step_.confidence[sequence * step_.wanted + place] =
          parts[0] + (chain_.sure ? dot(chain_.sure, embedded, rank) : 0.0f);
    for (int i = 0; i < num_threads(); i++)
      best_[i * step_.num_sequences + sequence] = {-INFINITY, 0};
  }

  void recur(const float* parts, const float* embedded, float* state, float* out) const {
    const int64_t rank = chain_.rank;
    std::vector<float> joint(size_t(3 * rank));
    for (int64_t i = 0; i < 3 * rank; i++) {
      const float* weights = chain_.inner + i * 2 * rank;
      joint[size_t(i)] = parts[i] + dot(weights, state, rank) + dot(weights + rank, embedded, rank);
    }
    for (int64_t i = 0; i < rank; i++) {
      const float gate = sigmoid(joint[size_t(i)]);
      state[i] = gate * state[i] + (1 - gate) * std::tanh(joint[size_t(rank + i)]);
      out[i] = std::tanh(joint[size_t(2 * rank + i)]);
    }
  }

  static bool better(const Best& a, const Best& b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
  }

  void look(const Team& team, const float* base, int64_t sequence, int64_t first, int64_t count,
            const float* values) {
    Best& best = best_[team.rank * step_.num_sequences + sequence];
    for (int64_t i = 0; i < count; i++) {
      const Best found{base[i] + values[i], first + i};
      if (better(found, best)) best = found;
    }
  }

  void end(int64_t place, int64_t sequence) {
    Best best = best_[sequence];
    for (int i = 1; i < num_threads(); i++) {
      const Best& other = best_[i * step_.num_sequences + sequence];
      if (better(other, best)) best = other;
    }
    step_.tokens[sequence * step_.wanted + place] = chain_.ids[best.index];
  }

  const DraftChain& chain_;
  const DraftChainStep& step_;
  float* outs_;
  float* states_;
  Best* best_;
  Workspace space_;
};

class Context {
 public:
  Context(Call& call, const DraftBlock& block, const DraftContext& step)
      : block_(block),
        model_(block.decoder),
        step_(step),
        rows_(call.take<float>(step.rows * model_.hidden)),
        pairs_(call.take<float>(step.rows * 2 * model_.num_kv_heads * model_.head_dim)),
        space_(call, step.rows, std::max(block.context->k, model_.hidden), num_threads()) {}

  void operator()(Team& team) {
    const int64_t hidden = model_.hidden, size = model_.num_kv_heads * model_.head_dim;
    multiply(team, *block_.context, step_.features, block_.context->k, rows_);
    each_row(team, step_.rows, [&](int64_t row) {
      float* x = rows_ + row * hidden;
      rms_norm(x, block_.context_norm, model_.eps, hidden, x);
    });
    team.barrier();
    for (int64_t index = 0; index < model_.num_layers; index++) {
      multiply(team, *block_.keys_values[index], rows_, hidden, pairs_);
      each_row(team, step_.rows, [&](int64_t row) {
        float *keys = step_.keys[index] + row * size, *values = step_.values[index] + row * size;
        std::memcpy(keys, pairs_ + row * 2 * size, size_t(size) * 4);
        std::memcpy(values, pairs_ + (row * 2 + 1) * size, size_t(size) * 4);
        turn(model_.layers[index], step_.positions[row] * model_.half, keys);
      });
      team.barrier();
    }
  }

 private:
  void multiply(Team& team, const Linear& linear, const float* x, int64_t width, float* out) {
    each_row(team, step_.rows, [&](int64_t row) { space_.put(linear, row, x + row * width); });
    team.barrier();
    product(linear, space_.rows(step_.rows, width), space_, team,
            [&](int64_t row, int64_t begin, int64_t count, const float* values) {
              std::memcpy(out + row * linear.n + begin, values, size_t(count) * 4);
            });
    team.barrier();
  }

  void turn(const DecoderLayer& layer, int64_t at, float* keys) {
    for (int64_t h = 0; h < model_.num_kv_heads; h++) {
      float* head = keys + h * model_.head_dim;
      if (layer.k_norm) rms_norm(head, layer.k_norm, model_.eps, model_.head_dim, head);
      if (layer.use_rope) rotate(head, model_.cos + at, model_.sin + at, model_.half);
    }
  }

  const DraftBlock& block_;
  const Decoder& model_;
  const DraftContext& step_;
  float* rows_;
  float* pairs_;
  Workspace space_;
};

}  // namespace
}  // namespace di

DI_EXPORT void di_draft_block(const di::DraftBlock* block, const di::DraftStep* step) {
  di::Call call;
  di::Block run(call, *block, *step);
  di::together([&](di::Team& team) { run(team); });
}

DI_EXPORT void di_draft_chain(const di::DraftChain* chain, const di::DraftChainStep* step) {
  di::Call call;
  di::Chain run(call, *chain, *step);
  di::together([&](di::Team& team) { run(team); });
}

DI_EXPORT void di_draft_context(const di::DraftBlock* block, const di::DraftContext* step) {
  di::Call call;
  di::Context run(call, *block, *step);
  di::together([&](di::Team& team) { run(team); });
}
