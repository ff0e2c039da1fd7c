// Rows of small elements turned into columns. Include inside a SPIKE_TARGET region of AVX2 or more,
// after immintrin.h.
#pragma once

namespace spike {
namespace {

/// In each half of the registers: row i of 8 x 8 16-bit elements becomes column i.
inline void turn_words(__m256i x[8]) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi16(x[i], x[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi16(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; ++k) {
      b[i + 2 * k] = _mm256_unpacklo_epi32(a[i + k], a[i + k + 2]);
      b[i + 2 * k + 1] = _mm256_unpackhi_epi32(a[i + k], a[i + k + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = _mm256_unpacklo_epi64(b[i], b[i + 4]);
    x[2 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 4]);
  }
}

/// Sixteen bytes of row i in the low half, of row i + `apart` in the high one.
inline __m256i two_rows(const uint8_t* const* rows, int64_t i, int64_t apart, int64_t at) {
  const auto load = [at](const uint8_t* row) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + at));
  };
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load(rows[i])), load(rows[i + apart]), 1);
}

/// x[i] = element i of the eight 16-bit ones at byte `at` of sixteen rows.
inline void turn_halves(const uint8_t* const* rows, int64_t at, __m256i x[8]) {
  for (int i = 0; i < 8; ++i) x[i] = two_rows(rows, i, 8, at);
  turn_words(x);
}

/// out[i * stride + j] = element i of the four floats at byte `at` of row j of four.
inline void turn_floats(const uint8_t* const* rows, int64_t at, float* out, int64_t stride) {
  __m128 x[4];
  for (int j = 0; j < 4; ++j) x[j] = _mm_loadu_ps(reinterpret_cast<const float*>(rows[j] + at));
  _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
  for (int i = 0; i < 4; ++i) _mm_storeu_ps(out + i * stride, x[i]);
}

/// x[i] = byte i of the sixteen at byte `at` of 32 rows.
inline void turn_bytes(const uint8_t* const* rows, int64_t at, __m256i x[16]) {
  __m256i low[8], high[8];
  for (int i = 0; i < 8; ++i) {
    const __m256i a = two_rows(rows, 2 * i, 16, at), b = two_rows(rows, 2 * i + 1, 16, at);
    low[i] = _mm256_unpacklo_epi8(a, b);
    high[i] = _mm256_unpackhi_epi8(a, b);
  }
  turn_words(low);
  turn_words(high);
  for (int i = 0; i < 8; ++i) x[i] = low[i], x[i + 8] = high[i];
}

}  // namespace
}  // namespace spike
