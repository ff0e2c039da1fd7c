// Sixteen lanes in plain C++: the tier that runs everywhere, and the meaning of lines_avx512.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/half.h"

namespace spike {
namespace {

struct ScalarLines {
  struct Codes {
    uint8_t at[64];
  };
  struct Ints {
    int32_t at[16];
  };
  struct Floats {
    float at[16];
  };
  static constexpr bool kFoldShifts = false;
  /// Most tokens that read a tile as it is packed; for more it is decoded once.
  static constexpr int kMostDirect = 1;
  /// Most tokens for which two row groups side by side need fewer loads and still no spills; one
  /// token reads one group at a time, in one stream.
  static constexpr int kMostPaired = 1;
  /// Whether two decoded row groups are read side by side.
  static constexpr bool kPairsDecoded = true;
  /// Tokens of a register block of kTokens whose sums are in registers at a time; the others wait
  /// their turn with every block of 32 k.
  template <int kTokens>
  static constexpr int kTokensAtOnce = kTokens;
  /// Tokens of one register block over decoded row groups, by sub-blocks per 32 k.
  template <int kSubs>
  static constexpr int kTokensPerPass = 2;
  /// Lines whose products with codes of up to kLargest a tier sums in 16 bits; 1: it doesn't.
  template <int kLargest>
  static constexpr int kWordLines = 1;
  /// Whether `dot` takes codes of up to kLargest (255) less 128, so that no offset is left.
  template <int kLargest>
  static constexpr bool kCentres = false;

  template <class F>
  static Codes each_byte(F&& f) {
    Codes c;
    for (int i = 0; i < 64; ++i) c.at[i] = static_cast<uint8_t>(f(i));
    return c;
  }
  template <class F>
  static Floats each(F&& f) {
    Floats y;
    for (int i = 0; i < 16; ++i) y.at[i] = f(i);
    return y;
  }

  static Codes load(const uint8_t* p) {
    return each_byte([&](int i) { return p[i]; });
  }
  static void store(uint8_t* p, const Codes& c) { std::memcpy(p, c.at, 64); }
  static Codes mask(const Codes& c, int m) {
    return each_byte([&](int i) { return c.at[i] & m; });
  }
  template <int N>
  static Codes shift_right(const Codes& c, int m) {
    return each_byte([&](int i) { return (c.at[i] >> N) & m; });
  }
  template <int N>
  static Codes shift_left(const Codes& c, int m) {
    return each_byte([&](int i) { return (c.at[i] << N) & m; });
  }
  static Codes merge(const Codes& a, const Codes& b) {
    return each_byte([&](int i) { return a.at[i] | b.at[i]; });
  }
  /// Adds a power of two to the bytes of `lanes`; those have that bit clear.
  template <int kBit>
  static Codes add_where(const Codes& c, uint64_t lanes) {
    return each_byte([&](int i) { return c.at[i] + ((lanes >> i) & 1) * kBit; });
  }

  static Ints zero_ints() { return {}; }
  template <int N>
  static Ints broadcast_shifted(const int32_t* p) {
    Ints y;
    for (int32_t& lane : y.at) lane = *p * (1 << N);
    return y;
  }
  template <int kLargest>
  static Ints dot(const Ints& sum, const Codes& c, const int8_t* four) {
    Ints y;
    for (int r = 0; r < 16; ++r) {
      const uint8_t* w = c.at + 4 * r;
      y.at[r] = sum.at[r] + w[0] * four[0] + w[1] * four[1] + w[2] * four[2] + w[3] * four[3];
    }
    return y;
  }

  static Floats zero() { return {}; }
  static Floats set(float x) {
    return each([&](int) { return x; });
  }
  static Floats load_f32(const void* p) {
    Floats y;
    std::memcpy(y.at, p, sizeof y);
    return y;
  }
  static void store_f32(float* p, const Floats& x) { std::memcpy(p, x.at, sizeof x); }
  static Floats load_f16(const void* p) {
    const uint8_t* at = static_cast<const uint8_t*>(p);
    return each([&](int i) { return load_half(at + 2 * i); });
  }
  static Floats load_bf16(const void* p) {
    uint16_t half[16];
    std::memcpy(half, p, sizeof half);
    return each([&](int i) { return bf16_to_f32(half[i]); });
  }
  static Floats load_i8(const int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  /// (low >> 4 * odd) & 15.
  static Floats four_bits(const uint8_t* low, int odd) {
    return each([&](int i) { return static_cast<float>((low[i] >> (4 * odd)) & 15); });
  }
  /// ((low >> 4 * odd) & 15) | ((high >> shift) & 3) << 4: 6-bit numbers.
  static Floats six_bits(const uint8_t* low, int odd, const uint8_t* high, int shift) {
    return each([&](int i) {
      return static_cast<float>(((low[i] >> (4 * odd)) & 15) | (((high[i] >> shift) & 3) << 4));
    });
  }
  static Floats to_floats(const Ints& x) {
    return each([&](int i) { return static_cast<float>(x.at[i]); });
  }
  static Floats add(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.at[i] + b.at[i]; });
  }
  static Floats mul(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.at[i] * b.at[i]; });
  }
  static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return each([&](int i) { return std::fma(a.at[i], b.at[i], c.at[i]); });
  }
  static Floats div(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.at[i] / b.at[i]; });
  }
  /// The larger (smaller) of each pair; b where either is NaN.
  static Floats max(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
  }
  static Floats min(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
  }
  /// 2^n for integers -126 <= n <= 127.
  static Floats power_of_two(const Floats& n) {
    return each([&](int i) { return std::ldexp(1.f, static_cast<int>(n.at[i])); });
  }
  /// Largest |lane| of both; NaN counts as larger than infinity.
  static float largest_magnitude(const Floats& a, const Floats& b) {
    uint32_t largest = 0;
    for (int i = 0; i < 16; ++i)
      for (const float x : {a.at[i], b.at[i]})
        largest = std::max(largest, std::bit_cast<uint32_t>(x) & 0x7fffffffu);
    return std::bit_cast<float>(largest);
  }
  /// Stores x * inverse, rounded to nearest even, as int8 (zeros if inverse is 0); returns their
  /// sum.
  static int32_t store_codes(int8_t* p, const Floats& x, float inverse) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) {
      p[i] = inverse == 0 ? 0 : static_cast<int8_t>(std::nearbyint(x.at[i] * inverse));
      sum += p[i];
    }
    return sum;
  }
  static void prefetch(const uint8_t*) {}
};

}  // namespace
}  // namespace spike
