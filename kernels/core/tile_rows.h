// One logical block <-> its row of a packed tile: pure permutations of bits, exact in both
// directions. Each pack_row writes row r of a tile whose bytes are zero; unpack_row is its inverse.
#pragma once

#include <cstring>

#include "core/block_codec.h"
#include "core/tiles.h"

namespace spike {

/// The tile that holds sixteen blocks of type B.
template <class B>
struct TileOf;
template <> struct TileOf<BlockQ8_0> { using Type = TileQ8_0; };
template <> struct TileOf<BlockQ5_0> { using Type = TileQ5_0; };
template <> struct TileOf<BlockQ5_1> { using Type = TileQ5_1; };
template <> struct TileOf<BlockQ4_0> { using Type = TileQ4_0; };
template <> struct TileOf<BlockInt4Sym> { using Type = TileQ4_0; };
template <> struct TileOf<BlockQ4_1> { using Type = TileQ4_1; };
template <> struct TileOf<BlockQ2K> { using Type = TileQ2K; };
template <> struct TileOf<BlockQ3K> { using Type = TileQ3K; };
template <> struct TileOf<BlockQ4K> { using Type = TileQ4K; };
template <> struct TileOf<BlockQ5K> { using Type = TileQ5K; };
template <> struct TileOf<BlockQ6K> { using Type = TileQ6K; };
template <class B>
using Tile = typename TileOf<B>::Type;

inline void pack_row(const BlockQ8_0& b, TileQ8_0& t, int r) {
  t.d[r] = b.d;
  for (int k = 0; k < 32; ++k)
    t.lines[k / 4][4 * r + k % 4] = static_cast<uint8_t>(b.codes[k]) ^ 0x80;
}

inline void unpack_row(const TileQ8_0& t, int r, BlockQ8_0& b) {
  b.d = t.d[r];
  for (int k = 0; k < 32; ++k)
    b.codes[k] = static_cast<int8_t>(t.lines[k / 4][4 * r + k % 4] ^ 0x80);
}

/// The other formats of 32 values: nibbles, and what else the block has.
template <class B>
void pack_row(const B& b, Tile<B>& t, int r) {
  t.d[r] = b.d;
  if constexpr (requires { b.m; }) t.m[r] = b.m;
  for (int i = 0; i < 16; ++i) t.nibbles[i / 4][4 * r + i % 4] = b.nibbles[i];
  if constexpr (requires { b.high; })
    for (int k = 0; k < 32; ++k) {
      const uint64_t bit = (b.high[k / 8] >> (k % 8)) & 1;
      t.high[k / 4] |= bit << (4 * r + k % 4);
    }
}

template <class B>
void unpack_row(const Tile<B>& t, int r, B& b) {
  b.d = t.d[r];
  if constexpr (requires { b.m; }) b.m = t.m[r];
  for (int i = 0; i < 16; ++i) b.nibbles[i] = t.nibbles[i / 4][4 * r + i % 4];
  if constexpr (requires { b.high; }) {
    std::memset(b.high, 0, sizeof b.high);
    for (int k = 0; k < 32; ++k) {
      const int bit = (t.high[k / 4] >> (4 * r + k % 4)) & 1;
      b.high[k / 8] |= static_cast<uint8_t>(bit << (k % 8));
    }
  }
}

inline void pack_row(const BlockQ2K& b, TileQ2K& t, int r) {
  t.d[r] = b.d;
  t.dmin[r] = b.dmin;
  for (int s = 0; s < 16; ++s) t.groups[s / 4].scales[s % 4][r] = b.scales[s];
  int8_t codes[256];
  get_codes(b, codes);
  for (int k = 0; k < 256; ++k)
    t.groups[k / 64].pairs[k % 16 / 4][4 * r + k % 4] |=
        static_cast<uint8_t>(codes[k] << (2 * (k / 16 % 4)));
}

inline void unpack_row(const TileQ2K& t, int r, BlockQ2K& b) {
  b.d = t.d[r];
  b.dmin = t.dmin[r];
  for (int s = 0; s < 16; ++s) b.scales[s] = t.groups[s / 4].scales[s % 4][r];
  int8_t codes[256];
  for (int k = 0; k < 256; ++k)
    codes[k] = (t.groups[k / 64].pairs[k % 16 / 4][4 * r + k % 4] >> (2 * (k / 16 % 4))) & 3;
  set_codes(b, codes);
}

inline void pack_row(const BlockQ3K& b, TileQ3K& t, int r) {
  t.d[r] = b.d;
  for (int s = 0; s < 16; ++s) {
    const int q = s % 4, scale = q3k_scale(b, s);
    t.groups[s / 4].scale_low[q / 2][r] |= static_cast<uint8_t>((scale & 15) << (4 * (q % 2)));
    t.groups[s / 4].scale_high[r] |= static_cast<uint8_t>((scale >> 4) << (2 * q));
  }
  int8_t codes[256];
  get_codes(b, codes);
  for (int k = 0; k < 256; ++k) {
    const int q = k / 16 % 4, l = k % 16 / 4, byte = 4 * r + k % 4, stored = codes[k] + 4;
    t.groups[k / 64].pairs[l][byte] |= static_cast<uint8_t>((stored & 3) << (2 * q));
    t.groups[k / 64].high[q][l] |= static_cast<uint64_t>(stored >> 2) << byte;
  }
}

inline void unpack_row(const TileQ3K& t, int r, BlockQ3K& b) {
  b.d = t.d[r];
  std::memset(b.scales, 0, sizeof b.scales);
  for (int s = 0; s < 16; ++s) {
    const int q = s % 4, low = (t.groups[s / 4].scale_low[q / 2][r] >> (4 * (q % 2))) & 15;
    const int high = (t.groups[s / 4].scale_high[r] >> (2 * q)) & 3;
    add_q3k_scale(b, s, static_cast<uint8_t>(low | (high << 4)));
  }
  int8_t codes[256];
  for (int k = 0; k < 256; ++k) {
    const int q = k / 16 % 4, l = k % 16 / 4, byte = 4 * r + k % 4;
    const int low = (t.groups[k / 64].pairs[l][byte] >> (2 * q)) & 3;
    const int high = (t.groups[k / 64].high[q][l] >> byte) & 1;
    codes[k] = static_cast<int8_t>((low | (high << 2)) - 4);
  }
  set_codes(b, codes);
}

inline void pack_row(const BlockQ4K& b, TileQ4K& t, int r) {
  t.d[r] = b.d;
  t.dmin[r] = b.dmin;
  for (int p = 0; p < 4; ++p) {
    const uint8_t s0 = six_bit_scale(b.scales, 2 * p), s1 = six_bit_scale(b.scales, 2 * p + 1);
    const uint8_t m0 = six_bit_min(b.scales, 2 * p), m1 = six_bit_min(b.scales, 2 * p + 1);
    t.scale_low[p][r] = static_cast<uint8_t>((s0 & 15) | ((s1 & 15) << 4));
    t.min_low[p][r] = static_cast<uint8_t>((m0 & 15) | ((m1 & 15) << 4));
    t.high[p][r] =
        static_cast<uint8_t>((s0 >> 4) | ((s1 >> 4) << 2) | ((m0 >> 4) << 4) | ((m1 >> 4) << 6));
    for (int i = 0; i < 32; ++i) t.nibbles[p][i / 4][4 * r + i % 4] = b.nibbles[32 * p + i];
  }
}

/// Number `odd` of the pair of 6-bit numbers whose low bits are in `low`, high ones in `high`.
inline uint8_t six_bits_of(uint8_t low, uint8_t high, int odd, int shift) {
  return static_cast<uint8_t>(((low >> (4 * odd)) & 15) | (((high >> shift) & 3) << 4));
}

inline void unpack_row(const TileQ4K& t, int r, BlockQ4K& b) {
  b.d = t.d[r];
  b.dmin = t.dmin[r];
  uint8_t scale[8], min[8];
  for (int s = 0; s < 8; ++s) {
    const int p = s / 2, odd = s % 2;
    scale[s] = six_bits_of(t.scale_low[p][r], t.high[p][r], odd, 2 * odd);
    min[s] = six_bits_of(t.min_low[p][r], t.high[p][r], odd, 4 + 2 * odd);
  }
  set_six_bits(b.scales, scale, min);
  for (int i = 0; i < 128; ++i) b.nibbles[i] = t.nibbles[i / 32][i % 32 / 4][4 * r + i % 4];
}

inline void pack_row(const BlockQ5K& b, TileQ5K& t, int r) {
  t.d[r] = b.d;
  t.dmin[r] = b.dmin;
  for (int g = 0; g < 4; ++g) {
    TileQ5K::Group& to = t.groups[g];
    const uint8_t s0 = six_bit_scale(b.scales, 2 * g), s1 = six_bit_scale(b.scales, 2 * g + 1);
    const uint8_t m0 = six_bit_min(b.scales, 2 * g), m1 = six_bit_min(b.scales, 2 * g + 1);
    to.scale_low[r] = static_cast<uint8_t>((s0 & 15) | ((s1 & 15) << 4));
    to.min_low[r] = static_cast<uint8_t>((m0 & 15) | ((m1 & 15) << 4));
    to.scale_high[r] =
        static_cast<uint8_t>((s0 >> 4) | ((s1 >> 4) << 2) | ((m0 >> 4) << 4) | ((m1 >> 4) << 6));
    for (int i = 0; i < 32; ++i) {
      const int l = i / 4, byte = 4 * r + i % 4;
      to.nibbles[l][byte] = b.nibbles[32 * g + i];
      for (int half = 0; half < 2; ++half)
        to.high[half][l] |= static_cast<uint64_t>((b.high[i] >> (2 * g + half)) & 1) << byte;
    }
  }
}

inline void unpack_row(const TileQ5K& t, int r, BlockQ5K& b) {
  b.d = t.d[r];
  b.dmin = t.dmin[r];
  std::memset(b.high, 0, sizeof b.high);
  uint8_t scale[8], min[8];
  for (int s = 0; s < 8; ++s) {
    const TileQ5K::Group& from = t.groups[s / 2];
    const int odd = s % 2;
    scale[s] = six_bits_of(from.scale_low[r], from.scale_high[r], odd, 2 * odd);
    min[s] = six_bits_of(from.min_low[r], from.scale_high[r], odd, 4 + 2 * odd);
    for (int i = 0; i < 32; ++i) {
      const int l = i / 4, byte = 4 * r + i % 4;
      b.nibbles[32 * (s / 2) + i] = from.nibbles[l][byte];
      b.high[i] |= static_cast<uint8_t>(((from.high[odd][l] >> byte) & 1) << s);
    }
  }
  set_six_bits(b.scales, scale, min);
}

inline void pack_row(const BlockQ6K& b, TileQ6K& t, int r) {
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

inline void unpack_row(const TileQ6K& t, int r, BlockQ6K& b) {
  std::memset(&b, 0, sizeof b);
  b.d = t.d[r];
  for (int s = 0; s < 16; ++s) b.scales[s] = t.groups[s / 4].scales[s % 4][r];
  for (int k = 0; k < 256; ++k) add_q6k_code(b, k, tile_code(t, k, r));
}

}  // namespace spike
