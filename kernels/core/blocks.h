// Logical blocks, byte for byte as GGUF stores them (ggml's block_q8_0, block_q4_K and so on).
// All scales named `d`, `dmin` and `m` are fp16 bit patterns; block_codec.h reads and writes them.
//
//   q8_0  32 values: x = d * q                      q in -128..127
//   q5_0  32 values: x = d * (q - 16)               q in 0..31
//   q5_1  32 values: x = d * q + m                  q in 0..31
//   q4_0  32 values: x = d * (q - 8)                q in 0..15
//   q4_1  32 values: x = d * q + m                  q in 0..15
//   q2_k 256 values: x = d * scale * q - dmin * min q in 0..3, per 16 a 4-bit scale and min
//   q3_k 256 values: x = d * scale * (q - 4)        q in 0..7, per 16 a 6-bit scale, less 32
//   q4_k 256 values: x = d * scale * q - dmin * min q in 0..15, per 32 a 6-bit scale and min
//   q5_k 256 values: x = d * scale * q - dmin * min q in 0..31, likewise
//   q6_k 256 values: x = d * scale * (q - 32)       q in 0..63, per 16 an 8-bit signed scale
//   int4_sym, 32 values, not of GGUF: q4_0 with d > 0 always, as TensorRT asks for
//
// Every block has kElements values; kSub consecutive ones share a scale and a min. Codes are
// counted from the offset, so that x = scale * code - min for kLowest <= code <= kHighest.
#pragma once

#include <cstdint>

namespace spike {

struct BlockQ8_0 {
  static constexpr int kElements = 32, kSub = 32, kLowest = -128, kHighest = 127;
  uint16_t d;
  int8_t codes[32];
};

struct BlockQ5_0 {
  static constexpr int kElements = 32, kSub = 32, kLowest = -16, kHighest = 15;
  uint16_t d;
  uint8_t high[4];      ///< bit i (little-endian): the fifth bit of value i
  uint8_t nibbles[16];  ///< byte j: value j in the low nibble, value j + 16 in the high one
};

struct BlockQ5_1 {
  static constexpr int kElements = 32, kSub = 32, kLowest = 0, kHighest = 31;
  uint16_t d;
  uint16_t m;
  uint8_t high[4];      ///< as in q5_0
  uint8_t nibbles[16];  ///< as in q5_0
};

struct BlockQ4_0 {
  static constexpr int kElements = 32, kSub = 32, kLowest = -8, kHighest = 7;
  uint16_t d;
  uint8_t nibbles[16];  ///< as in q5_0
};

struct BlockInt4Sym {
  static constexpr int kElements = 32, kSub = 32, kLowest = -8, kHighest = 7;
  uint16_t d;           ///< above zero
  uint8_t nibbles[16];  ///< as in q4_0
};

struct BlockQ4_1 {
  static constexpr int kElements = 32, kSub = 32, kLowest = 0, kHighest = 15;
  uint16_t d;
  uint16_t m;
  uint8_t nibbles[16];  ///< as in q5_0
};

struct BlockQ2K {
  static constexpr int kElements = 256, kSub = 16, kLowest = 0, kHighest = 3;
  uint8_t scales[16];  ///< sub-block s: scale in the low nibble, min in the high one
  uint8_t pairs[64];   ///< byte 32h + i, half h: two bits each of values i, i + 32, i + 64, i + 96
  uint16_t d;
  uint16_t dmin;
};

struct BlockQ3K {
  static constexpr int kElements = 256, kSub = 16, kLowest = -4, kHighest = 3;
  uint8_t high[32];    ///< bit b of byte i: the third bit of value 32b + i
  uint8_t pairs[64];   ///< as in q2_k: the two low bits
  uint8_t scales[12];  ///< sixteen 6-bit scales, plus 32, see q3k_scale
  uint16_t d;
};

struct BlockQ4K {
  static constexpr int kElements = 256, kSub = 32, kLowest = 0, kHighest = 15;
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];    ///< eight 6-bit scales and eight 6-bit mins, see six_bit_scale
  uint8_t nibbles[128];  ///< byte 32p + i: value 64p + i low, value 64p + 32 + i high
};

struct BlockQ5K {
  static constexpr int kElements = 256, kSub = 32, kLowest = 0, kHighest = 31;
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];    ///< as in q4_k
  uint8_t high[32];      ///< bit s of byte i: the fifth bit of value 32s + i
  uint8_t nibbles[128];  ///< as in q4_k
};

struct BlockQ6K {
  static constexpr int kElements = 256, kSub = 16, kLowest = -32, kHighest = 31;
  uint8_t low[128];  ///< half h (128 values): byte 64h + i: values i and i + 64 of the half, i < 64
  uint8_t high[64];  ///< byte 32h + i: two bits each of values i, i + 32, i + 64, i + 96
  int8_t scales[16];  ///< one per 16 values
  uint16_t d;
};

static_assert(sizeof(BlockQ8_0) == 34);
static_assert(sizeof(BlockQ5_0) == 22);
static_assert(sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ4_0) == 18);
static_assert(sizeof(BlockInt4Sym) == 18);
static_assert(sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ2K) == 84);
static_assert(sizeof(BlockQ3K) == 110);
static_assert(sizeof(BlockQ4K) == 144);
static_assert(sizeof(BlockQ5K) == 176);
static_assert(sizeof(BlockQ6K) == 210);

}  // namespace spike
