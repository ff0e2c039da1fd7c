// Packed tiles: 16 matrix rows of one block each, interleaved so that a 64-byte line holds four
// consecutive k of every row (lane r = row r). A tile has exactly the bytes of its 16 blocks.
//
// A row group (16 rows) is its tiles in order of k; a matrix is its row groups in order.
// The f32, f16 and bf16 tile is one k: 16 values.
#pragma once

#include <cstdint>

#include "core/format.h"

namespace spike {

/// 16 rows x 32 k.
struct TileQ8_0 {
  uint16_t d[16];
  uint8_t lines[8][64];  ///< line l, byte 4r + j: code of k = 4l + j, plus 128
};

/// 16 rows x 32 k.
struct TileQ5_0 {
  uint16_t d[16];
  uint64_t high[8];        ///< word l, bit 4r + j: the fifth bit of k = 4l + j
  uint8_t nibbles[4][64];  ///< line l, byte 4r + j: k = 4l + j low, k = 16 + 4l + j high
};

/// 16 rows x 32 k.
struct TileQ5_1 {
  uint16_t d[16];
  uint16_t m[16];
  uint64_t high[8];        ///< as in q5_0
  uint8_t nibbles[4][64];  ///< as in q5_0
};

/// 16 rows x 32 k.
struct TileQ4_0 {
  uint16_t d[16];
  uint8_t nibbles[4][64];  ///< as in q5_0
};

/// 16 rows x 32 k.
struct TileQ4_1 {
  uint16_t d[16];
  uint16_t m[16];
  uint8_t nibbles[4][64];  ///< as in q5_0
};

/// 16 rows x 256 k, sub-blocks of 16 k; group g covers k = 64g .. 64g + 63, sub-blocks q = 0..3 of
/// it in order of k.
struct TileQ2K {
  uint16_t d[16];
  uint16_t dmin[16];
  struct Group {
    uint8_t scales[4][16];  ///< [q][r]: scale in the low nibble, min in the high one
    uint8_t pairs[4][64];   ///< [l], byte 4r + j: bits 2q and 2q + 1 the code of k = 16q + 4l + j
  } groups[4];
};

/// 16 rows x 256 k, groups and sub-blocks as in q2_k.
struct TileQ3K {
  uint16_t d[16];
  struct Group {
    uint8_t scale_low[2][16];  ///< [h][r]: low four bits of the stored scales of q = 2h, 2h + 1
    uint8_t scale_high[16];    ///< [r]: bits 2q and 2q + 1 the high two bits of q
    uint64_t high[4][4];       ///< [q][l], bit 4r + j: the third bit of k = 16q + 4l + j
    uint8_t pairs[4][64];      ///< as in q2_k
  } groups[4];
};

/// 16 rows x 256 k, sub-blocks s of 32 k.
struct TileQ4K {
  uint16_t d[16];
  uint16_t dmin[16];
  uint8_t scale_low[4][16];   ///< [p][r]: low four bits of the scale of sub-blocks 2p, 2p + 1
  uint8_t min_low[4][16];     ///< likewise of the mins
  uint8_t high[4][16];        ///< two high bits each: scale 2p, scale 2p + 1, min 2p, min 2p + 1
  uint8_t nibbles[4][8][64];  ///< [p][l], byte 4r + j: k = 64p + 4l + j low, 32 further high
};

/// 16 rows x 256 k, sub-blocks of 32 k; group g covers k = 64g .. 64g + 63, sub-blocks 2g, 2g + 1.
struct TileQ5K {
  uint16_t d[16];
  uint16_t dmin[16];
  struct Group {
    uint8_t scale_low[16];   ///< [r]: low four bits of the scales of the two sub-blocks
    uint8_t min_low[16];     ///< likewise of the mins
    uint8_t scale_high[16];  ///< two high bits each: both scales, both mins
    uint64_t high[2][8];     ///< [b][l], bit 4r + j: the fifth bit of k = 32b + 4l + j
    uint8_t nibbles[8][64];  ///< [l], byte 4r + j: k = 4l + j low, k = 32 + 4l + j high
  } groups[4];
};

/// 16 rows x 256 k, sub-blocks of 16 k; group g covers k = 64g .. 64g + 63, sub-blocks q = 0..3 of
/// it in order of k. A group's bytes are together, so that a tile is read front to back.
/// Even sub-blocks are split into low four and high two bits, odd ones into high four and low two:
/// (nibble | pair) is then the code itself or four times the code, without shifting the nibble.
struct TileQ6K {
  uint16_t d[16];
  struct Group {
    int8_t scales[4][16];       ///< [q][r]
    uint8_t nibbles[2][4][64];  ///< [h][l], byte 4r + j, i = 32h + 4l + j: low nibble the low four
                                ///< bits of k = i, high nibble the high four of k = i + 16
    uint8_t pairs[4][64];       ///< [l], byte 4r + j, i = 4l + j: bits 4-5 the high two of k = i,
                                ///< 2-3 the low two of i + 16, 6-7 the high two of i + 32, 0-1 the
                                ///< low two of i + 48
  } groups[4];
};

static_assert(sizeof(TileQ8_0) == 16 * 34);
static_assert(sizeof(TileQ5_0) == 16 * 22);
static_assert(sizeof(TileQ5_1) == 16 * 24);
static_assert(sizeof(TileQ4_0) == 16 * 18);
static_assert(sizeof(TileQ4_1) == 16 * 20);
static_assert(sizeof(TileQ2K) == 16 * 84);
static_assert(sizeof(TileQ3K) == 16 * 110);
static_assert(sizeof(TileQ4K) == 16 * 144);
static_assert(sizeof(TileQ5K) == 16 * 176);
static_assert(sizeof(TileQ6K) == 16 * 210);

/// Where the pair of bits of sub-block 4g + q starts in TileQ6K::Group::pairs.
inline constexpr int kPairShift[4] = {4, 2, 6, 0};

/// Code of k, row r.
inline uint8_t tile_code(const TileQ6K& t, int k, int r) {
  const int g = k / 64, q = k / 16 % 4, l = k % 16 / 4, byte = 4 * r + k % 4;
  const uint8_t nibble = (t.groups[g].nibbles[q / 2][l][byte] >> (4 * (q % 2))) & 15;
  const uint8_t pair = (t.groups[g].pairs[l][byte] >> kPairShift[q]) & 3;
  return static_cast<uint8_t>(q % 2 == 0 ? nibble | (pair << 4) : (nibble << 2) | pair);
}

/// First byte of the tiles of row group `group` (rows 16 group .. 16 group + 15).
inline const uint8_t* row_group(Format format, const uint8_t* packed, int64_t k, int64_t group) {
  return packed + static_cast<size_t>(group) * kTileRows * row_bytes(format, k);
}

}  // namespace spike
