// Tile registers and the tile instructions that the kernels use, as Intel's manual defines them, in
// plain loops: for machines without AMX. Included before everything else; see emulated_avx512.h.
#pragma once

#include "emulated_avx512.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define DI_AMX 1

struct EmulatedTiles {
  bool configured = false;
  uint16_t bytes[8] = {};
  uint8_t rows[8] = {};
  uint8_t data[8][16][64] = {};
};
inline thread_local EmulatedTiles di_tiles;

inline void di_tile_config(const void* config) {
  const uint8_t* raw = static_cast<const uint8_t*>(config);
  if (raw[0] != 1) std::abort();
  std::memcpy(di_tiles.bytes, raw + 16, sizeof di_tiles.bytes);
  std::memcpy(di_tiles.rows, raw + 48, sizeof di_tiles.rows);
  std::memset(di_tiles.data, 0, sizeof di_tiles.data);
  di_tiles.configured = true;
  for (int t = 0; t < 8; t++)
    if (di_tiles.bytes[t] > 64 || di_tiles.rows[t] > 16) std::abort();
}

inline void di_tile_load(int tile, const void* base, int64_t stride) {
  if (!di_tiles.configured) std::abort();
  std::memset(di_tiles.data[tile], 0, sizeof di_tiles.data[tile]);
  for (int r = 0; r < di_tiles.rows[tile]; r++)
    std::memcpy(di_tiles.data[tile][r], static_cast<const uint8_t*>(base) + r * stride,
                di_tiles.bytes[tile]);
}

inline void di_tile_store(int tile, void* base, int64_t stride) {
  for (int r = 0; r < di_tiles.rows[tile]; r++)
    std::memcpy(static_cast<uint8_t*>(base) + r * stride, di_tiles.data[tile][r],
                di_tiles.bytes[tile]);
}

// Signed bytes of a times unsigned bytes of b, four neighbours to a sum of 32 bits.
inline void di_tile_dot(int sums, int a, int b) {
  const int inner = di_tiles.bytes[a] / 4;
  if (di_tiles.rows[b] != inner || di_tiles.rows[a] != di_tiles.rows[sums]) std::abort();
  for (int m = 0; m < di_tiles.rows[sums]; m++)
    for (int n = 0; n < di_tiles.bytes[sums] / 4; n++) {
      int32_t sum;
      std::memcpy(&sum, &di_tiles.data[sums][m][4 * n], 4);
      for (int k = 0; k < inner; k++)
        for (int i = 0; i < 4; i++)
          sum += int8_t(di_tiles.data[a][m][4 * k + i]) * di_tiles.data[b][k][4 * n + i];
      std::memcpy(&di_tiles.data[sums][m][4 * n], &sum, 4);
    }
}

#undef _tile_loadconfig
#define _tile_loadconfig(config) di_tile_config(config)
#undef _tile_release
#define _tile_release() (di_tiles.configured = false)
#undef _tile_zero
#define _tile_zero(tile) std::memset(di_tiles.data[tile], 0, sizeof di_tiles.data[tile])
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) di_tile_load(tile, base, stride)
#undef _tile_stored
#define _tile_stored(tile, base, stride) di_tile_store(tile, base, stride)
#undef _tile_dpbsud
#define _tile_dpbsud(sums, a, b) di_tile_dot(sums, a, b)
