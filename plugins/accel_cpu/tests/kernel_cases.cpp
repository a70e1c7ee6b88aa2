// Kernels against plain loops in double, without Python: run where there is none (test_kernel_programs.py).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "gemm_channel.h"
#include "numbers.h"

using namespace di;
using Floats = std::vector<float>;

extern "C" {
const char* di_level();
int32_t di_levels();
void di_set_threads(int32_t count);
int64_t di_packed_bytes(const Linear* linear);
void di_pack(const Linear* linear, const uint8_t* rows);
void di_linear(const Linear* linear, const float* x, int64_t x_stride, int64_t rows, float* out,
               int64_t out_stride);
void di_embedding(const Linear* linear, const int64_t* ids, int64_t count, float* out);
void di_rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows,
                 int64_t size, float* out);
void di_silu_mul(const float* gate_up, int64_t stride, int64_t rows, int64_t size, float* out);
void di_attend(const AttentionLayer* layer, const AttentionPlan* plan, const float* q,
               int64_t q_stride, const float* k, int64_t k_stride, const float* v,
               int64_t v_stride, float* out, int64_t out_stride);
int64_t di_channel_bytes(const ChannelLinear* linear);
void di_channel_pack(const ChannelLinear* linear, const float* rows);
void di_channel_linear(const ChannelLinear* linear, const float* x, int64_t x_stride, int64_t rows,
                       float* out, int64_t out_stride);
int64_t di_experts(const Experts* experts, const float* x, int64_t x_stride, const int64_t* ids,
                   const float* weights, int64_t rows, int64_t chosen, float* out);
}

namespace {

std::mt19937 generator(0);

Floats normal(int64_t count) {
  std::normal_distribution<float> draw;
  Floats values(static_cast<size_t>(count));
  for (float& value : values) value = draw(generator);
  return values;
}

void check(const char* what, const Floats& found, const std::vector<double>& expected,
           double tolerance, double most = 1e-3) {
  double worst = 0;
  for (double value : expected) most = std::max(most, std::fabs(value));
  for (size_t i = 0; i < expected.size(); i++) {
    const double error = std::fabs(found[i] - expected[i]);
    worst = error <= worst ? worst : error;  // NaN is worst
  }
  if (worst <= tolerance * most) return;
  std::fprintf(stderr, "%s: off by %g of %g\n", what, worst, most);
  std::exit(1);
}

void same(const char* what, const float* found, const float* expected, int64_t count) {
  if (!std::memcmp(found, expected, size_t(count) * 4)) return;
  std::fprintf(stderr, "%s: other bits\n", what);
  std::exit(1);
}

// A packed weight, and what it stands for.
struct Weight {
  Linear linear{};
  Floats dense;
  std::vector<uint8_t> panels;

  Weight(int32_t format, int64_t n, int64_t k) : dense(normal(n * k)) {
    std::vector<uint8_t> rows = is_integer(format) ? blocks(format, n * k) : floats(format);
    linear.n = n;
    linear.k = k;
    linear.format = format;
    linear.bits = 16;
    panels.resize(size_t(di_packed_bytes(&linear)) + 64);
    linear.panels = panels.data() + (64 - uintptr_t(panels.data()) % 64) % 64;
    di_pack(&linear, rows.data());
  }

 private:
  std::vector<uint8_t> floats(int32_t format) {
    if (format == F32) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(dense.data());
      return {bytes, bytes + dense.size() * 4};
    }
    std::vector<uint8_t> bytes(dense.size() * 2);
    for (size_t i = 0; i < dense.size(); i++) {
      const uint16_t narrow = to_bf16(dense[i]);
      dense[i] = from_bf16(narrow);
      std::memcpy(&bytes[2 * i], &narrow, 2);
    }
    return bytes;
  }

  // Random blocks as GGUF files have them; `dense` becomes what they mean.
  std::vector<uint8_t> blocks(int32_t format, int64_t count) {
    const size_t head = format == Q4_1 ? 4 : 2, body = format == Q8_0 ? 32 : 16;
    std::vector<uint8_t> bytes(size_t(count / 32) * (head + body));
    for (uint8_t& byte : bytes) byte = uint8_t(generator());
    for (size_t b = 0; b < size_t(count / 32); b++) {
      uint8_t* block = &bytes[b * (head + body)];
      const float scale = float(1 + generator() % 7) / 64, least = -float(generator() % 5) / 16;
      const uint16_t narrow[2] = {to_f16(scale), to_f16(least)};
      std::memcpy(block, narrow, head);
      for (size_t i = 0; i < 32; i++) {
        const int nibble = i < 16 ? block[head + i] & 15 : block[head + i - 16] >> 4;
        const float value = format == Q8_0 ? scale * float(int8_t(block[head + i]))
                            : format == Q4_0 ? scale * float(nibble - 8)
                                             : scale * float(nibble) + least;
        dense[b * 32 + i] = value;
      }
    }
    return bytes;
  }
};

double dot(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += double(a[i]) * b[i];
  return sum;
}

double sizes(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += std::fabs(double(a[i]) * b[i]);
  return sum;
}

void products() {
  for (int32_t format : {Q4_0, Q4_1, Q8_0, BF16, F32})
    for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 32}, {16, 64}, {37, 96}, {130, 160}}) {
      const Weight weight(format, n, k);
      for (int64_t rows : {1, 2, 3, 5, 9, 66}) {
        const Floats x = normal(rows * k);
        Floats found(size_t(rows * n)), alone(static_cast<size_t>(n));
        std::vector<double> expected;
        double most = 0;  // that is added up: activations are rounded beside it, not the result
        for (int64_t r = 0; r < rows; r++)
          for (int64_t o = 0; o < n; o++) {
            const float *row = &x[size_t(r * k)], *output = &weight.dense[size_t(o * k)];
            expected.push_back(dot(row, output, k));
            most = std::max(most, sizes(row, output, k));
          }
        di_linear(&weight.linear, x.data(), k, rows, found.data(), n);
        check("product", found, expected, 3e-5, most);
        di_linear(&weight.linear, &x[size_t((rows - 1) * k)], k, 1, alone.data(), n);
        same("a row alone", alone.data(), &found[size_t((rows - 1) * n)], n);
      }
      const int64_t id = n - 1;
      Floats row(static_cast<size_t>(k));
      di_embedding(&weight.linear, &id, 1, row.data());
      check("embedding", row, {weight.dense.end() - k, weight.dense.end()}, 1e-7);
    }
}

// Numbers of 8 bits: rounded to them first, a product is exact.
Floats rounded(const Floats& rows, int64_t k) {
  Floats out;
  for (size_t at = 0; at < rows.size(); at += size_t(k)) {
    float most = 0;
    for (size_t i = at; i < at + size_t(k); i++) most = std::max(most, std::fabs(rows[i]));
    for (size_t i = at; i < at + size_t(k); i++)
      out.push_back(std::nearbyint(rows[i] * (127 / most)) * (most / 127));
  }
  return out;
}

void channels() {
  for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 3}, {16, 64}, {37, 100}, {130, 160}}) {
    const Floats dense = normal(n * k), weights = rounded(dense, k);
    ChannelLinear linear{nullptr, nullptr, n, k};
    std::vector<uint8_t> panels(size_t(di_channel_bytes(&linear)));
    linear.panels = panels.data();
    di_channel_pack(&linear, dense.data());
    for (int64_t rows : {1, 3, 9, 66}) {
      const Floats x = normal(rows * k), near = rounded(x, k);
      Floats found(size_t(rows * n));
      std::vector<double> expected;
      for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < n; o++)
          expected.push_back(dot(&near[size_t(r * k)], &weights[size_t(o * k)], k));
      di_channel_linear(&linear, x.data(), k, rows, found.data(), n);
      check("product of 8 bits", found, expected, 1e-6);
    }
  }
}

void rows() {
  for (int64_t size : {1, 17, 64, 577}) {
    const Floats x = normal(3 * size), scale = normal(size), pair = normal(3 * 2 * size);
    Floats normed(size_t(3 * size)), act(size_t(3 * size));
    std::vector<double> norms, acts;
    for (int64_t r = 0; r < 3; r++) {
      const float* row = &x[size_t(r * size)];
      const double factor = 1 / std::sqrt(dot(row, row, size) / double(size) + 1e-5);
      const float* gate = &pair[size_t(r * 2 * size)];
      for (int64_t i = 0; i < size; i++) {
        norms.push_back(row[i] * factor * scale[size_t(i)]);
        acts.push_back(gate[i] / (1 + std::exp(-double(gate[i]))) * gate[size + i]);
      }
    }
    di_rms_norm(x.data(), size, scale.data(), 1e-5f, 3, size, normed.data());
    check("norm", normed, norms, 1e-5);
    di_silu_mul(pair.data(), 2 * size, 3, size, act.data());
    check("silu", act, acts, 1e-5);
  }
}

// One sequence of `count` tokens in pages in disorder, then one more token.
void attention(int32_t kv_type, int count, int window, double tolerance) {
  constexpr int KV = 2, HEADS = 6, DIM = 24, WIDTH = 32, SIZE = 16;
  const int pages = count / SIZE + 1, numbers = pages * KV * SIZE;
  std::vector<uint8_t> keys(size_t(numbers * DIM * 4)), values(size_t(numbers * WIDTH * 4));
  Floats key_scales(static_cast<size_t>(numbers)), value_scales(static_cast<size_t>(numbers));
  AttentionLayer layer{};
  layer.keys = keys.data();
  layer.values = values.data();
  layer.key_scales = key_scales.data();
  layer.value_scales = value_scales.data();
  layer.scale = 0.2f;
  layer.window = window;
  layer.kv_type = kv_type;
  layer.page_size = SIZE;
  layer.num_query_heads = HEADS;
  layer.num_kv_heads = KV;
  layer.key_dim = layer.value_dim = DIM;
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (int i = 0; i < pages; i++) table[size_t(i)] = (i * 7 + 3) % pages;
  if (pages % 7 == 0) std::reverse(table.begin(), table.end());
  const Floats q = normal((count + 1) * HEADS * DIM), k = normal((count + 1) * KV * DIM),
               v = normal((count + 1) * KV * DIM);
  Floats found(size_t((count + 1) * HEADS * DIM));
  for (auto [from, rows] : {std::pair<int, int>{0, count}, {count, 1}}) {
    std::vector<int32_t> positions;
    std::vector<int64_t> slots;
    for (int p = from; p < from + rows; p++) {
      positions.push_back(p);
      slots.push_back(int64_t(table[size_t(p / SIZE)]) * SIZE + p % SIZE);
    }
    const int32_t starts[] = {0, rows}, visible = 0;
    AttentionPlan plan{};
    plan.positions = positions.data();
    plan.query_starts = starts;
    plan.block_tables = table.data();
    plan.visible_from = &visible;
    plan.write_slots = slots.data();
    plan.num_tokens = rows;
    plan.num_sequences = 1;
    plan.max_pages = pages;
    di_attend(&layer, &plan, &q[size_t(from * HEADS * DIM)], HEADS * DIM,
              &k[size_t(from * KV * DIM)], KV * DIM, &v[size_t(from * KV * DIM)], KV * DIM,
              &found[size_t(from * HEADS * DIM)], HEADS * DIM);
  }
  std::vector<double> expected;
  for (int t = 0; t <= count; t++)
    for (int h = 0; h < HEADS; h++) {
      const int head = h / (HEADS / KV), low = window ? std::max(0, t - window + 1) : 0;
      std::vector<double> sums(DIM);
      double mass = 0;
      for (int p = low; p <= t; p++) {
        const size_t at = size_t((p * KV + head) * DIM);
        const double weight = std::exp(0.2 * dot(&q[size_t((t * HEADS + h) * DIM)], &k[at], DIM));
        mass += weight;
        for (size_t i = 0; i < DIM; i++) sums[i] += weight * v[at + i];
      }
      for (double sum : sums) expected.push_back(sum / mass);
    }
  check("attention", found, expected, tolerance);
}

void experts() {
  constexpr int64_t COUNT = 3, HIDDEN = 64, INNER = 32, ROWS = 70, CHOSEN = 2;
  std::vector<Weight> up, down;
  for (int i = 0; i < COUNT; i++) {
    up.emplace_back(Q4_1, 2 * INNER, HIDDEN);
    down.emplace_back(Q8_0, HIDDEN, INNER);
  }
  const Linear *ups[COUNT], *downs[COUNT];
  for (int i = 0; i < COUNT; i++) ups[i] = &up[size_t(i)].linear, downs[i] = &down[size_t(i)].linear;
  const Experts layer{ups, downs, COUNT, HIDDEN, INNER, 1.7f, 1.0f, 1.0f, 0};
  const Floats x = normal(ROWS * HIDDEN), weights = normal(ROWS * CHOSEN);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < ROWS; i++) ids.push_back(i % COUNT), ids.push_back((i + 1) % COUNT);
  Floats found(size_t(ROWS * HIDDEN));
  std::vector<double> expected(found.size());
  for (int64_t i = 0; i < ROWS * CHOSEN; i++) {
    const auto& [first, second] = std::pair{up[size_t(ids[size_t(i)])].dense.data(),
                                            down[size_t(ids[size_t(i)])].dense.data()};
    const float* row = &x[size_t(i / CHOSEN * HIDDEN)];
    Floats act;
    for (int64_t o = 0; o < INNER; o++) {
      const double g = std::min(dot(row, first + o * HIDDEN, HIDDEN), 1.0);
      const double u = dot(row, first + (INNER + o) * HIDDEN, HIDDEN);
      const double size = g / (1 + std::exp(-1.7f * g));
      act.push_back(float(size * (std::min(std::max(u, -1.0), 1.0) + 1)));
    }
    for (int64_t o = 0; o < HIDDEN; o++)
      expected[size_t(i / CHOSEN * HIDDEN + o)] +=
          weights[size_t(i)] * dot(act.data(), second + o * INNER, INNER);
  }
  di_experts(&layer, x.data(), HIDDEN, ids.data(), weights.data(), ROWS, CHOSEN, found.data());
  check("experts", found, expected, 1e-3);
}

}  // namespace

int main() {
  for (int threads : {1, 3}) {
    di_set_threads(threads);
    products();
    channels();
    rows();
    for (int window : {0, 20})
      for (int count : {5, 64, 150}) {
        attention(KV_F32, count, window, 1e-4);
        attention(KV_BF16, count, window, 2e-2);
        attention(KV_F16, count, window, 4e-3);
        attention(KV_I8, count, window, 4e-2);
      }
    experts();
  }
  di_set_threads(1);
  std::printf("%s of %d\n", di_level(), di_levels());
}
