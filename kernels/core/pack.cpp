// Logical rows <-> packed tiles: pure permutations of bits, exact in both directions.
#include <algorithm>
#include <cstring>

#include "core/blocks.h"
#include "core/format.h"
#include "core/tiles.h"

namespace spike {
namespace {

// Each pack_row writes row r of a tile from one block; each unpack_row is its inverse.
// pack_row expects the tile's bytes to be zero.

void pack_row(const BlockQ8_0& b, TileQ8_0& t, int r) {
  t.d[r] = b.d;
  for (int k = 0; k < 32; ++k)
    t.lines[k / 4][4 * r + k % 4] = static_cast<uint8_t>(b.codes[k]) ^ 0x80;
}

void unpack_row(const TileQ8_0& t, int r, BlockQ8_0& b) {
  b.d = t.d[r];
  for (int k = 0; k < 32; ++k)
    b.codes[k] = static_cast<int8_t>(t.lines[k / 4][4 * r + k % 4] ^ 0x80);
}

void pack_row(const BlockQ5_0& b, TileQ5_0& t, int r) {
  t.d[r] = b.d;
  for (int i = 0; i < 16; ++i) t.nibbles[i / 4][4 * r + i % 4] = b.nibbles[i];
  for (int k = 0; k < 32; ++k) {
    const uint64_t bit = (b.high[k / 8] >> (k % 8)) & 1;
    t.high[k / 4] |= bit << (4 * r + k % 4);
  }
}

void unpack_row(const TileQ5_0& t, int r, BlockQ5_0& b) {
  b.d = t.d[r];
  for (int i = 0; i < 16; ++i) b.nibbles[i] = t.nibbles[i / 4][4 * r + i % 4];
  std::memset(b.high, 0, sizeof b.high);
  for (int k = 0; k < 32; ++k) {
    const int bit = (t.high[k / 4] >> (4 * r + k % 4)) & 1;
    b.high[k / 8] |= static_cast<uint8_t>(bit << (k % 8));
  }
}

void pack_row(const BlockQ4K& b, TileQ4K& t, int r) {
  t.d[r] = b.d;
  t.dmin[r] = b.dmin;
  for (int p = 0; p < 4; ++p) {
    const uint8_t s0 = q4k_scale(b, 2 * p), s1 = q4k_scale(b, 2 * p + 1);
    const uint8_t m0 = q4k_min(b, 2 * p), m1 = q4k_min(b, 2 * p + 1);
    t.scale_low[p][r] = static_cast<uint8_t>((s0 & 15) | ((s1 & 15) << 4));
    t.min_low[p][r] = static_cast<uint8_t>((m0 & 15) | ((m1 & 15) << 4));
    t.high[p][r] =
        static_cast<uint8_t>((s0 >> 4) | ((s1 >> 4) << 2) | ((m0 >> 4) << 4) | ((m1 >> 4) << 6));
    for (int i = 0; i < 32; ++i) t.nibbles[p][i / 4][4 * r + i % 4] = b.nibbles[32 * p + i];
  }
}

void unpack_row(const TileQ4K& t, int r, BlockQ4K& b) {
  b.d = t.d[r];
  b.dmin = t.dmin[r];
  uint8_t scale[8], min[8];
  for (int s = 0; s < 8; ++s) {
    scale[s] = tile_scale(t, s, r);
    min[s] = tile_min(t, s, r);
  }
  set_q4k_scales(b, scale, min);
  for (int i = 0; i < 128; ++i) b.nibbles[i] = t.nibbles[i / 32][i % 32 / 4][4 * r + i % 4];
}

void pack_row(const BlockQ6K& b, TileQ6K& t, int r) {
  t.d[r] = b.d;
  for (int s = 0; s < 16; ++s) t.groups[s / 4].scales[s % 4][r] = b.scales[s];
  for (int k = 0; k < 256; ++k) {
    const int g = k / 64, q = k / 16 % 4, l = k % 16 / 4, byte = 4 * r + k % 4;
    const uint8_t code = q6k_code(b, k);
    const int nibble = q % 2 == 0 ? code & 15 : code >> 2;
    const int pair = q % 2 == 0 ? code >> 4 : code & 3;
    t.groups[g].nibbles[q / 2][l][byte] |= static_cast<uint8_t>(nibble << (4 * (q % 2)));
    t.groups[g].pairs[l][byte] |= static_cast<uint8_t>(pair << kPairShift[q]);
  }
}

void unpack_row(const TileQ6K& t, int r, BlockQ6K& b) {
  std::memset(&b, 0, sizeof b);
  b.d = t.d[r];
  for (int s = 0; s < 16; ++s) b.scales[s] = t.groups[s / 4].scales[s % 4][r];
  for (int k = 0; k < 256; ++k) add_q6k_code(b, k, tile_code(t, k, r));
}

template <class Block, class Tile>
void pack_blocks(const uint8_t* rows, int64_t n, int64_t blocks, uint8_t* packed) {
  const size_t stride = static_cast<size_t>(blocks) * sizeof(Block);
  for (int64_t first = 0; first < n; first += kTileRows)
    for (int64_t i = 0; i < blocks; ++i, packed += sizeof(Tile)) {
      Tile tile{};
      for (int r = 0; r < kTileRows; ++r) {
        Block block{};  // a padding row is a zero block
        if (first + r < n)
          std::memcpy(&block, rows + (first + r) * stride + i * sizeof(Block), sizeof block);
        pack_row(block, tile, r);
      }
      std::memcpy(packed, &tile, sizeof tile);
    }
}

template <class Block, class Tile>
void unpack_blocks(const uint8_t* packed, int64_t n, int64_t blocks, uint8_t* rows) {
  const size_t stride = static_cast<size_t>(blocks) * sizeof(Block);
  for (int64_t first = 0; first < n; first += kTileRows)
    for (int64_t i = 0; i < blocks; ++i, packed += sizeof(Tile)) {
      Tile tile;
      std::memcpy(&tile, packed, sizeof tile);
      for (int r = 0; r < std::min(kTileRows, n - first); ++r) {
        Block block;
        unpack_row(tile, r, block);
        std::memcpy(rows + (first + r) * stride + i * sizeof(Block), &block, sizeof block);
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
    case Format::q8_0: return pack_blocks<BlockQ8_0, TileQ8_0>(rows, n, blocks, packed);
    case Format::q5_0: return pack_blocks<BlockQ5_0, TileQ5_0>(rows, n, blocks, packed);
    case Format::q4_k: return pack_blocks<BlockQ4K, TileQ4K>(rows, n, blocks, packed);
    case Format::q6_k: return pack_blocks<BlockQ6K, TileQ6K>(rows, n, blocks, packed);
    case Format::f32: return pack_values(4, rows, n, k, packed);
    case Format::f16:
    case Format::bf16: return pack_values(2, rows, n, k, packed);
  }
}

void unpack(Format format, const uint8_t* packed, int64_t n, int64_t k, uint8_t* rows) {
  const int64_t blocks = k / block_elements(format);
  switch (format) {
    case Format::q8_0: return unpack_blocks<BlockQ8_0, TileQ8_0>(packed, n, blocks, rows);
    case Format::q5_0: return unpack_blocks<BlockQ5_0, TileQ5_0>(packed, n, blocks, rows);
    case Format::q4_k: return unpack_blocks<BlockQ4K, TileQ4K>(packed, n, blocks, rows);
    case Format::q6_k: return unpack_blocks<BlockQ6K, TileQ6K>(packed, n, blocks, rows);
    case Format::f32: return unpack_values(4, packed, n, k, rows);
    case Format::f16:
    case Format::bf16: return unpack_values(2, packed, n, k, rows);
  }
}

}  // namespace spike
