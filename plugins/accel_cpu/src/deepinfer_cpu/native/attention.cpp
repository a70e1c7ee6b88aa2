#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "attention_pairs.h"
#include "scratch.h"

namespace di {
namespace {

constexpr float LOG2E = 1.44269504f;
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int TILE_ROWS = 192;   // most rows (tokens times heads of a group) computed together
constexpr int LEAST_ROWS = 48;   // fewer make too little of a block that was put ready for them
constexpr int PIECE_BLOCKS = 8;  // blocks of one piece of a long sequence
constexpr int PIECE_ROWS = 16;   // most rows of a sequence that is cut
constexpr int PIECES = 4;        // pieces of work for each thread that make cutting needless
constexpr int LEAST_PIECES = 3;  // with fewer tiles for each thread one may end long after others

// A tile's state and what a block adds to it: largest score, mass, weighted values. Row by row.
struct State {
  float* values;  // [rows, width]
  float* mass;    // [rows, F32S]
  float* top;     // [rows]
};

// Two states of one row put together, the second being of later positions.
void fold(const State& into, int row, const float* values, const float* mass, float top,
          int width) {
  const float before = into.top[row], now = before > top ? before : top;
  const f32v old_part = all(power_of_two(before - now)), new_part = all(power_of_two(top - now));
  into.top[row] = now;
  float* sums = into.mass + row * F32S;
  store(sums, fma(load(sums), old_part, load(mass) * new_part));
  float* row_values = into.values + int64_t(row) * width;
  for (int at = 0; at < width; at += F32S)
    store(row_values + at, fma(load(row_values + at), old_part, load(values + at) * new_part));
}

// One thread's memory, kept between calls.
class Scratch {
 public:
  float* take(int64_t count) {
    float* taken = base() + used_;
    used_ += (count + 15) & ~int64_t(15);
    return taken;
  }
  void begin(int64_t most) {
    used_ = 0;
    if (int64_t(memory_.size()) < most + 16) memory_.resize(most + 16);
  }

 private:
  float* base() { return (float*)((uintptr_t(memory_.data()) + 63) & ~uintptr_t(63)); }
  std::vector<float> memory_;
  int64_t used_ = 0;
};

// Where the positions of one block lie for one key head.
template <typename E>
struct View {
  const E* keys;
  const E* values;
  int64_t key_stride;
};

// Tokens [first, last) of one sequence, seen by one key head.
struct Tile {
  int sequence, head, first, last;
};

// Pieces of work in a fixed order: tiles of every sequence, or pieces of one that is cut.
struct Unit {
  Tile tile;
  int first_block, last_block;
  int64_t record;  // of its first block in the shared scratch, -1: not cut
};

class Attender {
 public:
  Attender(const AttentionLayer& layer, const AttentionPlan& plan, const float* q,
           int64_t q_stride, float* out, int64_t out_stride)
      : layer_(layer), plan_(plan), q_(q), q_stride_(q_stride), out_(out), out_stride_(out_stride),
        group_(layer.num_query_heads / layer.num_kv_heads), width_(padded(layer.value_dim)),
        tile_tokens_(std::max(1, TILE_ROWS / group_)), record_(width_ + 2 * F32S) {}

  void run(Team& team) {
    const bool cut = cuts(team.size);
    shrink_tiles(team.size);
    walk(cut, team, [&](const Unit& unit) { compute(unit); });
    if (!cut) return;
    team.barrier();
    walk_cut(team, [&](const Unit& unit) { put_together(unit); });
  }

  // Floats of shared scratch that would let long sequences be cut, 0 if that is needless.
  int64_t scratch_size(int threads) const {
    int64_t units = 0, floats = 0;
    bool any_long = false;
    for (int i = 0; i < plan_.num_sequences; i++) {
      const int count = tokens(i);
      units += int64_t(tiles(count)) * layer_.num_kv_heads;
      if (!may_cut(i)) continue;
      floats += records(i) * record_;
      any_long |= blocks(i) > PIECE_BLOCKS;
    }
    return any_long && units < int64_t(PIECES) * threads ? floats : 0;
  }

 private:
  // ------------------------------------------------------------------------------ who does what

  int tokens(int i) const { return plan_.query_starts[i + 1] - plan_.query_starts[i]; }
  int tiles(int count) const { return (count + tile_tokens_ - 1) / tile_tokens_; }
  bool may_cut(int i) const { return tokens(i) > 0 && tokens(i) * group_ <= PIECE_ROWS; }
  int lowest(int sequence, int position) const {
    const int bound = plan_.visible_from[sequence];
    return layer_.window ? std::max(bound, position - layer_.window + 1) : bound;
  }
  int first_block(int i, int token) const {
    return std::max(0, lowest(i, plan_.positions[token])) / BLOCK;
  }
  int blocks(int i) const {
    const int first = plan_.query_starts[i], last = plan_.query_starts[i + 1] - 1;
    return plan_.positions[last] / BLOCK + 1 - first_block(i, first);
  }
  int64_t records(int i) const {
    return int64_t(blocks(i)) * tokens(i) * layer_.num_query_heads;
  }

  // Tiles of a short prompt are made smaller, so that there are some for every thread.
  void shrink_tiles(int threads) {
    const auto count = [&] {
      int64_t units = 0;
      for (int i = 0; i < plan_.num_sequences; i++)
        units += int64_t(tiles(tokens(i))) * layer_.num_kv_heads;
      return units;
    };
    while (tile_tokens_ / 2 * group_ >= LEAST_ROWS && count() < int64_t(LEAST_PIECES) * threads)
      tile_tokens_ /= 2;
  }

  bool cuts(int threads) const {
    const int64_t needed = plan_.scratch ? scratch_size(threads) : 0;
    return needed > 0 && needed <= plan_.scratch_size;
  }

  template <typename F>
  void walk(bool cut, Team& team, F&& work) {
    int64_t wanted = team.next(), before = 0, record = 0;
    for (int i = 0; i < plan_.num_sequences; i++) {
      const int count = tokens(i), begin = plan_.query_starts[i];
      if (!count) continue;
      const bool pieces = cut && may_cut(i);
      const int parts = pieces ? (blocks(i) + PIECE_BLOCKS - 1) / PIECE_BLOCKS : tiles(count);
      const int64_t here = int64_t(parts) * layer_.num_kv_heads;
      for (; wanted < before + here; wanted = team.next()) {
        // Those that see most come first, so that no thread ends with a long one.
        const int part = parts - 1 - int(wanted - before) / layer_.num_kv_heads;
        const int head = int(wanted - before) % layer_.num_kv_heads;
        const int size = (count + parts - 1) / parts;  // tiles of one size end together
        work(pieces ? piece(i, head, part, record) : whole(i, head, part, size, begin, count));
      }
      before += here;
      if (pieces) record += records(i);
    }
  }

  Unit whole(int i, int head, int part, int size, int begin, int count) const {
    const int first = begin + part * size;
    const Tile tile{i, head, first, std::min(first + size, begin + count)};
    return {tile, first_block(i, first), plan_.positions[tile.last - 1] / BLOCK + 1, -1};
  }

  Unit piece(int i, int head, int part, int64_t record) const {
    const Tile tile{i, head, plan_.query_starts[i], plan_.query_starts[i + 1]};
    const int first = first_block(i, tile.first), all_blocks = blocks(i);
    const int from = part * PIECE_BLOCKS, to = std::min(all_blocks, from + PIECE_BLOCKS);
    const int64_t rows = int64_t(tile.last - tile.first) * group_;
    return {tile, first + from, first + to, record + (int64_t(head) * all_blocks + from) * rows};
  }

  template <typename F>
  void walk_cut(Team& team, F&& work) {
    int64_t wanted = team.next(), before = 0, record = 0;
    for (int i = 0; i < plan_.num_sequences; i++) {
      if (!may_cut(i)) continue;
      for (; wanted < before + layer_.num_kv_heads; wanted = team.next())
        work(piece(i, int(wanted - before), 0, record));
      before += layer_.num_kv_heads;
      record += records(i);
    }
  }

  int pair_dims() const { return (layer_.key_dim + 1) / 2; }

  // ------------------------------------------------------------------------------ one unit

  void compute(const Unit& unit) {
    const int rows = (unit.tile.last - unit.tile.first) * group_;
    begin(rows);
    take_queries(unit.tile);
    for (int block = unit.first_block; block < unit.last_block; block++)
      one_block(unit, block, rows);
    if (unit.record < 0) finish(unit.tile);
  }

  void put_together(const Unit& first) {
    const Tile& tile = first.tile;
    const int rows = (tile.last - tile.first) * group_, count = blocks(tile.sequence);
    begin(rows);
    for (int block = 0; block < count; block++)
      for (int r = 0; r < rows; r++) {
        const float* from = plan_.scratch + (first.record + int64_t(block) * rows + r) * record_;
        if (from[width_ + F32S] != NEVER)
          fold(state_, r, from, from + width_, from[width_ + F32S], width_);
      }
    finish(tile);
  }

  void begin(int rows) {
    static thread_local Scratch scratch;
    const int64_t pairs = (layer_.key_dim + 1) / 2 + BLOCK / 2;
    const int64_t each = layer_.key_dim + BLOCK + 2 * width_ + 2 * F32S + 4 + pairs;
    scratch.begin(each * rows + int64_t(BLOCK) * (layer_.key_dim + 1 + width_) + 512);
    queries_ = scratch.take(int64_t(rows) * layer_.key_dim);
    scores_ = scratch.take(int64_t(rows) * BLOCK);
    state_ = {scratch.take(int64_t(rows) * width_), scratch.take(rows * F32S), scratch.take(rows + F32S)};
    added_ = {scratch.take(int64_t(rows) * width_), scratch.take(rows * F32S), scratch.take(rows + F32S)};
    query_pairs_ = (uint32_t*)scratch.take(int64_t(rows) * pair_dims());
    old_part_ = scratch.take(rows + F32S);
    new_part_ = scratch.take(rows + F32S);
    weight_pairs_ = (uint32_t*)scratch.take(int64_t(rows) * (BLOCK / 2));
    block_keys_ = scratch.take(int64_t(BLOCK) * (layer_.key_dim + 1));
    block_values_ = scratch.take(int64_t(BLOCK) * width_);
    std::fill_n(state_.values, int64_t(rows) * width_, 0.0f);
    std::fill_n(state_.mass, rows * F32S, 0.0f);
    std::fill_n(state_.top, rows, NEVER);
  }

  // Scaled once, so that scores are exponents of 2 (with a softcap: plain scores).
  void take_queries(const Tile& tile) {
    const float factor = layer_.softcap ? layer_.scale : layer_.scale * LOG2E;
    float* to = queries_;
    for (int t = tile.first; t < tile.last; t++) {
      const int64_t head = int64_t(tile.head) * group_;
      const float* from = q_ + t * q_stride_ + head * layer_.key_dim;
      for (int64_t at = 0; at < int64_t(group_) * layer_.key_dim; at++) *to++ = from[at] * factor;
    }
    if (DI_BF16_PAIRS && layer_.kv_type == KV_BF16)
      for (int64_t r = 0; r < int64_t(tile.last - tile.first) * group_; r++) {
        auto* pairs = (uint16_t*)(query_pairs_ + r * pair_dims());
        store_bf16(pairs, queries_ + r * layer_.key_dim, layer_.key_dim);
        if (layer_.key_dim % 2) pairs[layer_.key_dim] = 0;
      }
  }

  void one_block(const Unit& unit, int block, int rows) {
    const int base = block * BLOCK, sequence = unit.tile.sequence;
    int first = unit.tile.first, last = unit.tile.last;
    while (first < last && plan_.positions[first] < base) first++;
    while (last > first && lowest(sequence, plan_.positions[last - 1]) >= base + BLOCK) last--;
    const bool direct = layer_.page_size >= BLOCK && rows <= MAX_ROWS;
    const int seen = (first - unit.tile.first) * group_, end = (last - unit.tile.first) * group_;
#if DI_BF16_PAIRS
    if (layer_.kv_type == KV_BF16) {
      look_in_pairs(unit, base, first, last, direct);
      if (unit.record >= 0)
        keep(unit.record + int64_t(block - unit.first_block) * rows, rows, seen, end);
      return;
    }
#endif
    switch (layer_.kv_type) {
      case KV_BF16: look_at<Bf16>(unit.tile, base, first, last, direct); break;
      case KV_F16: look_at<F16>(unit.tile, base, first, last, direct); break;
      case KV_I8: look_at<int8_t>(unit.tile, base, first, last, direct); break;
      default: look_at<float>(unit.tile, base, first, last, layer_.page_size >= BLOCK);
    }
    if (unit.record < 0) {
      for (int r = seen; r < end; r++)
        fold(state_, r, added_.values + int64_t(r) * width_, added_.mass + r * F32S, added_.top[r],
             width_);
    } else {
      keep(unit.record + int64_t(block - unit.first_block) * rows, rows, seen, end);
    }
  }

  // Leave a block's parts for `put_together`.
  void keep(int64_t record, int rows, int seen, int end) {
    for (int r = 0; r < rows; r++) {
      float* to = plan_.scratch + (record + r) * record_;
      to[width_ + F32S] = r >= seen && r < end ? added_.top[r] : NEVER;
      std::copy_n(added_.values + int64_t(r) * width_, width_, to);
      std::copy_n(added_.mass + r * F32S, F32S, to + width_);
    }
  }

  void finish(const Tile& tile) {
    for (int t = tile.first, r = 0; t < tile.last; t++)
      for (int g = 0; g < group_; g++, r++) {
        const int head = tile.head * group_ + g;
        float mass = sum(load(state_.mass + r * F32S)), part = 1;
        if (layer_.sinks) {
          const float sink = layer_.sinks[head] * LOG2E;
          const float top = std::max(state_.top[r], sink);
          part = power_of_two(state_.top[r] - top);
          mass = mass * part + power_of_two(sink - top);
        }
        const float factor = part / mass;
        const float* from = state_.values + int64_t(r) * width_;
        float* to = out_ + t * out_stride_ + int64_t(head) * layer_.value_dim;
        for (int at = 0; at < layer_.value_dim; at++) to[at] = from[at] * factor;
      }
  }

  // ------------------------------------------------------------------------------ one block

  // Tokens [first, last) look at the block that begins at position `base`.
  template <typename E>
  void look_at(const Tile& tile, int base, int first, int last, bool direct) {
    if (first >= last) return;
    if (direct) {
      look(tile, base, first, last, in_place<E>(tile, base));
    } else {
      widen<E>(tile, base);
      look(tile, base, first, last, View<float>{block_keys_, block_values_, BLOCK});
    }
  }

  int page_of(const Tile& tile, int position) const {
    return plan_.block_tables[int64_t(tile.sequence) * plan_.max_pages +
                              position / layer_.page_size];
  }

  template <typename E>
  View<E> in_place(const Tile& tile, int base) const {
    const int64_t place = int64_t(page_of(tile, base)) * layer_.num_kv_heads + tile.head;
    const int64_t offset = base % layer_.page_size, size = layer_.page_size;
    return {(const E*)layer_.keys + place * layer_.key_dim * size + offset,
            (const E*)layer_.values + (place * size + offset) * width_, size};
  }

  // Copy a block as floats; pages that are gone are left out, nobody sees them.
  template <typename E>
  void widen(const Tile& tile, int base) {
    const int size = layer_.page_size, step = std::min(size, BLOCK);
    for (int at = 0; at < BLOCK; at += step) {
      const int index = (base + at) / size;
      if (index >= plan_.max_pages || page_of(tile, base + at) < 0) continue;
      const View<E> view = in_place<E>(tile, base + at);
      for (int d = 0; d < layer_.key_dim; d++)
        convert(view.keys + d * view.key_stride, block_keys_ + d * BLOCK + at, step);
      convert(view.values, block_values_ + int64_t(at) * width_, step * width_);
    }
  }

#if DI_BF16_PAIRS
  // The page, if there is one, that holds a position; and the position's place in it.
  bool find(const Tile& tile, int position, int64_t* page, int* offset) const {
    const int index = position / layer_.page_size;
    if (index >= plan_.max_pages || page_of(tile, position) < 0) return false;
    *page = int64_t(page_of(tile, position)) * layer_.num_kv_heads + tile.head;
    *offset = position % layer_.page_size;
    return true;
  }

  // Copy a block in pairs. Positions that none of the tokens [first, last) sees become zeros: what
  // lies there may be anything, and its weight 0 would not make it nothing.
  void put_in_pairs(const Tile& tile, int base, int first, int last) {
    const int size = layer_.page_size, dims = layer_.key_dim, step = std::min(size, F32S);
    const int low = lowest(tile.sequence, plan_.positions[first]) - base;
    const int high = plan_.positions[last - 1] + 1 - base;
    auto* keys = (uint32_t*)block_keys_;
    auto* values = (uint32_t*)block_values_;
    int64_t page;
    int offset;
    for (int at = 0; at < BLOCK; at += step) {
      if (!find(tile, base + at, &page, &offset)) continue;
      const Bf16* from = (const Bf16*)layer_.keys + page * dims * size + offset;
      for (int pair = 0; pair < pair_dims(); pair++, from += 2 * size) {
        const Bf16* next = 2 * pair + 1 < dims ? from + size : nullptr;
        uint32_t* to = keys + pair * BLOCK + at;
        if (step == F32S) {
          const i32v both = pairs_of(from, next);
          std::memcpy(to, &both, sizeof both);
        } else {
          for (int i = 0; i < step; i++)
            to[i] = uint32_t(next ? next[i].bits : 0) << 16 | from[i].bits;
        }
      }
    }
    const auto row = [&](int at) -> const Bf16* {
      if (at < low || at >= high || !find(tile, base + at, &page, &offset)) return nullptr;
      return (const Bf16*)layer_.values + (page * size + offset) * width_;
    };
    for (int at = 0; at < BLOCK; at += 2) {
      const Bf16 *even = row(at), *odd = row(at + 1);
      for (int lane = 0; lane < width_; lane += F32S) {
        const i32v both = pairs_of(even ? even + lane : nullptr, odd ? odd + lane : nullptr);
        std::memcpy(values + at / 2 * width_ + lane, &both, sizeof both);
      }
    }
  }

  // Tokens [first, last) look at a block; what it adds goes into the state, or, of a unit that is
  // put together later, is left as `added_`.
  void look_in_pairs(const Unit& unit, int base, int first, int last, bool direct) {
    if (first >= last) return;
    const Tile& tile = unit.tile;
    const bool fold = unit.record < 0;
    if (direct) {
      const View<Bf16> view = in_place<Bf16>(tile, base);
      look_at_pairs(tile, base, first, last, fold,
                    PagedPairs{view.keys, view.values, view.key_stride, width_});
    } else {
      put_in_pairs(tile, base, first, last);
      look_at_pairs(tile, base, first, last, fold,
                    ReadyPairs{(uint32_t*)block_keys_, (uint32_t*)block_values_, width_});
    }
  }

  template <typename Pairs>
  void look_at_pairs(const Tile& tile, int base, int first, int last, bool fold,
                     const Pairs& view) {
    const int row = (first - tile.first) * group_, rows = (last - first) * group_;
    row_tiles(rows, [&](auto count, int r) {
      const auto seen = [&](int i) {
        const int t = first + (r + i) / group_;
        return std::pair(seen_from(tile, t, base), seen_to(t, base));
      };
      const int at = row + r;
      weigh_rows<count>(query_pairs_ + int64_t(at) * pair_dims(), pair_dims(), view,
                        layer_.key_dim, layer_.softcap, seen, weight_pairs_ + at * (BLOCK / 2),
                        added_.mass + at * F32S, added_.top + at);
    });
    if (fold) fold_sums(row, row + rows);
    row_tiles(rows, [&](auto count, int r) {
      const int low = seen_from(tile, first + r / group_, base);
      const int high = seen_to(first + (r + count - 1) / group_, base);
      const uint32_t* weights = weight_pairs_ + (row + r) * (BLOCK / 2);
      const State& to = fold ? state_ : added_;
      float* values = to.values + int64_t(row + r) * width_;
      const float *before = old_part_ + row + r, *now = new_part_ + row + r;
      if (fold)
        mix_pairs<count>(weights, view, low, high, [&](int i, int lane, f32v sum) {
          float* at = values + i * width_ + lane;
          store(at, fma(load(at), all(before[i]), sum * all(now[i])));
        });
      else
        mix_pairs<count>(weights, view, low, high, [&](int i, int lane, f32v sum) {
          store(values + i * width_ + lane, sum);
        });
    });
  }

  // What `fold` does for the rows [row, end), but for values: those follow once they are mixed.
  void fold_sums(int row, int end) {
    for (int r = row; r < end; r += F32S) {
      const __mmask16 some = __mmask16(end - r >= F32S ? 0xffff : (1 << (end - r)) - 1);
      const f32v before = load(state_.top + r), top = load(added_.top + r);
      const f32v now = before > top ? before : top;
      store(old_part_ + r, power_of_two(before - now));
      store(new_part_ + r, power_of_two(top - now));
      _mm512_mask_storeu_ps(state_.top + r, some, (__m512)now);
    }
    for (int r = row; r < end; r++) {
      float* sums = state_.mass + r * F32S;
      store(sums, fma(load(sums), all(old_part_[r]), load(added_.mass + r * F32S) * all(new_part_[r])));
    }
  }
#endif

  template <typename E>
  static void convert(const E* from, float* to, int count) {
    int at = 0;
    for (; at + F32S <= count; at += F32S) store(to + at, load_as(from + at));
    for (; at < count; at++) to[at] = load_one(from + at);
  }

  // The part of a block that a token sees.
  int seen_from(const Tile& tile, int t, int base) const {
    return std::max(0, lowest(tile.sequence, plan_.positions[t]) - base);
  }
  int seen_to(int t, int base) const { return std::min(BLOCK, plan_.positions[t] + 1 - base); }

  template <typename E>
  void look(const Tile& tile, int base, int first, int last, const View<E>& view) {
    const int row = (first - tile.first) * group_, rows = (last - first) * group_;
    const int end = std::min(BLOCK, plan_.positions[last - 1] + 1 - base);
    score(queries_ + int64_t(row) * layer_.key_dim, layer_.key_dim, rows, view.keys,
          view.key_stride, layer_.key_dim, end, scores_ + row * BLOCK);
    float key_scales[BLOCK], value_scales[BLOCK];
    if (layer_.kv_type == KV_I8) take_scales(tile, base, key_scales, value_scales);
    int full = first;  // tokens [full, t) see the whole block and are not mixed yet
    for (int t = first; t < last; t++) {
      const int low = seen_from(tile, t, base), high = seen_to(t, base);
      weigh_token(tile, t, low, high, key_scales, value_scales);
      if (low == 0 && high == BLOCK) continue;
      mix_tokens(tile, full, t, 0, BLOCK, view);
      mix_tokens(tile, t, t + 1, low, high, view);
      full = t + 1;
    }
    mix_tokens(tile, full, last, 0, BLOCK, view);
  }

  void weigh_token(const Tile& tile, int t, int low, int high, const float* key_scales,
                   const float* value_scales) {
    const bool scaled = layer_.kv_type == KV_I8;
    for (int g = 0; g < group_; g++) {
      const int r = (t - tile.first) * group_ + g;
      float* scores = scores_ + r * BLOCK;
      if (scaled) multiply(scores, key_scales);
      if (layer_.softcap) cap(scores, layer_.softcap);
      std::fill(scores, scores + low, NEVER);
      std::fill(scores + high, scores + BLOCK, NEVER);
      f32v mass;
      added_.top[r] = weigh(scores, mass);
      store(added_.mass + r * F32S, mass);
      if (scaled) multiply(scores, value_scales);
    }
  }

  static void multiply(float* scores, const float* scales) {
    for (int i = 0; i < BLOCK; i += F32S) store(scores + i, load(scores + i) * load(scales + i));
  }

  void take_scales(const Tile& tile, int base, float* key_scales, float* value_scales) const {
    for (int at = 0; at < BLOCK; at++) {
      const int position = base + at;
      const int page = position / layer_.page_size < plan_.max_pages ? page_of(tile, position) : -1;
      const int64_t place = int64_t(page) * layer_.num_kv_heads + tile.head;
      const int64_t slot = place * layer_.page_size + position % layer_.page_size;
      key_scales[at] = page < 0 ? 0 : layer_.key_scales[slot];
      value_scales[at] = page < 0 ? 0 : layer_.value_scales[slot];
    }
  }

  template <typename E>
  void mix_tokens(const Tile& tile, int first, int last, int low, int high, const View<E>& view) {
    if (first >= last) return;
    const int64_t row = int64_t(first - tile.first) * group_;
    mix(scores_ + row * BLOCK, (last - first) * group_, view.values, width_, low, high,
        added_.values + row * width_, width_);
  }

  const AttentionLayer& layer_;
  const AttentionPlan& plan_;
  const float* q_;
  const int64_t q_stride_;
  float* out_;
  const int64_t out_stride_;
  const int group_, width_;
  int tile_tokens_;
  const int record_;
  uint32_t *query_pairs_ = nullptr, *weight_pairs_ = nullptr;
  float *old_part_ = nullptr, *new_part_ = nullptr;
  float *queries_ = nullptr, *scores_ = nullptr, *block_keys_ = nullptr, *block_values_ = nullptr;
  State state_{}, added_{};
};

// ------------------------------------------------------------------------------------- writing

void put(float* to, const float* from, int count) { std::copy_n(from, count, to); }
void put(Bf16* to, const float* from, int count) { store_bf16(&to->bits, from, count); }
void put(F16* to, const float* from, int count) {
  for (int i = 0; i < count; i++) to[i].bits = to_f16(from[i]);
}

template <typename E>
void write_as(const AttentionLayer& layer, int64_t slot, const float* k, const float* v) {
  constexpr int SOME = 64;
  const int64_t size = layer.page_size, page = slot / size, offset = slot % size;
  const int width = padded(layer.value_dim);
  for (int head = 0; head < layer.num_kv_heads; head++) {
    const int64_t place = page * layer.num_kv_heads + head;
    E* keys = (E*)layer.keys + place * layer.key_dim * size + offset;
    for (int from = 0; from < layer.key_dim; from += SOME) {
      const int count = std::min(SOME, layer.key_dim - from);
      E some[SOME];
      put(some, k + head * layer.key_dim + from, count);
      for (int d = 0; d < count; d++) keys[(from + d) * size] = some[d];
    }
    E* values = (E*)layer.values + (place * size + offset) * width;
    put(values, v + head * layer.value_dim, layer.value_dim);
  }
}

// One vector as int8 with the scale that is returned: bit for bit what core's storage makes of it.
float narrow(const float* from, int count, int8_t* to, int64_t stride) {
  float most = 0;
  bool finite = true;
  for (int d = 0; d < count; d++) {
    finite &= std::isfinite(from[d]);
    most = std::max(most, std::fabs(from[d]));
  }
  const float factor = finite && most > 0x1p-100f ? 127 / most : 0;
  for (int d = 0; d < count; d++)
    to[d * stride] = finite ? int8_t(std::nearbyint(from[d] * factor)) : int8_t(0);
  return finite ? most / 127 : std::numeric_limits<float>::quiet_NaN();
}

void write_narrow(const AttentionLayer& layer, int64_t slot, const float* k, const float* v) {
  const int64_t size = layer.page_size, page = slot / size, offset = slot % size;
  for (int head = 0; head < layer.num_kv_heads; head++) {
    const int64_t place = page * layer.num_kv_heads + head;
    layer.key_scales[place * size + offset] =
        narrow(k + head * layer.key_dim, layer.key_dim,
               (int8_t*)layer.keys + place * layer.key_dim * size + offset, size);
    layer.value_scales[place * size + offset] =
        narrow(v + head * layer.value_dim, layer.value_dim,
               (int8_t*)layer.values + (place * size + offset) * padded(layer.value_dim), 1);
  }
}

}  // namespace

void write_kv(const AttentionLayer& layer, int64_t slot, const float* k, const float* v) {
  switch (layer.kv_type) {
    case KV_BF16: write_as<Bf16>(layer, slot, k, v); break;
    case KV_F16: write_as<F16>(layer, slot, k, v); break;
    case KV_I8: write_narrow(layer, slot, k, v); break;
    default: write_as<float>(layer, slot, k, v);
  }
}

void attend(const AttentionLayer& layer, const AttentionPlan& plan, const float* q,
            int64_t q_stride, float* out, int64_t out_stride, Team& team) {
  Attender(layer, plan, q, q_stride, out, out_stride).run(team);
}

}  // namespace di

// Floats of scratch with which long sequences are cut among the threads, 0 if that is needless.
DI_EXPORT int64_t di_attention_scratch(const di::AttentionLayer* layer,
                                       const di::AttentionPlan* plan) {
  return di::Attender(*layer, *plan, nullptr, 0, nullptr, 0).scratch_size(di::num_threads());
}

// Write this step's keys and values (k null: somebody else did), then attend. Strides in floats.
DI_EXPORT void di_attend(const di::AttentionLayer* layer, const di::AttentionPlan* plan,
                         const float* q, int64_t q_stride, const float* k, int64_t k_stride,
                         const float* v, int64_t v_stride, float* out, int64_t out_stride) {
  di::Call call;
  di::together([&](di::Team& team) {
    if (k) {
      for (int64_t t = team.next(); t < plan->num_tokens; t = team.next())
        if (plan->write_slots[t] >= 0)
          di::write_kv(*layer, plan->write_slots[t], k + t * k_stride, v + t * v_stride);
      team.barrier();
    }
    di::attend(*layer, *plan, q, q_stride, out, out_stride, team);
  });
}
