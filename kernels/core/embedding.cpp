// One row out of a packed matrix, for embedding lookup.
#include <cstring>

#include "core/half.h"
#include "core/linear.h"
#include "core/tiles.h"

namespace spike {
namespace {

void dequantize_tile_row(const TileQ8_0& t, int r, float* out) {
  const float d = f16_to_f32(t.d[r]);
  for (int k = 0; k < 32; ++k) out[k] = d * static_cast<float>(t.lines[k / 4][4 * r + k % 4] - 128);
}

void dequantize_tile_row(const TileQ5_0& t, int r, float* out) {
  const float d = f16_to_f32(t.d[r]);
  for (int k = 0; k < 32; ++k) out[k] = d * static_cast<float>(tile_code(t, k, r) - 16);
}

void dequantize_tile_row(const TileQ4K& t, int r, float* out) {
  for (int s = 0; s < 8; ++s) {
    const float d = f16_to_f32(t.d[r]) * tile_scale(t, s, r);
    const float m = f16_to_f32(t.dmin[r]) * tile_min(t, s, r);
    for (int k = 32 * s; k < 32 * (s + 1); ++k) out[k] = d * tile_code(t, k, r) - m;
  }
}

void dequantize_tile_row(const TileQ6K& t, int r, float* out) {
  for (int s = 0; s < 16; ++s) {
    const float d = f16_to_f32(t.d[r]) * t.groups[s / 4].scales[s % 4][r];
    for (int k = 16 * s; k < 16 * (s + 1); ++k)
      out[k] = d * static_cast<float>(tile_code(t, k, r) - 32);
  }
}

template <class Tile>
void dequantize_tiles(const uint8_t* group, int64_t k, int r, float* out) {
  constexpr int64_t kElements = sizeof(Tile) >= sizeof(TileQ4K) ? 256 : 32;
  const Tile* tiles = reinterpret_cast<const Tile*>(group);
  for (int64_t i = 0; i < k / kElements; ++i) dequantize_tile_row(tiles[i], r, out + i * kElements);
}

template <class Stored, float (*convert)(Stored)>
void widen_values(const uint8_t* group, int64_t k, int r, float* out) {
  for (int64_t i = 0; i < k; ++i) {
    Stored value;
    std::memcpy(&value, group + (i * kTileRows + r) * sizeof value, sizeof value);
    out[i] = convert(value);
  }
}

float same(float value) { return value; }

}  // namespace

void dequantize_row(const Matrix& w, int64_t row, float* out) {
  const uint8_t* group = row_group(w.format, w.data, w.k, row / kTileRows);
  const int r = static_cast<int>(row % kTileRows);
  switch (w.format) {
    case Format::q8_0: return dequantize_tiles<TileQ8_0>(group, w.k, r, out);
    case Format::q5_0: return dequantize_tiles<TileQ5_0>(group, w.k, r, out);
    case Format::q4_k: return dequantize_tiles<TileQ4K>(group, w.k, r, out);
    case Format::q6_k: return dequantize_tiles<TileQ6K>(group, w.k, r, out);
    case Format::f32: return widen_values<float, same>(group, w.k, r, out);
    case Format::f16: return widen_values<uint16_t, f16_to_f32>(group, w.k, r, out);
    case Format::bf16: return widen_values<uint16_t, bf16_to_f32>(group, w.k, r, out);
  }
}

}  // namespace spike
