// One row out of a packed matrix, for embedding lookup.
#include <algorithm>
#include <cstring>

#include "core/half.h"
#include "core/linear.h"
#include "core/short_block.h"
#include "core/short_tile.h"
#include "core/tile_rows.h"

namespace spike {
namespace {

template <class B>
void dequantize_blocks(const uint8_t* group, int64_t k, int r, float* out) {
  const Tile<B>* tiles = reinterpret_cast<const Tile<B>*>(group);
  for (int64_t i = 0; i < k / B::kElements; ++i) {
    B block;
    unpack_row(tiles[i], r, block);
    dequantize_block(block, out + i * B::kElements);
  }
  const int64_t rest = k % B::kElements;
  if constexpr (ShortTraits<B>::kShort)
    if (rest > 0) {
      Tile<B> tile{};
      whole_tile(reinterpret_cast<const uint8_t*>(tiles + k / B::kElements),
                 static_cast<int>(rest / 64), tile);
      B block;
      unpack_row(tile, r, block);
      float values[B::kElements];
      dequantize_block(block, values);
      std::copy_n(values, rest, out + k - rest);
    }
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
    case Format::f32: return widen_values<float, same>(group, w.k, r, out);
    case Format::f16: return widen_values<uint16_t, f16_to_f32>(group, w.k, r, out);
    case Format::bf16: return widen_values<uint16_t, bf16_to_f32>(group, w.k, r, out);
    default: with_block(w.format, [&]<class B>(B) { dequantize_blocks<B>(group, w.k, r, out); });
  }
}

}  // namespace spike
