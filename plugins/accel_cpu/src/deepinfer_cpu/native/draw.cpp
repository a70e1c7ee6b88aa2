// Random tokens: what core's `deepinfer_core.sampling` specifies, operation by operation in f64, so
// that the same tokens are drawn. What cannot win is not looked at.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "scratch.h"
#include "simd.h"

namespace di {
namespace {

constexpr double LN2 = 0.6931471805599453;
constexpr double LN2_HIGH = 0x162E42FEFA3800 * 0x1p-53;
constexpr double LN2_LOW = 5.4979230187083711552420206887059e-14;
constexpr double SQRT_HALF = 0.7071067811865476;
constexpr int LOG_TERMS = 12;
constexpr double MOST_NOISE = 36.9;
constexpr double NEVER = -std::numeric_limits<double>::infinity();

// `portable.log_float`.
double log_of(double x) {
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < SQRT_HALF) mantissa *= 2.0, exponent--;
  const double rest = mantissa - 1.0, s = rest / (rest + 2.0), z = s * s;
  double series = 1.0 / (2 * LOG_TERMS + 1);
  for (int term = LOG_TERMS - 1; term > 0; term--) series = series * z + 1.0 / (2 * term + 1);
  const double correction = s * (rest - series * z * 2.0);
  return exponent * LN2_HIGH + (rest + (exponent * LN2_LOW - correction));
}

// `rng.splitmix` and `rng.gumbel_float`.
uint64_t bits_of(uint64_t key, uint64_t token) {
  uint64_t bits = (token + 1) * 0x9E3779B97F4A7C15u + key;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return bits ^ (bits >> 31);
}

double noise_of(uint64_t bits) {
  return -log_of(-log_of((double(bits >> 12) + 0.5) * 0x1p-52));
}

// At least the noise: -log(-log u) <= -log(1 - u), and 1 - u begins with as many zeros as u ones.
double most_noise(uint64_t bits) {
  const uint64_t rest = ~bits >> 12;
  const int ones = rest ? __builtin_clzll(rest) - 12 : 52;
  return (ones + 1) * LN2 + 1e-9;
}

struct Choice {
  int64_t token = -1;
  double score = NEVER;

  void offer(int64_t id, double x, uint64_t key) {
    if (!(x + MOST_NOISE >= score) || x == NEVER) return;
    const uint64_t bits = bits_of(key, uint64_t(id));
    if (!(x + most_noise(bits) >= score)) return;
    const double found = x + noise_of(bits);
    if (found > score || token < 0) score = found, token = id;
  }
};

// `portable.masses`: round(e^x * 2^40), from a table of 256 steps an octave.
class Masses {
 public:
  explicit Masses(const double* table) : table_(table) {}

  int64_t operator()(double x) const {
    constexpr double STEP = LN2 / 256, FLOOR = -41 * LN2, MAGIC = 0x1.8p52;
    double rest = x > FLOOR - 0.25 ? x : FLOOR - 0.25;
    // Added to MAGIC, a small number is rounded, ties to even, and stands in the lowest bits.
    const double index = rest * (-1.0 / STEP) + MAGIC;
    rest += (index - MAGIC) * STEP;
    double series = rest * (1.0 / 6.0);
    series = ((series + 0.5) * rest + 1.0) * rest + 1.0;
    return integer(series * table_[integer(index)] + MAGIC);
  }

 private:
  static int64_t integer(double added) {
    int64_t bits;
    std::memcpy(&bits, &added, 8);
    return bits - 0x4338000000000000;
  }

  const double* table_;
};

}  // namespace

// One row and what is asked of it.
struct DrawRow {
  double temperature;
  double top_p;  // 1 = off
  double min_p;  // 0 = off
  int64_t top_k;  // 0 = off
  uint64_t key;
};

namespace {

class Drawer {
 public:
  Drawer(const float* logits, int64_t vocab, const DrawRow& row, const double* table)
      : logits_(logits), vocab_(vocab), row_(row), masses_(table) {
    f32v most = splat(logits[0]);
    int64_t i = 0;
    for (; i + F32S <= vocab; i += F32S) most = vmax(most, load(logits + i));
    for (; i < vocab; i++) most = vmax(most, splat(logits[i]));
    largest_ = largest(most);
  }

  int64_t draw() const {
    Choice choice;
    if (!row_.top_k && row_.top_p == 1.0 && row_.min_p == 0.0) {
      for (int64_t i = 0; i < vocab_; i++) choice.offer(i, scaled(i), row_.key);
      return choice.token;
    }
    std::vector<int32_t> kept = survivors();
    if (kept.size() == 1) return kept[0];
    std::sort(kept.begin(), kept.end());  // the lowest id wins among equals
    for (const int32_t id : kept) choice.offer(id, scaled(id), row_.key);
    return choice.token;
  }

 private:
  double scaled(int64_t token) const {
    return (double(logits_[token]) - largest_) / row_.temperature;
  }

  // The first tokens in the order of `filters`: as many as every filter keeps.
  std::vector<int32_t> survivors() const {
    const int64_t limit = row_.top_k ? std::min(row_.top_k, vocab_) : vocab_;
    const double floor = row_.min_p > 0 ? log_of(row_.min_p) : NEVER;
    const int64_t needed = row_.top_p < 1.0 ? needed_mass() : 0;
    std::vector<int32_t> ids;
    for (double reach = 8 * row_.temperature;; reach *= 2) {
      const bool all = !(reach < 1e30);
      collect(all ? -std::numeric_limits<float>::infinity() : float(largest_ - reach), ids);
      const int64_t found = int64_t(ids.size());
      order(ids, needed ? found : std::min(limit, found));
      int64_t kept = limit, likely = 0, mass = 0, heavy = 0;
      if (floor > NEVER) {
        for (const int32_t id : ids) likely += scaled(id) >= floor;
        if (likely < found) kept = std::min(kept, likely);
      }
      if (needed) {
        while (heavy < found && mass < needed) mass += masses_(scaled(ids[heavy++]));
        if (mass >= needed) kept = std::min(kept, heavy);
      }
      if (kept > found && !all) continue;
      ids.resize(std::min(kept, found));
      const auto banned = [&](int32_t id) { return scaled(id) == NEVER; };
      ids.erase(std::remove_if(ids.begin(), ids.end(), banned), ids.end());
      return ids;
    }
  }

  int64_t needed_mass() const {
    int64_t total = 0;
    for (int64_t i = 0; i < vocab_; i++) total += masses_(scaled(i));
    return int64_t(std::ceil(double(total) * row_.top_p));
  }

  // Ids whose logit is at least `cut`, ascending.
  void collect(float cut, std::vector<int32_t>& ids) const {
    ids.clear();
    for (int64_t i = 0; i < vocab_; i++)
      if (logits_[i] >= cut) ids.push_back(int32_t(i));
  }

  // The first `count` in order: larger logit first, lower id first among equals.
  void order(std::vector<int32_t>& ids, int64_t count) const {
    const auto before = [&](int32_t a, int32_t b) {
      return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
    };
    if (count < int64_t(ids.size()))
      std::nth_element(ids.begin(), ids.begin() + count, ids.end(), before);
    std::sort(ids.begin(), ids.begin() + count, before);
  }

  const float* logits_;
  const int64_t vocab_;
  const DrawRow& row_;
  const Masses masses_;
  double largest_;
};

}  // namespace
}  // namespace di

// logits: [rows, vocab], rows `stride` numbers apart; table: `portable.exponentials`; out: [rows].
DI_EXPORT void di_draw(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                       const di::DrawRow* params, const double* table, int64_t* out) {
  di::Call call;
  di::together([&](di::Team& team) {
    for (int64_t row = team.next(); row < rows; row = team.next())
      out[row] = di::Drawer(logits + row * stride, vocab, params[row], table).draw();
  });
}
