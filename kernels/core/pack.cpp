// Logical rows <-> packed matrices.
#include <algorithm>
#include <cstring>

#include "core/format.h"
#include "core/tile_rows.h"

namespace spike {
namespace {

template <class B>
void pack_blocks(const uint8_t* rows, int64_t n, int64_t blocks, uint8_t* packed) {
  const size_t stride = static_cast<size_t>(blocks) * sizeof(B);
  for (int64_t first = 0; first < n; first += kTileRows)
    for (int64_t i = 0; i < blocks; ++i, packed += sizeof(Tile<B>)) {
      Tile<B> tile{};
      for (int r = 0; r < kTileRows; ++r) {
        B block{};  // a padding row is a zero block
        if (first + r < n)
          std::memcpy(&block, rows + (first + r) * stride + i * sizeof(B), sizeof block);
        pack_row(block, tile, r);
      }
      std::memcpy(packed, &tile, sizeof tile);
    }
}

template <class B>
void unpack_blocks(const uint8_t* packed, int64_t n, int64_t blocks, uint8_t* rows) {
  const size_t stride = static_cast<size_t>(blocks) * sizeof(B);
  for (int64_t first = 0; first < n; first += kTileRows)
    for (int64_t i = 0; i < blocks; ++i, packed += sizeof(Tile<B>)) {
      Tile<B> tile;
      std::memcpy(&tile, packed, sizeof tile);
      for (int r = 0; r < std::min(kTileRows, n - first); ++r) {
        B block;
        unpack_row(tile, r, block);
        std::memcpy(rows + (first + r) * stride + i * sizeof(B), &block, sizeof block);
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
  const int64_t blocks = k / block_elements(format);
  switch (format) {
    case Format::f32: return pack_values(4, rows, n, k, packed);
    case Format::f16:
    case Format::bf16: return pack_values(2, rows, n, k, packed);
    default: with_block(format, [&]<class B>(B) { pack_blocks<B>(rows, n, blocks, packed); });
  }
}

void unpack(Format format, const uint8_t* packed, int64_t n, int64_t k, uint8_t* rows) {
  const int64_t blocks = k / block_elements(format);
  switch (format) {
    case Format::f32: return unpack_values(4, packed, n, k, rows);
    case Format::f16:
    case Format::bf16: return unpack_values(2, packed, n, k, rows);
    default: with_block(format, [&]<class B>(B) { unpack_blocks<B>(packed, n, blocks, rows); });
  }
}

}  // namespace spike
