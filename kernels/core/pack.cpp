// Logical rows <-> packed matrices.
#include <algorithm>
#include <cstring>

#include "core/format.h"
#include "core/short_block.h"
#include "core/short_tile.h"
#include "core/tile_rows.h"

namespace spike {
namespace {

/// Sixteen rows from `first` on as one tile; read(row) gives a row's block.
template <class B, class Read>
Tile<B> make_tile(int64_t first, int64_t n, Read&& read) {
  Tile<B> tile{};
  for (int r = 0; r < kTileRows; ++r) {
    B block{};  // a padding row is a zero block
    if (first + r < n) read(first + r, block);
    pack_row(block, tile, r);
  }
  return tile;
}

template <class B>
void pack_blocks(const uint8_t* rows, int64_t n, int64_t k, size_t stride, uint8_t* packed) {
  const int64_t blocks = k / B::kElements;
  const int groups = static_cast<int>(k % B::kElements / 64);
  for (int64_t first = 0; first < n; first += kTileRows) {
    for (int64_t i = 0; i < blocks; ++i, packed += sizeof(Tile<B>)) {
      const Tile<B> tile = make_tile<B>(first, n, [&](int64_t row, B& block) {
        std::memcpy(&block, rows + row * stride + i * sizeof(B), sizeof block);
      });
      std::memcpy(packed, &tile, sizeof tile);
    }
    if constexpr (ShortTraits<B>::kShort)
      if (groups > 0) {
        cut_tile(make_tile<B>(first, n, [&](int64_t row, B& block) {
                   lengthen(rows + row * stride + blocks * sizeof(B), groups, block);
                 }),
                 groups, packed);
        packed += kTileRows * short_bytes<B>(groups);
      }
  }
}

template <class B>
void unpack_blocks(const uint8_t* packed, int64_t n, int64_t k, size_t stride, uint8_t* rows) {
  const int64_t blocks = k / B::kElements;
  const int groups = static_cast<int>(k % B::kElements / 64);
  for (int64_t first = 0; first < n; first += kTileRows) {
    const int count = static_cast<int>(std::min(kTileRows, n - first));
    for (int64_t i = 0; i < blocks; ++i, packed += sizeof(Tile<B>)) {
      Tile<B> tile;
      std::memcpy(&tile, packed, sizeof tile);
      for (int r = 0; r < count; ++r) {
        B block;
        unpack_row(tile, r, block);
        std::memcpy(rows + (first + r) * stride + i * sizeof(B), &block, sizeof block);
      }
    }
    if constexpr (ShortTraits<B>::kShort)
      if (groups > 0) {
        Tile<B> tile{};
        whole_tile(packed, groups, tile);
        packed += kTileRows * short_bytes<B>(groups);
        for (int r = 0; r < count; ++r) {
          B block;
          unpack_row(tile, r, block);
          shorten(block, groups, rows + (first + r) * stride + blocks * sizeof(B));
        }
      }
  }
}

// Plain values of `width` bytes: [n, k] <-> [n / 16, k, 16].
void pack_values(size_t width, const uint8_t* rows, int64_t n, int64_t k, uint8_t* packed) {
  for (int64_t first = 0; first < n; first += kTileRows)
    for (int64_t i = 0; i < k; ++i)
      for (int64_t r = first; r < first + kTileRows; ++r, packed += width)
        if (r < n)
          std::memcpy(packed, rows + (r * k + i) * width, width);
        else
          std::memset(packed, 0, width);
}

void unpack_values(size_t width, const uint8_t* packed, int64_t n, int64_t k, uint8_t* rows) {
  for (int64_t first = 0; first < n; first += kTileRows)
    for (int64_t i = 0; i < k; ++i)
      for (int64_t r = first; r < first + kTileRows; ++r, packed += width)
        if (r < n) std::memcpy(rows + (r * k + i) * width, packed, width);
}

}  // namespace

void pack(Format format, const uint8_t* rows, int64_t n, int64_t k, uint8_t* packed) {
  const size_t stride = row_bytes(format, k);
  switch (format) {
    case Format::f32: return pack_values(4, rows, n, k, packed);
    case Format::f16:
    case Format::bf16: return pack_values(2, rows, n, k, packed);
    default: with_block(format, [&]<class B>(B) { pack_blocks<B>(rows, n, k, stride, packed); });
  }
}

void unpack(Format format, const uint8_t* packed, int64_t n, int64_t k, uint8_t* rows) {
  const size_t stride = row_bytes(format, k);
  switch (format) {
    case Format::f32: return unpack_values(4, packed, n, k, rows);
    case Format::f16:
    case Format::bf16: return unpack_values(2, packed, n, k, rows);
    default: with_block(format, [&]<class B>(B) { unpack_blocks<B>(packed, n, k, stride, rows); });
  }
}

}  // namespace spike
