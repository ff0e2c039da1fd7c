// Sixteen lanes of 32 bits: one 64-byte line of a packed tile in one register.
// Include inside a SPIKE_TARGET_BEGIN(SPIKE_AVX512) region, after immintrin.h. lines_scalar.h is
// the definition of every function.
#pragma once

namespace spike {
namespace {

struct Avx512Lines {
  using Codes = __m512i;
  using Ints = __m512i;
  using Floats = __m512;
  /// Codes may be multiplied by 4 or 16 where that saves a shift: a product of u8 codes is exact.
  static constexpr bool kFoldShifts = true;
  static constexpr int kMostDirect = 8;  ///< tokens; for more, decoding a tile once pays
  static constexpr int kMostPaired = 4;
  static constexpr bool kPairsDecoded = true;
  template <int kTokens>
  static constexpr int kTokensAtOnce = kTokens;
  template <int kSubs>
  static constexpr int kTokensPerPass = kSubs == 1 ? 6 : 4;
  template <int kLargest>
  static constexpr int kWordLines = 1;
  template <int kLargest>
  static constexpr bool kCentres = false;

  static Codes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static void store(uint8_t* p, Codes c) { _mm512_storeu_si512(p, c); }
  static Codes mask(Codes c, int m) { return _mm512_and_si512(c, bytes(m)); }
  template <int N>
  static Codes shift_right(Codes c, int m) {
    return _mm512_and_si512(_mm512_srli_epi16(c, N), bytes(m));
  }
  template <int N>
  static Codes shift_left(Codes c, int m) {
    return _mm512_and_si512(_mm512_slli_epi16(c, N), bytes(m));
  }
  static Codes merge(Codes a, Codes b) { return _mm512_or_si512(a, b); }
  template <int kBit>
  static Codes add_where(Codes c, uint64_t lanes) {
    return _mm512_mask_add_epi8(c, lanes, c, bytes(kBit));
  }

  static Ints zero_ints() { return _mm512_setzero_si512(); }
  template <int N>
  static Ints broadcast_shifted(const int32_t* p) {
    return _mm512_slli_epi32(_mm512_set1_epi32(*p), N);
  }
  template <int kLargest>
  static Ints dot(Ints sum, Codes c, const int8_t* four) {
    int32_t word;
    __builtin_memcpy(&word, four, 4);
    return _mm512_dpbusd_epi32(sum, c, _mm512_set1_epi32(word));
  }

  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats set(float x) { return _mm512_set1_ps(x); }
  static Floats load_f32(const void* p) { return _mm512_loadu_ps(p); }
  static void store_f32(float* p, Floats x) { _mm512_storeu_ps(p, x); }
  static Floats load_f16(const void* p) { return _mm512_cvtph_ps(half_line(p)); }
  static Floats load_bf16(const void* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half_line(p)), 16));
  }
  static Floats load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(quarter_line(p)));
  }
  static Floats four_bits(const uint8_t* low, int odd) {
    const __m128i nibble =
        _mm_and_si128(_mm_srli_epi16(quarter_line(low), 4 * odd), _mm_set1_epi8(15));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(nibble));
  }
  static Floats six_bits(const uint8_t* low, int odd, const uint8_t* high, int shift) {
    const __m128i nibble =
        _mm_and_si128(_mm_srli_epi16(quarter_line(low), 4 * odd), _mm_set1_epi8(15));
    const __m128i pair = _mm_and_si128(_mm_srli_epi16(quarter_line(high), shift), _mm_set1_epi8(3));
    const __m128i six = _mm_or_si128(nibble, _mm_slli_epi16(pair, 4));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(six));
  }
  static Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats power_of_two(Floats n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }
  static float largest_magnitude(Floats a, Floats b) {
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    const __m512i largest = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), no_sign),
                                             _mm512_and_si512(_mm512_castps_si512(b), no_sign));
    return __builtin_bit_cast(float, _mm512_reduce_max_epu32(largest));
  }
  static int32_t store_codes(int8_t* p, Floats x, float inverse) {
    const __m512i codes =
        inverse == 0 ? _mm512_setzero_si512() : _mm512_cvtps_epi32(_mm512_mul_ps(x, set(inverse)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(codes));
    return _mm512_reduce_add_epi32(codes);
  }
  /// Into L2: a core has few misses to L1 in flight at a time, too few for the memory's bandwidth.
  /// Forced inline: GCC takes a call whose body is only a prefetch for one without effect.
  [[gnu::always_inline]] static void prefetch(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }

 private:
  static __m512i bytes(int m) { return _mm512_set1_epi8(static_cast<char>(m)); }
  static __m256i half_line(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static __m128i quarter_line(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  }
};

}  // namespace
}  // namespace spike
