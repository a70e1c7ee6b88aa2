#include "gemm_channel.h"

#include <algorithm>

#include "product.h"

namespace di {
namespace {

constexpr int64_t STEP = 4 * PANEL;  // bytes of a panel for 4 inputs
constexpr int32_t OFFSET = 128;      // that weights are stored with

#if DI_AVX512
typedef __m512i ints;
constexpr int MOST = 8;
struct Four {  // inputs of a row, for all outputs of a vector
  ints all;
};
inline Four four_of(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return {_mm512_set1_epi32(word)};
}
struct Weights {
  ints bytes;
};
inline Weights load_weights(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline ints add(ints sum, Weights w, Four x) { return _mm512_dpbusd_epi32(sum, w.bytes, x.all); }
#elif DI_AVX2
typedef __m256i ints;
constexpr int MOST = 4;
// Products of a pair of bytes do not fit into 16 bits, so even and odd ones are multiplied apart.
struct Four {
  ints even, odd;
};
inline Four four_of(const int8_t* x) {
  const auto two = [](int8_t a, int8_t b) {
    return _mm256_set1_epi32(int32_t(uint32_t(uint16_t(a)) | uint32_t(uint16_t(b)) << 16));
  };
  return {two(x[0], x[2]), two(x[1], x[3])};
}
struct Weights {
  ints even, odd;
};
inline Weights load_weights(const uint8_t* p) {
  const ints raw = _mm256_loadu_si256((const __m256i*)p);
  return {_mm256_and_si256(raw, _mm256_set1_epi16(255)), _mm256_srli_epi16(raw, 8)};
}
inline ints add(ints sum, Weights w, Four x) {
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(w.even, x.even),
                                                _mm256_madd_epi16(w.odd, x.odd)));
}
#else
typedef i32v ints;
constexpr int MOST = 4;
struct Four {
  int32_t x[4];
};
inline Four four_of(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
struct Weights {
  i32v w[4];
};
inline Weights load_weights(const uint8_t* p) {
  Weights all;
  for (int i = 0; i < F32S; i++)
    for (int j = 0; j < 4; j++) all.w[j][i] = p[4 * i + j];
  return all;
}
inline ints add(ints sum, const Weights& w, const Four& x) {
  for (int j = 0; j < 4; j++) sum += w.w[j] * x.x[j];
  return sum;
}
#endif

// What integer sums mean, once they are complete; `total` is the sum of the row's numbers.
void finish(const uint8_t* panel, const int32_t* sums, float scale, int32_t total, float* out) {
  const float* scales = reinterpret_cast<const float*>(panel);
  for (int v = 0; v < VECS; v++) {
    i32v whole;
    std::memcpy(&whole, sums + v * F32S, sizeof whole);
    whole -= total * OFFSET;
    store(out + v * F32S, __builtin_convertvector(whole, f32v) * load(scales + v * F32S) *
                              splat(scale));
  }
}

template <int R>
void tile(const uint8_t* weights, int64_t k, const int8_t* x, int32_t* sums) {
  ints total[R][VECS] = {};
  for (int64_t at = 0; at < k; at += 4) {
    Weights w[VECS];
    for (int v = 0; v < VECS; v++) w[v] = load_weights(weights + at / 4 * STEP + v * 4 * F32S);
    for (int r = 0; r < R; r++) {
      const Four same = four_of(x + r * k + at);
      for (int v = 0; v < VECS; v++) total[r][v] = add(total[r][v], w[v], same);
    }
  }
  std::memcpy(sums, total, sizeof total);
}

template <int R>
void rows_of(const uint8_t* weights, int64_t k, const int8_t* x, int64_t count, int32_t* sums) {
  for (; count >= R; count -= R, x += R * k, sums += R * PANEL) tile<R>(weights, k, x, sums);
  if constexpr (R > 1) {
    if (count) rows_of<R / 2>(weights, k, x, count, sums);
  }
}

#if DI_AMX
// Tiles: 0 the sums, 1 rows of x, 2 weights. Up to 16 rows at once, 64 inputs a step.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

void tiles(const uint8_t* weights, int64_t k, const int8_t* x, int64_t count, int32_t* sums) {
  for (; count > 0; count -= 16, x += 16 * k, sums += 16 * PANEL) {
    TileConfig config;
    config.rows[0] = config.rows[1] = uint8_t(std::min<int64_t>(count, 16));
    config.rows[2] = 16;
    config.bytes[0] = config.bytes[1] = config.bytes[2] = 64;
    _tile_loadconfig(&config);
    _tile_zero(0);
    for (int64_t at = 0; at < k; at += STRIDE) {
      _tile_loadd(1, x + at, k);
      _tile_loadd(2, weights + at / 4 * STEP, STEP);
      _tile_dpbsud(0, 1, 2);
    }
    _tile_stored(0, sums, PANEL * 4);
  }
  _tile_release();
}
#endif

// Numbers as 8 bits with the scale that is returned; NaN and infinity make that NaN.
float narrow(const float* x, int64_t k, int8_t* quants) {
  float most = 0;
  bool finite = true;
  for (int64_t i = 0; i < k; i++) {
    finite &= std::isfinite(x[i]);
    most = std::max(most, std::fabs(x[i]));
  }
  const float factor = finite && most > 0x1p-100f ? 127 / most : 0;
  for (int64_t i = 0; i < k; i++)
    quants[i] = finite ? int8_t(std::nearbyint(x[i] * factor)) : int8_t(0);
  return finite ? most / 127 : from_bits(0x7fc00000u);
}

}  // namespace

void multiply_channel(const ChannelLinear& linear, const ChannelRows& rows, int64_t panel,
                      int64_t first, int64_t last, float* out) {
  const int64_t inputs = linear.inputs();
  const uint8_t* head = linear.panels + panel * linear.panel_bytes();
  const uint8_t* weights = head + PANEL * 4;
  int32_t sums[BLOCK * PANEL];
  for (int64_t row = first; row < last; row += BLOCK) {
    const int64_t count = std::min(BLOCK, last - row);
#if DI_AMX
    tiles(weights, inputs, rows.quants + row * inputs, count, sums);
#else
    rows_of<MOST>(weights, inputs, rows.quants + row * inputs, count, sums);
#endif
    for (int64_t r = 0; r < count; r++)
      finish(head, sums + r * PANEL, rows.scales[row + r], rows.sums[row + r],
             out + (row + r - first) * PANEL);
  }
}

}  // namespace di

using namespace di;

DI_EXPORT int64_t di_channel_bytes(const ChannelLinear* linear) {
  return linear->num_panels() * linear->panel_bytes();
}

// Fill linear->panels from rows [n, k].
DI_EXPORT void di_channel_pack(const ChannelLinear* linear, const float* rows) {
  Call call;
  const int64_t k = linear->k;
  int8_t* quants = call.take<int8_t>(num_threads() * k);
  together([&](Team& team) {
    share(team, 1, linear->num_panels(), [&](int64_t, int64_t, int64_t panel) {
      uint8_t* head = const_cast<uint8_t*>(linear->panels) + panel * linear->panel_bytes();
      std::memset(head, 0, PANEL * 4);
      std::memset(head + PANEL * 4, OFFSET, size_t(linear->panel_bytes() - PANEL * 4));
      int8_t* mine = quants + team.rank * k;
      for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < linear->n; lane++) {
        const float scale = narrow(rows + (panel * PANEL + lane) * k, k, mine);
        std::memcpy(head + 4 * lane, &scale, 4);
        uint8_t* to = head + PANEL * 4 + 4 * lane;
        for (int64_t i = 0; i < k; i++) to[i / 4 * STEP + i % 4] = uint8_t(mine[i] + OFFSET);
      }
    });
  });
}

// y = x W^T + b.  x: [rows, k] with row stride x_stride, out: [rows, n] likewise.
DI_EXPORT void di_channel_linear(const ChannelLinear* linear, const float* x, int64_t x_stride,
                                 int64_t rows, float* out, int64_t out_stride) {
  Call call;
  const int64_t k = linear->k, inputs = linear->inputs();
  int8_t* quants = call.take<int8_t>(rows * inputs);
  float* scales = call.take<float>(rows);
  int32_t* sums = call.take<int32_t>(rows);
  float* pieces = call.take<float>(num_threads() * BLOCK * PANEL);
  together([&](Team& team) {
    for (int64_t row = team.next(); row < rows; row = team.next()) {
      int8_t* mine = quants + row * inputs;
      scales[row] = narrow(x + row * x_stride, k, mine);
      std::memset(mine + k, 0, size_t(inputs - k));
      int32_t sum = 0;
      for (int64_t i = 0; i < k; i++) sum += mine[i];
      sums[row] = sum;
    }
    team.barrier();
    float* piece = pieces + team.rank * BLOCK * PANEL;
    share(team, rows, linear->num_panels(), [&](int64_t first, int64_t last, int64_t panel) {
      multiply_channel(*linear, {quants, scales, sums}, panel, first, last, piece);
      const int64_t begin = panel * PANEL, count = std::min<int64_t>(PANEL, linear->n - begin);
      for (int64_t row = first; row < last; row++)
        for (int64_t i = 0; i < count; i++)
          out[row * out_stride + begin + i] =
              piece[(row - first) * PANEL + i] + (linear->bias ? linear->bias[begin + i] : 0);
    });
  });
}
