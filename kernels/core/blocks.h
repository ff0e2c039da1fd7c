// Logical blocks, byte for byte as GGUF stores them (ggml's block_q8_0, block_q5_0, block_q4_K,
// block_q6_K). All scales named `d` are fp16 bit patterns.
//
//   q8_0  32 values: x = d * q                      q in -128..127
//   q5_0  32 values: x = d * (q - 16)               q in 0..31
//   q4_k 256 values: x = d * scale * q - dmin * min q in 0..15, per 32 a 6-bit scale and min
//   q6_k 256 values: x = d * scale * (q - 32)       q in 0..63, per 16 an 8-bit signed scale
#pragma once

#include <cstdint>

namespace spike {

struct BlockQ8_0 {
  uint16_t d;
  int8_t codes[32];
};

struct BlockQ5_0 {
  uint16_t d;
  uint8_t high[4];      ///< bit i (little-endian): the fifth bit of value i
  uint8_t nibbles[16];  ///< byte j: value j in the low nibble, value j + 16 in the high one
};

struct BlockQ4K {
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];    ///< eight 6-bit scales and eight 6-bit mins, see q4k_scale
  uint8_t nibbles[128];  ///< byte 32p + i: value 64p + i low, value 64p + 32 + i high
};

struct BlockQ6K {
  uint8_t low[128];  ///< half h (128 values): byte 64h + i: values i and i + 64 of the half, i < 64
  uint8_t high[64];  ///< byte 32h + i: two bits each of values i, i + 32, i + 64, i + 96
  int8_t scales[16];  ///< one per 16 values
  uint16_t d;
};

static_assert(sizeof(BlockQ8_0) == 34);
static_assert(sizeof(BlockQ5_0) == 22);
static_assert(sizeof(BlockQ4K) == 144);
static_assert(sizeof(BlockQ6K) == 210);

/// Scale of sub-block s (32 values): 0..3 whole in bytes 0..3, 4..7 split over bytes 8..11 and
/// 0..3.
inline uint8_t q4k_scale(const BlockQ4K& b, int s) {
  if (s < 4) return b.scales[s] & 63;
  return (b.scales[s + 4] & 15) | ((b.scales[s - 4] >> 6) << 4);
}

/// Min of sub-block s: 0..3 whole in bytes 4..7, 4..7 split over bytes 8..11 and 4..7.
inline uint8_t q4k_min(const BlockQ4K& b, int s) {
  if (s < 4) return b.scales[s + 4] & 63;
  return (b.scales[s + 4] >> 4) | ((b.scales[s] >> 6) << 4);
}

/// Writes all sixteen 6-bit numbers.
inline void set_q4k_scales(BlockQ4K& b, const uint8_t scale[8], const uint8_t min[8]) {
  for (int s = 0; s < 4; ++s) {
    b.scales[s] = static_cast<uint8_t>(scale[s] | ((scale[s + 4] >> 4) << 6));
    b.scales[s + 4] = static_cast<uint8_t>(min[s] | ((min[s + 4] >> 4) << 6));
    b.scales[s + 8] = static_cast<uint8_t>((scale[s + 4] & 15) | ((min[s + 4] & 15) << 4));
  }
}

/// The 6-bit code of value i, 0 <= i < 256.
inline uint8_t q6k_code(const BlockQ6K& b, int i) {
  const int half = i / 128, in_half = i % 128;
  const uint8_t low = (b.low[64 * half + in_half % 64] >> (4 * (in_half / 64))) & 15;
  const uint8_t high = (b.high[32 * half + in_half % 32] >> (2 * (in_half / 32))) & 3;
  return static_cast<uint8_t>(low | (high << 4));
}

/// Adds the code of value i to a block whose low and high bytes were zero.
inline void add_q6k_code(BlockQ6K& b, int i, uint8_t code) {
  const int half = i / 128, in_half = i % 128;
  b.low[64 * half + in_half % 64] |= static_cast<uint8_t>((code & 15) << (4 * (in_half / 64)));
  b.high[32 * half + in_half % 32] |= static_cast<uint8_t>((code >> 4) << (2 * (in_half / 32)));
}

}  // namespace spike
