// Sixteen float lanes. Include inside a SPIKE_TARGET_BEGIN(SPIKE_AVX512) region, after immintrin.h.
//
// The interface that the tile kernels are written against; simd_avx2.h and simd_scalar.h have the
// same. `*_part` touch only the first n lanes (0 <= n < width) and read the rest as zero. `turn_*`
// write element i of 32 rows, found at byte `at` of each (int4: coded by channel), to out[i * stride].
#pragma once

#include "core/turned.h"

namespace spike {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int64_t width = 16;
  static constexpr int64_t terms = 1;  ///< of a sum that a lane carries into `dot`
  static constexpr int rows = 8;           ///< of a register block of the matrix product
  static constexpr int accumulators = 16;  ///< registers that it may take

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_part(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store_part(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F dot(F x, F y, F sum) { return fma(x, y, sum); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  /// Larger of each pair; b where either is NaN.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }  ///< likewise

  /// e^x within 2 ulp; 0 for x below -87.3 (also -infinity), NaN for NaN.
  static F exp(F x) {
    const __mmask16 alive = _mm512_cmp_ps_mask(x, set(-87.3f), _CMP_NLT_UQ);
    x = _mm512_min_ps(set(88.7f), x);
    const F n = _mm512_roundscale_ps(mul(x, set(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    F r = _mm512_fnmadd_ps(n, set(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, set(-2.12194440e-4f), r);
    F p = set(1.0f / 5040);
    p = fma(p, r, set(1.0f / 720));
    p = fma(p, r, set(1.0f / 120));
    p = fma(p, r, set(1.0f / 24));
    p = fma(p, r, set(1.0f / 6));
    p = fma(p, r, set(0.5f));
    p = fma(p, r, set(1.0f));
    p = fma(p, r, set(1.0f));
    return _mm512_maskz_scalef_ps(alive, p, n);
  }

  static F weight(F x) { return exp(x); }  ///< of a logit relative to the largest one

  static float sum(F x) { return _mm512_reduce_add_ps(x); }
  /// Largest lane.
  static float top(F x) { return _mm512_reduce_max_ps(x); }

  /// out[0..3] = the sums of a, b, c, d.
  static void sum4(F a, F b, F c, F d, float* out) {
    const F ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const F all = add(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }

  static F load_f16(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_f16_part(const uint8_t* p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static void store_f16(uint8_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  /// Sixteen floats, rounded to nearest, as signed bytes.
  static void store_i8(uint8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
  }
  /// Two times sixteen floats, rounded to 0..15, as the low and high nibbles of sixteen bytes.
  static void store_nibbles(uint8_t* p, F low, F high) {
    const __m512i both = _mm512_or_si512(_mm512_cvtps_epi32(low),
                                         _mm512_slli_epi32(_mm512_cvtps_epi32(high), 4));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(both));
  }
  /// One half in every lane.
  static F spread_f16(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(half_at(p)));
  }
  /// Sixteen signed bytes.
  static F load_i8(const uint8_t* p) {
    return widen_i8(bytes(p));
  }
  /// The low (high) nibbles of sixteen bytes.
  static F load_low(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_and_si128(bytes(p), _mm_set1_epi8(15))));
  }
  static F load_high(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes(p)), 4));
  }

  /// Elements of a stored key that `columns_f16` turns at once.
  static constexpr int64_t stored_keys = 8;
  /// columns[i] = element i of the eight halves at byte `at` of sixteen rows.
  static void columns_f16(const uint8_t* const* rows, int64_t at, F (*columns)[1]) {
    __m256i x[8];
    turn_halves(rows, at, x);
    for (int i = 0; i < 8; ++i) columns[i][0] = _mm512_cvtph_ps(x[i]);
  }
  static void turn_f16(const uint8_t* const* rows, int64_t at, float* out, int64_t stride) {
    for (int half = 0; half < 2; ++half) {
      __m256i x[8];
      turn_halves(rows + 16 * half, at, x);
      for (int i = 0; i < 8; ++i) store(out + i * stride + 16 * half, _mm512_cvtph_ps(x[i]));
    }
  }
  static void turn_f32(const uint8_t* const* rows, int64_t at, float* out, int64_t stride) {
    for (int j = 0; j < 32; j += 4) turn_floats(rows + j, at, out + j, stride);
  }
  static void turn_i8(const uint8_t* const* rows, int64_t at, float* out, int64_t stride) {
    alignas(64) int16_t scales[32];
    for (int j = 0; j < 32; ++j) scales[j] = half_at(rows[j] + at);
    const uint8_t* halves = reinterpret_cast<const uint8_t*>(scales);
    const F low = load_f16(halves), high = load_f16(halves + 32);
    for (int part = 0; part < 2; ++part, out += 16 * stride) {
      __m256i x[16];
      turn_bytes(rows, at + 2 + 16 * part, x);
      for (int i = 0; i < 16; ++i) {
        store(out + i * stride, mul(low, widen_i8(_mm256_castsi256_si128(x[i]))));
        store(out + i * stride + 16, mul(high, widen_i8(_mm256_extracti128_si256(x[i], 1))));
      }
    }
  }
  static void turn_i4(const uint8_t* const* rows, int64_t at, const uint8_t* scales,
                      const uint8_t* mins, float* out, int64_t stride) {
    alignas(64) float factors[32], least[32];
    for (int i = 0; i < 32; i += 16) {
      store(factors + i, load_f16(scales + 2 * i));
      store(least + i, load_f16(mins + 2 * i));
    }
    __m256i x[16];
    turn_bytes(rows, at, x);
    for (int i = 0; i < 16; ++i)
      for (int part = 0; part < 2; ++part) {
        const F scale = set(factors[i + 16 * part]), min = set(least[i + 16 * part]);
        const __m256i q = _mm256_and_si256(part == 0 ? x[i] : _mm256_srli_epi16(x[i], 4),
                                           _mm256_set1_epi8(15));
        float* const to = out + (i + 16 * part) * stride;
        store(to, fma(scale, widen_i8(_mm256_castsi256_si128(q)), min));
        store(to + 16, fma(scale, widen_i8(_mm256_extracti128_si256(q, 1)), min));
      }
  }

 private:
  static int16_t half_at(const uint8_t* p) {
    int16_t h;
    __builtin_memcpy(&h, p, sizeof h);
    return h;
  }
  static F widen_i8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
  static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static __m128i bytes(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
};

}  // namespace
}  // namespace spike
