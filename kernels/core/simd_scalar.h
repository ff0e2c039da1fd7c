// One lane in plain C++: the tier that runs everywhere, with the interface of simd_avx512.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/half.h"

namespace spike {
namespace {

struct Scalar {
  using F = float;
  static constexpr int64_t width = 1;
  static constexpr int64_t terms = 1;
  static constexpr int64_t stored_keys = 1;
  static constexpr int rows = 4;
  static constexpr int accumulators = 16;

  static F zero() { return 0.0f; }
  static F set(float x) { return x; }
  static F load(const float* p) { return *p; }
  static F load_part(const float*, int64_t) { return 0.0f; }
  static void store(float* p, F x) { *p = x; }
  static void store_part(float*, F, int64_t) {}
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F dot(F x, F y, F sum) { return fma(x, y, sum); }
  static F div(F a, F b) { return a / b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F exp(F x) { return std::exp(x); }
  static F weight(F x) { return exp(x); }
  static float sum(F x) { return x; }
  static float top(F x) { return x; }
  static void sum4(F a, F b, F c, F d, float* out) {
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
  }

  static F load_f16(const uint8_t* p) { return load_half(p); }
  static F load_f16_part(const uint8_t*, int64_t) { return 0.0f; }
  static void store_f16(uint8_t* p, F x) { store_half(p, x); }
  static void store_i8(uint8_t* p, F x) { *p = static_cast<uint8_t>(std::lrintf(x)); }
  static void store_nibbles(uint8_t* p, F low, F high) {
    *p = static_cast<uint8_t>(std::lrintf(low) | std::lrintf(high) << 4);
  }
  static F spread_f16(const uint8_t* p) { return load_half(p); }
  static F load_i8(const uint8_t* p) { return static_cast<int8_t>(*p); }
  static F load_low(const uint8_t* p) { return static_cast<float>(*p & 15); }
  static F load_high(const uint8_t* p) { return static_cast<float>(*p >> 4); }
};

}  // namespace
}  // namespace spike
