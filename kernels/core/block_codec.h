// The meaning of each logical block: the grid that its scales span, and its codes. Value i of a
// block is grid.scale[i / kSub] * code[i] - grid.min[i / kSub]; get_codes and set_codes are exact
// inverses of each other. Whoever chooses codes himself fits the scales first (block_search.h),
// reads the grid they really give, and sets the codes.
#pragma once

#include <cstring>

#include "core/blocks.h"
#include "core/format.h"
#include "core/half.h"

namespace spike {

/// Scale and min of each sub-block; a format has as many as kElements / kSub.
struct Grid {
  float scale[16];
  float min[16];
};

/// Scale of sub-block s (32 values): 0..3 whole in bytes 0..3, 4..7 split over bytes 8..11 and
/// 0..3.
inline uint8_t six_bit_scale(const uint8_t scales[12], int s) {
  if (s < 4) return scales[s] & 63;
  return (scales[s + 4] & 15) | ((scales[s - 4] >> 6) << 4);
}

/// Min of sub-block s: 0..3 whole in bytes 4..7, 4..7 split over bytes 8..11 and 4..7.
inline uint8_t six_bit_min(const uint8_t scales[12], int s) {
  if (s < 4) return scales[s + 4] & 63;
  return (scales[s + 4] >> 4) | ((scales[s] >> 6) << 4);
}

/// Writes all sixteen 6-bit numbers of q4_k and q5_k.
inline void set_six_bits(uint8_t scales[12], const uint8_t scale[8], const uint8_t min[8]) {
  for (int s = 0; s < 4; ++s) {
    scales[s] = static_cast<uint8_t>(scale[s] | ((scale[s + 4] >> 4) << 6));
    scales[s + 4] = static_cast<uint8_t>(min[s] | ((min[s + 4] >> 4) << 6));
    scales[s + 8] = static_cast<uint8_t>((scale[s + 4] & 15) | ((min[s + 4] & 15) << 4));
  }
}

/// Stored scale (0..63) of sub-block s (16 values): low four bits in bytes 0..7, high two in 8..11.
inline uint8_t q3k_scale(const BlockQ3K& b, int s) {
  const uint8_t low = (b.scales[s % 8] >> (4 * (s / 8))) & 15;
  return static_cast<uint8_t>(low | (((b.scales[8 + s % 4] >> (2 * (s / 4))) & 3) << 4));
}

/// Adds the stored scale of sub-block s to a block whose scales were zero.
inline void add_q3k_scale(BlockQ3K& b, int s, uint8_t scale) {
  b.scales[s % 8] |= static_cast<uint8_t>((scale & 15) << (4 * (s / 8)));
  b.scales[8 + s % 4] |= static_cast<uint8_t>((scale >> 4) << (2 * (s / 4)));
}

// --- grids ---------------------------------------------------------------------------------------

/// The grid of one scale and, where the block has it, one added constant.
template <class B>
Grid grid_of(const B& b) {
  Grid grid;
  grid.scale[0] = f16_to_f32(b.d);
  grid.min[0] = 0;
  if constexpr (requires { b.m; }) grid.min[0] = -f16_to_f32(b.m);
  return grid;
}

inline Grid grid_of(const BlockQ2K& b) {
  Grid grid;
  const float d = f16_to_f32(b.d), dmin = f16_to_f32(b.dmin);
  for (int s = 0; s < 16; ++s) {
    grid.scale[s] = d * static_cast<float>(b.scales[s] & 15);
    grid.min[s] = dmin * static_cast<float>(b.scales[s] >> 4);
  }
  return grid;
}

inline Grid grid_of(const BlockQ3K& b) {
  Grid grid;
  const float d = f16_to_f32(b.d);
  for (int s = 0; s < 16; ++s) {
    grid.scale[s] = d * static_cast<float>(q3k_scale(b, s) - 32);
    grid.min[s] = 0;
  }
  return grid;
}

template <class B>
Grid grid_of_six_bits(const B& b) {
  Grid grid;
  const float d = f16_to_f32(b.d), dmin = f16_to_f32(b.dmin);
  for (int s = 0; s < 8; ++s) {
    grid.scale[s] = d * six_bit_scale(b.scales, s);
    grid.min[s] = dmin * six_bit_min(b.scales, s);
  }
  return grid;
}
inline Grid grid_of(const BlockQ4K& b) { return grid_of_six_bits(b); }
inline Grid grid_of(const BlockQ5K& b) { return grid_of_six_bits(b); }

inline Grid grid_of(const BlockQ6K& b) {
  Grid grid;
  const float d = f16_to_f32(b.d);
  for (int s = 0; s < 16; ++s) {
    grid.scale[s] = d * b.scales[s];
    grid.min[s] = 0;
  }
  return grid;
}

// --- codes: int8 [kElements] ---------------------------------------------------------------------

inline void get_codes(const BlockQ8_0& b, int8_t* codes) { std::memcpy(codes, b.codes, 32); }
inline void set_codes(BlockQ8_0& b, const int8_t* codes) { std::memcpy(b.codes, codes, 32); }

/// The formats of 32 values with nibbles and perhaps a fifth bit.
template <class B>
void get_codes(const B& b, int8_t* codes) {
  for (int i = 0; i < 32; ++i) {
    int code = (b.nibbles[i % 16] >> (4 * (i / 16))) & 15;
    if constexpr (requires { b.high; }) code |= ((b.high[i / 8] >> (i % 8)) & 1) << 4;
    codes[i] = static_cast<int8_t>(code + B::kLowest);
  }
}
template <class B>
void set_codes(B& b, const int8_t* codes) {
  uint8_t stored[32];
  for (int i = 0; i < 32; ++i) stored[i] = static_cast<uint8_t>(codes[i] - B::kLowest);
  for (int i = 0; i < 16; ++i)
    b.nibbles[i] = static_cast<uint8_t>((stored[i] & 15) | ((stored[i + 16] & 15) << 4));
  if constexpr (requires { b.high; }) {
    uint32_t high = 0;
    for (int i = 0; i < 32; ++i) high |= static_cast<uint32_t>(stored[i] >> 4) << i;
    std::memcpy(b.high, &high, sizeof high);
  }
}

/// The two low bits of value i in q2_k and q3_k: byte and shift.
inline int pair_byte(int i) { return 32 * (i / 128) + i % 32; }
inline int pair_shift(int i) { return 2 * (i % 128 / 32); }

inline void get_codes(const BlockQ2K& b, int8_t* codes) {
  for (int i = 0; i < 256; ++i)
    codes[i] = static_cast<int8_t>((b.pairs[pair_byte(i)] >> pair_shift(i)) & 3);
}
inline void set_codes(BlockQ2K& b, const int8_t* codes) {
  std::memset(b.pairs, 0, sizeof b.pairs);
  for (int i = 0; i < 256; ++i)
    b.pairs[pair_byte(i)] |= static_cast<uint8_t>(codes[i] << pair_shift(i));
}

inline void get_codes(const BlockQ3K& b, int8_t* codes) {
  for (int i = 0; i < 256; ++i) {
    const int low = (b.pairs[pair_byte(i)] >> pair_shift(i)) & 3;
    codes[i] = static_cast<int8_t>((low | (((b.high[i % 32] >> (i / 32)) & 1) << 2)) - 4);
  }
}
inline void set_codes(BlockQ3K& b, const int8_t* codes) {
  std::memset(b.pairs, 0, sizeof b.pairs);
  std::memset(b.high, 0, sizeof b.high);
  for (int i = 0; i < 256; ++i) {
    const int stored = codes[i] + 4;
    b.pairs[pair_byte(i)] |= static_cast<uint8_t>((stored & 3) << pair_shift(i));
    b.high[i % 32] |= static_cast<uint8_t>((stored >> 2) << (i / 32));
  }
}

inline void get_codes(const BlockQ4K& b, int8_t* codes) {
  for (int i = 0; i < 256; ++i)
    codes[i] = static_cast<int8_t>((b.nibbles[32 * (i / 64) + i % 32] >> (4 * (i / 32 % 2))) & 15);
}
inline void set_codes(BlockQ4K& b, const int8_t* codes) {
  for (int p = 0; p < 4; ++p)
    for (int i = 0; i < 32; ++i)
      b.nibbles[32 * p + i] =
          static_cast<uint8_t>(codes[64 * p + i] | (codes[64 * p + 32 + i] << 4));
}

inline void get_codes(const BlockQ5K& b, int8_t* codes) {
  for (int i = 0; i < 256; ++i) {
    const int low = (b.nibbles[32 * (i / 64) + i % 32] >> (4 * (i / 32 % 2))) & 15;
    codes[i] = static_cast<int8_t>(low | (((b.high[i % 32] >> (i / 32)) & 1) << 4));
  }
}
inline void set_codes(BlockQ5K& b, const int8_t* codes) {
  std::memset(b.high, 0, sizeof b.high);
  for (int p = 0; p < 4; ++p)
    for (int i = 0; i < 32; ++i) {
      const int low = codes[64 * p + i], high = codes[64 * p + 32 + i];
      b.nibbles[32 * p + i] = static_cast<uint8_t>((low & 15) | ((high & 15) << 4));
      b.high[i] |= static_cast<uint8_t>(((low >> 4) << (2 * p)) | ((high >> 4) << (2 * p + 1)));
    }
}

/// The stored 6-bit code of value i, 0 <= i < 256.
inline uint8_t q6k_code(const BlockQ6K& b, int i) {
  const int half = i / 128, in_half = i % 128;
  const uint8_t low = (b.low[64 * half + in_half % 64] >> (4 * (in_half / 64))) & 15;
  const uint8_t high = (b.high[32 * half + in_half % 32] >> (2 * (in_half / 32))) & 3;
  return static_cast<uint8_t>(low | (high << 4));
}

/// Adds the stored code of value i to a block whose low and high bytes were zero.
inline void add_q6k_code(BlockQ6K& b, int i, uint8_t code) {
  const int half = i / 128, in_half = i % 128;
  b.low[64 * half + in_half % 64] |= static_cast<uint8_t>((code & 15) << (4 * (in_half / 64)));
  b.high[32 * half + in_half % 32] |= static_cast<uint8_t>((code >> 4) << (2 * (in_half / 32)));
}

inline void get_codes(const BlockQ6K& b, int8_t* codes) {
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<int8_t>(q6k_code(b, i) - 32);
}
inline void set_codes(BlockQ6K& b, const int8_t* codes) {
  std::memset(b.low, 0, sizeof b.low);
  std::memset(b.high, 0, sizeof b.high);
  for (int i = 0; i < 256; ++i) add_q6k_code(b, i, static_cast<uint8_t>(codes[i] + 32));
}

// --- both ----------------------------------------------------------------------------------------

/// x [kElements], each value rounded to fp32 once per arithmetic step as GGUF's reference does.
template <class B>
void dequantize_block(const B& b, float* x) {
  int8_t codes[B::kElements];
  get_codes(b, codes);
  const Grid grid = grid_of(b);
  for (int i = 0; i < B::kElements; ++i)
    x[i] = grid.scale[i / B::kSub] * codes[i] - grid.min[i / B::kSub];
}

/// Calls body(B{}) with the block type of a block format.
template <class Body>
void with_block(Format format, Body&& body) {
  switch (format) {
    case Format::q8_0: return body(BlockQ8_0{});
    case Format::q5_0: return body(BlockQ5_0{});
    case Format::q5_1: return body(BlockQ5_1{});
    case Format::q4_0: return body(BlockQ4_0{});
    case Format::q4_1: return body(BlockQ4_1{});
    case Format::q2_k: return body(BlockQ2K{});
    case Format::q3_k: return body(BlockQ3K{});
    case Format::q4_k: return body(BlockQ4K{});
    case Format::q5_k: return body(BlockQ5K{});
    case Format::q6_k: return body(BlockQ6K{});
    case Format::int4_sym: return body(BlockInt4Sym{});
    case Format::f32:
    case Format::f16:
    case Format::bf16: return;
  }
}

}  // namespace spike
