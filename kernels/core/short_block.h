// A row whose length is a multiple of 64 but not of 256 may end in a short super-block: what a
// whole one has before its groups of 64 values (d, and dmin where there is one), then only the
// groups that the row has. docs/storage-formats.md specifies it; GGUF has nothing like it.
//
// A group is a string of bits, lowest first: the numbers of its sub-blocks (scales, then mins),
// then its 64 codes as stored. The packed form is in short_tile.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/block_codec.h"

namespace spike {

/// Bits of a stored code and of a sub-block's number; formats of 32 values have no short block.
template <class B>
struct ShortTraits {
  static constexpr bool kShort = false;
};
template <int codes, int scales>
struct ShortBits {
  static constexpr bool kShort = true;
  static constexpr int kCodeBits = codes, kScaleBits = scales;
};
template <> struct ShortTraits<BlockQ2K> : ShortBits<2, 4> {};
template <> struct ShortTraits<BlockQ3K> : ShortBits<3, 6> {};
template <> struct ShortTraits<BlockQ4K> : ShortBits<4, 6> {};
template <> struct ShortTraits<BlockQ5K> : ShortBits<5, 6> {};
template <> struct ShortTraits<BlockQ6K> : ShortBits<6, 8> {};

template <class B>
constexpr bool has_min = requires(B b) { b.dmin; };
/// Bytes before the groups, and of one group.
template <class B>
constexpr int kHeadBytes = has_min<B> ? 4 : 2;
template <class B>
constexpr int kGroupBytes = (static_cast<int>(sizeof(B)) - kHeadBytes<B>) / 4;

/// Bytes of a short block of `groups` groups, 1..3; 0 for none.
template <class B>
constexpr size_t short_bytes(int groups) {
  return groups == 0 ? 0 : static_cast<size_t>(kHeadBytes<B> + groups * kGroupBytes<B>);
}

// --- the numbers of a group's sub-blocks, as stored: scales first, then mins ---------------------

inline int group_scales(const BlockQ2K& b, int g, uint8_t* out) {
  for (int q = 0; q < 4; ++q) {
    out[q] = b.scales[4 * g + q] & 15;
    out[4 + q] = b.scales[4 * g + q] >> 4;
  }
  return 8;
}
inline void set_group_scales(BlockQ2K& b, int g, const uint8_t* in) {
  for (int q = 0; q < 4; ++q) b.scales[4 * g + q] = static_cast<uint8_t>(in[q] | (in[4 + q] << 4));
}

inline int group_scales(const BlockQ3K& b, int g, uint8_t* out) {
  for (int q = 0; q < 4; ++q) out[q] = q3k_scale(b, 4 * g + q);
  return 4;
}
inline void set_group_scales(BlockQ3K& b, int g, const uint8_t* in) {
  for (int q = 0; q < 4; ++q) add_q3k_scale(b, 4 * g + q, in[q]);
}

/// q4_k and q5_k.
template <class B>
int group_scales(const B& b, int g, uint8_t* out) {
  for (int s = 0; s < 2; ++s) {
    out[s] = six_bit_scale(b.scales, 2 * g + s);
    out[2 + s] = six_bit_min(b.scales, 2 * g + s);
  }
  return 4;
}
template <class B>
void set_group_scales(B& b, int g, const uint8_t* in) {
  uint8_t scale[8], min[8];
  for (int s = 0; s < 8; ++s) {
    scale[s] = six_bit_scale(b.scales, s);
    min[s] = six_bit_min(b.scales, s);
  }
  for (int s = 0; s < 2; ++s) {
    scale[2 * g + s] = in[s];
    min[2 * g + s] = in[2 + s];
  }
  set_six_bits(b.scales, scale, min);
}

inline int group_scales(const BlockQ6K& b, int g, uint8_t* out) {
  std::memcpy(out, b.scales + 4 * g, 4);
  return 4;
}
inline void set_group_scales(BlockQ6K& b, int g, const uint8_t* in) {
  std::memcpy(b.scales + 4 * g, in, 4);
}

/// Appends numbers of `bits` bits to zeroed bytes, lowest bit first.
inline void put_bits(uint8_t* bytes, int& at, int bits, uint8_t value) {
  for (int i = 0; i < bits; ++i, ++at)
    bytes[at / 8] |= static_cast<uint8_t>(((value >> i) & 1) << (at % 8));
}
inline uint8_t take_bits(const uint8_t* bytes, int& at, int bits) {
  uint8_t value = 0;
  for (int i = 0; i < bits; ++i, ++at)
    value |= static_cast<uint8_t>(((bytes[at / 8] >> (at % 8)) & 1) << i);
  return value;
}

/// The first `groups` groups of a block -> short_bytes.
template <class B>
void shorten(const B& b, int groups, uint8_t* to) {
  using Bits = ShortTraits<B>;
  std::memset(to, 0, short_bytes<B>(groups));
  std::memcpy(to, &b.d, 2);
  if constexpr (has_min<B>) std::memcpy(to + 2, &b.dmin, 2);
  int8_t codes[B::kElements];
  get_codes(b, codes);
  int at = 8 * kHeadBytes<B>;
  for (int g = 0; g < groups; ++g) {
    uint8_t scales[8];
    const int count = group_scales(b, g, scales);
    for (int i = 0; i < count; ++i) put_bits(to, at, Bits::kScaleBits, scales[i]);
    for (int i = 0; i < 64; ++i)
      put_bits(to, at, Bits::kCodeBits, static_cast<uint8_t>(codes[64 * g + i] - B::kLowest));
  }
}

/// The inverse; what the short block lacks is zero bits.
template <class B>
void lengthen(const uint8_t* from, int groups, B& b) {
  using Bits = ShortTraits<B>;
  std::memset(&b, 0, sizeof b);
  std::memcpy(&b.d, from, 2);
  if constexpr (has_min<B>) std::memcpy(&b.dmin, from + 2, 2);
  int8_t codes[B::kElements];
  std::fill_n(codes, B::kElements, static_cast<int8_t>(B::kLowest));
  int at = 8 * kHeadBytes<B>;
  for (int g = 0; g < groups; ++g) {
    uint8_t scales[8];
    const int count = group_scales(b, g, scales);
    for (int i = 0; i < count; ++i) scales[i] = take_bits(from, at, Bits::kScaleBits);
    set_group_scales(b, g, scales);
    for (int i = 0; i < 64; ++i)
      codes[64 * g + i] = static_cast<int8_t>(take_bits(from, at, Bits::kCodeBits) + B::kLowest);
  }
  set_codes(b, codes);
}

}  // namespace spike
