// Sixteen lanes of 32 bits as two registers: lanes 0..7 and 8..15.
// Include inside a SPIKE_TARGET_BEGIN(SPIKE_AVX2) region, after immintrin.h. lines_scalar.h is the
// definition of every function.
#pragma once

namespace spike {
namespace {

struct Avx2Lines {
  struct Ints {
    __m256i low, high;
  };
  struct Floats {
    __m256 low, high;
  };
  using Codes = Ints;
  /// vpmaddubsw adds pairs of products in 16 bits, so codes must stay below 128.
  static constexpr bool kFoldShifts = false;
  static constexpr int kMostDirect = 8;  ///< tokens; for more, decoding a tile once pays
  static constexpr int kMostPaired = 1;
  static constexpr bool kPairsDecoded = false;
  /// Eight of the sixteen registers hold the sums of four tokens; of more, reading packed tiles,
  /// three at a time measured best.
  template <int kTokens>
  static constexpr int kTokensAtOnce = kTokens <= 4 ? kTokens : 3;
  template <int kSubs>
  static constexpr int kTokensPerPass = 4;
  /// A word takes two products of a code and a token's, which is at most 127, per line.
  template <int kLargest>
  static constexpr int kWordLines = kLargest > 127 ? 1 : INT16_MAX / (2 * 127 * kLargest);
  template <int kLargest>
  static constexpr bool kCentres = kLargest > 127;
  using Words = Ints;

  static Codes load(const uint8_t* p) { return {half(p), half(p + 32)}; }
  static void store(uint8_t* p, Codes c) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), c.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), c.high);
  }
  static Codes mask(Codes c, int m) {
    return {_mm256_and_si256(c.low, bytes(m)), _mm256_and_si256(c.high, bytes(m))};
  }
  template <int N>
  static Codes shift_right(Codes c, int m) {
    return mask({_mm256_srli_epi16(c.low, N), _mm256_srli_epi16(c.high, N)}, m);
  }
  template <int N>
  static Codes shift_left(Codes c, int m) {
    return mask({_mm256_slli_epi16(c.low, N), _mm256_slli_epi16(c.high, N)}, m);
  }
  static Codes merge(Codes a, Codes b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
  }
  template <int kBit>
  static Codes add_where(Codes c, uint64_t lanes) {
    return {_mm256_or_si256(c.low, where(static_cast<uint32_t>(lanes), kBit)),
            _mm256_or_si256(c.high, where(static_cast<uint32_t>(lanes >> 32), kBit))};
  }

  static Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  template <int N>
  static Ints broadcast_shifted(const int32_t* p) {
    const __m256i all = _mm256_slli_epi32(_mm256_set1_epi32(*p), N);
    return {all, all};
  }
  template <int kLargest>
  static Ints dot(Ints sum, Codes c, const int8_t* four) {
    const __m256i x = spread(four);
    return in_order({_mm256_add_epi32(sum.low, dot_half<kLargest>(c.low, x)),
                     _mm256_add_epi32(sum.high, dot_half<kLargest>(c.high, x))});
  }
  /// Sums of two products of neighbours, in 16 bits; see kWordLines.
  static Words word_products(Codes c, const int8_t* four) {
    const __m256i x = spread(four);
    return {_mm256_maddubs_epi16(c.low, x), _mm256_maddubs_epi16(c.high, x)};
  }
  static Words add_words(Words a, Words b) {
    return in_order({_mm256_add_epi16(a.low, b.low), _mm256_add_epi16(a.high, b.high)});
  }
  static Ints add_pairs(Ints sum, Words w) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(w.low, ones)),
            _mm256_add_epi32(sum.high, _mm256_madd_epi16(w.high, ones))};
  }

  static Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Floats set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Floats load_f32(const void* p) {
    const float* x = static_cast<const float*>(p);
    return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
  }
  static void store_f32(float* p, Floats x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
  }
  static Floats load_f16(const void* p) {
    return {_mm256_cvtph_ps(quarter(p)), _mm256_cvtph_ps(quarter(p, 16))};
  }
  static Floats load_bf16(const void* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(quarter(p)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(quarter(p, 16)), 16))};
  }
  static Floats load_i8(const int8_t* p) {
    const __m128i all = quarter(p);
    return to_floats({_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))});
  }
  static Floats four_bits(const uint8_t* low, int odd) {
    const __m128i nibble = _mm_and_si128(_mm_srli_epi16(quarter(low), 4 * odd), _mm_set1_epi8(15));
    return to_floats(
        {_mm256_cvtepu8_epi32(nibble), _mm256_cvtepu8_epi32(_mm_srli_si128(nibble, 8))});
  }
  static Floats six_bits(const uint8_t* low, int odd, const uint8_t* high, int shift) {
    const __m128i nibble = _mm_and_si128(_mm_srli_epi16(quarter(low), 4 * odd), _mm_set1_epi8(15));
    const __m128i pair = _mm_and_si128(_mm_srli_epi16(quarter(high), shift), _mm_set1_epi8(3));
    const __m128i six = _mm_or_si128(nibble, _mm_slli_epi16(pair, 4));
    return to_floats({_mm256_cvtepu8_epi32(six), _mm256_cvtepu8_epi32(_mm_srli_si128(six, 8))});
  }
  static Floats to_floats(Ints x) {
    return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
  }
  static Floats add(Floats a, Floats b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  static Floats mul(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  static Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static Floats div(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
  }
  static Floats max(Floats a, Floats b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
  }
  static Floats min(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
  }
  static Floats power_of_two(Floats n) { return {power_half(n.low), power_half(n.high)}; }

  static float largest_magnitude(Floats a, Floats b) {
    const __m256i largest =
        _mm256_max_epu32(_mm256_max_epu32(unsigned_bits(a.low), unsigned_bits(a.high)),
                         _mm256_max_epu32(unsigned_bits(b.low), unsigned_bits(b.high)));
    __m128i four =
        _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
    return __builtin_bit_cast(float, _mm_cvtsi128_si32(four));
  }
  static int32_t store_codes(int8_t* p, Floats x, float inverse) {
    Ints codes = zero_ints();
    if (inverse != 0) {
      const Floats scaled = mul(x, set(inverse));
      codes = {_mm256_cvtps_epi32(scaled.low), _mm256_cvtps_epi32(scaled.high)};
    }
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(codes.low, codes.high), 0xd8);
    const __m128i packed =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
    const __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
  }
  /// Into L2: a core has few misses to L1 in flight at a time, too few for the memory's bandwidth.
  /// Forced inline: GCC takes a call whose body is only a prefetch for one without effect.
  [[gnu::always_inline]] static void prefetch(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }

 private:
  /// Keeps the compiler from adding in another order: GCC would first have all products, then add
  /// them, and so need many times the registers.
  [[gnu::always_inline]] static Ints in_order(Ints sum) {
    asm("" : "+x"(sum.low), "+x"(sum.high));
    return sum;
  }
  static __m256i spread(const int8_t* four) {
    int32_t word;
    __builtin_memcpy(&word, four, 4);
    return _mm256_set1_epi32(word);
  }
  static __m256i bytes(int m) { return _mm256_set1_epi8(static_cast<char>(m)); }
  static __m256i half(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static __m128i quarter(const void* p, int64_t at = 0) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(p) + at));
  }
  /// `value` in every byte whose bit is set.
  static __m256i where(uint32_t bits, int value) {
    const __m256i source =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i spread =
        _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(bits)), source);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), bytes(value));
  }
  /// Per 32-bit lane the dot product of four unsigned codes with four signed ones.
  template <int kLargest>
  static __m256i dot_half(__m256i c, __m256i x) {
    if constexpr (kLargest <= 127)
      return _mm256_madd_epi16(_mm256_maddubs_epi16(c, x), _mm256_set1_epi16(1));
    // Minus 128 a code's magnitude is at most 128, and two products of it fit 16 bits.
    const __m256i centred = _mm256_xor_si256(c, bytes(128));
    const __m256i products =
        _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred));
    return _mm256_madd_epi16(products, _mm256_set1_epi16(1));
  }
  static __m256 power_half(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  static __m256i unsigned_bits(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
  }
};

}  // namespace
}  // namespace spike
