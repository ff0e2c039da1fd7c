// Eight float lanes. Include inside a SPIKE_TARGET_BEGIN(SPIKE_AVX2) region, after immintrin.h.
// The interface is described in simd_avx512.h.
#pragma once

#include "core/turned.h"

namespace spike {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int64_t width = 8;
  static constexpr int64_t terms = 1;
  static constexpr int rows = 6;
  static constexpr int accumulators = 12;

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load_part(const float* p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void store_part(float* p, F x, int64_t n) { _mm256_maskstore_ps(p, first(n), x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F dot(F x, F y, F sum) { return fma(x, y, sum); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }

  static F exp(F x) {
    const F alive = _mm256_cmp_ps(x, set(-87.3f), _CMP_NLT_UQ);
    x = _mm256_min_ps(set(88.3f), _mm256_max_ps(set(-87.3f), x));
    const F n = _mm256_round_ps(mul(x, set(1.44269504f)),
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F r = _mm256_fnmadd_ps(n, set(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, set(-2.12194440e-4f), r);
    F p = set(1.0f / 5040);
    p = fma(p, r, set(1.0f / 720));
    p = fma(p, r, set(1.0f / 120));
    p = fma(p, r, set(1.0f / 24));
    p = fma(p, r, set(1.0f / 6));
    p = fma(p, r, set(0.5f));
    p = fma(p, r, set(1.0f));
    p = fma(p, r, set(1.0f));
    const __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(alive, mul(p, _mm256_castsi256_ps(power)));
  }

  static F weight(F x) { return exp(x); }

  static float sum(F x) {
    float parts[4];
    sum4(x, zero(), zero(), zero(), parts);
    return parts[0];
  }
  static float top(F x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static void sum4(F a, F b, F c, F d, float* out) {
    const F all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }

  static F load_f16(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F load_f16_part(const uint8_t* p, int64_t n) {
    uint8_t whole[16] = {};
    for (int64_t i = 0; i < 2 * n; ++i) whole[i] = p[i];
    return load_f16(whole);
  }
  static void store_f16(uint8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_i8(uint8_t* p, F x) {
    const __m256i q = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
  static void store_nibbles(uint8_t* p, F low, F high) {
    const __m256i q = _mm256_or_si256(_mm256_cvtps_epi32(low),
                                      _mm256_slli_epi32(_mm256_cvtps_epi32(high), 4));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  static F spread_f16(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_set1_epi16(half_at(p)));
  }
  static F load_i8(const uint8_t* p) { return widen_i8(bytes(p)); }
  static F load_low(const uint8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_and_si128(bytes(p), _mm_set1_epi8(15))));
  }
  static F load_high(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_cvtepu8_epi32(bytes(p)), 4));
  }

  static constexpr int64_t stored_keys = 8;
  static void columns_f16(const uint8_t* const* rows, int64_t at, F (*columns)[2]) {
    __m256i x[8];
    turn_halves(rows, at, x);
    for (int i = 0; i < 8; ++i) {
      columns[i][0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x[i]));
      columns[i][1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x[i], 1));
    }
  }
  static void turn_f16(const uint8_t* const* rows, int64_t at, float* out, int64_t stride) {
    for (int half = 0; half < 2; ++half) {
      __m256i x[8];
      turn_halves(rows + 16 * half, at, x);
      for (int i = 0; i < 8; ++i) {
        float* const to = out + i * stride + 16 * half;
        store(to, _mm256_cvtph_ps(_mm256_castsi256_si128(x[i])));
        store(to + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(x[i], 1)));
      }
    }
  }
  static void turn_f32(const uint8_t* const* rows, int64_t at, float* out, int64_t stride) {
    for (int j = 0; j < 32; j += 4) turn_floats(rows + j, at, out + j, stride);
  }
  static void turn_i8(const uint8_t* const* rows, int64_t at, float* out, int64_t stride) {
    alignas(32) int16_t halves[32];
    alignas(32) float scales[32];
    for (int j = 0; j < 32; ++j) halves[j] = half_at(rows[j] + at);
    for (int j = 0; j < 32; j += 8)
      store(scales + j, load_f16(reinterpret_cast<const uint8_t*>(halves + j)));
    for (int part = 0; part < 2; ++part, out += 16 * stride) {
      __m256i x[16];
      turn_bytes(rows, at + 2 + 16 * part, x);
      for (int i = 0; i < 16; ++i)
        each_eight(x[i], [&](int j, F q) {
          store(out + i * stride + j, mul(load(scales + j), q));
        });
    }
  }
  static void turn_i4(const uint8_t* const* rows, int64_t at, const uint8_t* scales,
                      const uint8_t* mins, float* out, int64_t stride) {
    alignas(32) float factors[32], least[32];
    for (int i = 0; i < 32; i += 8) {
      store(factors + i, load_f16(scales + 2 * i));
      store(least + i, load_f16(mins + 2 * i));
    }
    __m256i x[16];
    turn_bytes(rows, at, x);
    for (int i = 0; i < 16; ++i)
      for (int part = 0; part < 2; ++part) {
        const F scale = set(factors[i + 16 * part]), min = set(least[i + 16 * part]);
        const __m256i codes = _mm256_and_si256(part == 0 ? x[i] : _mm256_srli_epi16(x[i], 4),
                                               _mm256_set1_epi8(15));
        float* const to = out + (i + 16 * part) * stride;
        each_eight(codes, [&](int j, F q) { store(to + j, fma(scale, q, min)); });
      }
  }

 private:
  static int16_t half_at(const uint8_t* p) {
    int16_t h;
    __builtin_memcpy(&h, p, sizeof h);
    return h;
  }
  static F widen_i8(__m128i x) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)); }
  /// use(first lane, floats) for each eight of 32 signed bytes.
  template <class Use>
  static void each_eight(__m256i x, Use use) {
    const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
    use(0, widen_i8(low));
    use(8, widen_i8(_mm_unpackhi_epi64(low, low)));
    use(16, widen_i8(high));
    use(24, widen_i8(_mm_unpackhi_epi64(high, high)));
  }
  static __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m128i bytes(const uint8_t* p) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  }
};

}  // namespace
}  // namespace spike
