// Sixteen float lanes whose products take pairs of bf16, two terms of a sum at a time (vdpbf16ps).
// Include inside a SPIKE_TARGET_BEGIN(SPIKE_AVX512_BF16) region, after simd_avx512.h.
#pragma once

namespace spike {
namespace {

struct Avx512Bf16 : Avx512 {
  static constexpr int64_t terms = 2;

  /// sum + the products of both terms; lanes of x and y are pairs of bf16.
  static F dot(F x, F y, F sum) { return _mm512_dpbf16_ps(sum, halves(x), halves(y)); }

  /// Lane i = (first[i], second[i]), rounded to nearest.
  static F pair(F first, F second) {
    const __m512i places = _mm512_or_si512(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_set_epi32(31 << 16, 30 << 16, 29 << 16, 28 << 16, 27 << 16, 26 << 16, 25 << 16,
                         24 << 16, 23 << 16, 22 << 16, 21 << 16, 20 << 16, 19 << 16, 18 << 16,
                         17 << 16, 16 << 16));
    return _mm512_castsi512_ps(
        _mm512_permutexvar_epi16(places, _mm512_castps_si512(neighbours(first, second))));
  }
  /// The 32 elements of both, rounded, in order: lane i = elements 2i and 2i + 1.
  static F neighbours(F first, F second) {
    return __builtin_bit_cast(F, _mm512_cvtne2ps_pbh(second, first));
  }
  static F ones() { return _mm512_castsi512_ps(_mm512_set1_epi32(0x3f803f80)); }

  static constexpr int64_t stored_keys = 32;
  /// columns[i] = pair i of the 32 halves at byte `at` of sixteen rows, rounded to bf16.
  static void columns_f16(const uint8_t* const* rows, int64_t at, F (*columns)[1]) {
    __m512i x[16];
    for (int i = 0; i < 16; ++i)
      x[i] = _mm512_castps_si512(neighbours(load_f16(rows[i] + at), load_f16(rows[i] + at + 32)));
    turn_dwords(x);
    for (int i = 0; i < 16; ++i) columns[i][0] = _mm512_castsi512_ps(x[i]);
  }

  /// e^x within 8e-5, a small part of what rounding to bf16 costs; 0 for x below -111.
  static F weight(F x) {
    const F t = max(set(-160.0f), mul(x, set(1.44269504f)));
    const F n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT);
    const F r = sub(t, n);
    F p = set(0.05517167f);
    p = fma(p, r, set(0.24261112f));
    p = fma(p, r, set(0.69326099f));
    p = fma(p, r, set(0.99992807f));
    return _mm512_scalef_ps(p, n);
  }

 private:
  /// Row i of 16 x 16 becomes column i.
  static void turn_dwords(__m512i x[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
      a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)  // b[4g + d]: dwords d of every quarter, of rows 4g to 4g + 3
      for (int half = 0; half < 2; ++half) {
        b[i + 2 * half] = _mm512_unpacklo_epi64(a[i + half], a[i + half + 2]);
        b[i + 2 * half + 1] = _mm512_unpackhi_epi64(a[i + half], a[i + half + 2]);
      }
    for (int d = 0; d < 4; ++d) {
      const __m512i even = _mm512_shuffle_i32x4(b[d], b[4 + d], 0x88);
      const __m512i odd = _mm512_shuffle_i32x4(b[d], b[4 + d], 0xdd);
      const __m512i even2 = _mm512_shuffle_i32x4(b[8 + d], b[12 + d], 0x88);
      const __m512i odd2 = _mm512_shuffle_i32x4(b[8 + d], b[12 + d], 0xdd);
      x[d] = _mm512_shuffle_i32x4(even, even2, 0x88);
      x[d + 4] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
      x[d + 8] = _mm512_shuffle_i32x4(even, even2, 0xdd);
      x[d + 12] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
  }

  static __m512bh halves(F x) { return __builtin_bit_cast(__m512bh, x); }
};

}  // namespace
}  // namespace spike
