// Quantisers of the super-block formats: llama.cpp's quantize_row_*_K_ref without weights and
// quantize_row_*_K_impl with them, written with eight sub-blocks as vector lanes (compiled with
// -ffp-contract=off, so that the bytes agree).
#include <cmath>
#include <cstring>

#include "core/block_codec.h"
#include "core/block_search.h"
#include "core/half.h"
#include "core/scale_search.h"

namespace spike {
namespace {

// What is not written over lanes is compiled once, not for every tier: hence noinline below.

template <class B>
constexpr int kSubs = B::kElements / B::kSub;

/// A super-block or its weights, eight sub-blocks at a time: sub-block s is lane s % 8 of [s / 8].
template <class B>
using Columns = Lanes[kSubs<B> / kLanes][B::kSub];

template <class B>
void load(const float* x, int elements, Columns<B>& columns) {
  constexpr int kPart = kLanes * B::kSub;
  for (int part = 0; part < kSubs<B> / kLanes; ++part)
    load_columns(x + kPart * part, elements - kPart * part, columns[part]);
}

/// fp16 of a fitted number, kept finite.
uint16_t finite_half(float v) { return f32_to_f16(clamp(v, -65504, 65504)); }

template <class B>
[[gnu::noinline]] void read_grid(const B& b, Grid& grid) {
  grid = grid_of(b);
}

template <class B>
[[gnu::noinline]] void write_codes(const Columns<B>& columns, B& b) {
  int8_t codes[B::kElements];
  for (int s = 0; s < kSubs<B>; ++s)
    for (int i = 0; i < B::kSub; ++i)
      codes[B::kSub * s + i] =
          static_cast<int8_t>(static_cast<int>(columns[s / kLanes][i][s % kLanes]));
  set_codes(b, codes);
}

/// Codes on the grid that the stored scales really give; the fit's where a scale vanished.
template <class B>
void settle_codes(const Columns<B>& x, Columns<B>& codes, B& b) {
  Grid grid;
  read_grid(b, grid);
  for (int part = 0; part < kSubs<B> / kLanes; ++part) {
    Lanes scale, min;
    std::memcpy(&scale, grid.scale + kLanes * part, sizeof scale);
    std::memcpy(&min, grid.min + kLanes * part, sizeof min);
    for (int i = 0; i < B::kSub; ++i) {
      const Lanes code =
          clamp<Lanes>(nearest<Lanes>((x[part][i] + min) / scale), B::kLowest, B::kHighest);
      codes[part][i] = scale != 0 ? code : codes[part][i];
    }
  }
  write_codes(codes, b);
}

void store(const Lanes& from, float* to) { std::memcpy(to, &from, sizeof from); }

// --- with a min: q2_k, q4_k, q5_k ----------------------------------------------------------------

template <class B>
struct AffineTraits;
template <>
struct AffineTraits<BlockQ2K> {
  static constexpr int kMost = 15;  // of the stored scales and mins
  static constexpr AffineSteps kSteps = {-0.5f, 0.1f, 15, true};
};
template <>
struct AffineTraits<BlockQ4K> {
  static constexpr int kMost = 63;
  static constexpr AffineSteps kSteps = {-1.f, 0.1f, 20, false};
};
template <>
struct AffineTraits<BlockQ5K> {
  static constexpr int kMost = 63;
  static constexpr AffineSteps kSteps = {-0.5f, 0.1f, 15, false};
};

/// Weights without an importance matrix: |x|, for q4_k and q5_k plus the sub-block's root mean
/// square.
template <int L>
void own_weights(const Lanes (&x)[L], bool with_mean, Lanes (&weight)[L]) {
  Lanes mean_magnitude{};
  if (with_mean) {
    Lanes sum_squares{};
    for (int i = 0; i < L; ++i) sum_squares += x[i] * x[i];
    for (int s = 0; s < kLanes; ++s) mean_magnitude[s] = std::sqrt(sum_squares[s] / L);
  }
  for (int i = 0; i < L; ++i) weight[i] = mean_magnitude + magnitude<Lanes>(x[i]);
}

/// Numbers of one super-block as small integers, the largest as kMost; returns what one unit is.
template <int kMost, int n>
[[gnu::noinline]] float round_to_largest(const float (&x)[n], uint8_t (&codes)[n]) {
  float largest = 0;
  for (const float v : x) largest = std::max(largest, v);
  const float inverse = largest > 0 ? kMost / largest : 0;
  for (int s = 0; s < n; ++s)
    codes[s] = static_cast<uint8_t>(clamp(nearest(inverse * x[s]), 0, kMost));
  return largest / kMost;
}

void set_scales(BlockQ2K& b, const uint8_t (&scale)[16], const uint8_t (&min)[16]) {
  for (int s = 0; s < 16; ++s) b.scales[s] = static_cast<uint8_t>(scale[s] | (min[s] << 4));
}
template <class B>
void set_scales(B& b, const uint8_t (&scale)[8], const uint8_t (&min)[8]) {
  set_six_bits(b.scales, scale, min);
}

/// Scales, mins and sums of weights of the sub-blocks.
template <class B>
struct AffineSubs {
  float scale[kSubs<B>], min[kSubs<B>], weight[kSubs<B>];
};

template <class B>
[[gnu::noinline]] void store_scales(const AffineSubs<B>& subs, bool weighted, B& b) {
  constexpr int kMost = AffineTraits<B>::kMost;
  uint8_t scale[kSubs<B>], min[kSubs<B>];
  if (weighted) {
    b.d = finite_half(fit_unsigned<kMost>(subs.scale, subs.weight, scale));
    b.dmin = finite_half(fit_unsigned<kMost>(subs.min, subs.weight, min));
  } else {
    b.d = f32_to_f16(round_to_largest<kMost>(subs.scale, scale));
    b.dmin = f32_to_f16(round_to_largest<kMost>(subs.min, min));
  }
  set_scales(b, scale, min);
}

template <class B>
void search_affine(const float* x, const float* given, int elements, B& b) {
  const AffineSteps steps =
      given != nullptr ? AffineSteps{-0.9f, 0.05f, 36, false} : AffineTraits<B>::kSteps;
  Columns<B> columns, weights, codes;
  load<B>(x, elements, columns);
  if (given != nullptr) load<B>(given, elements, weights);
  AffineSubs<B> subs;
  for (int part = 0; part < kSubs<B> / kLanes; ++part) {
    if (given == nullptr)
      own_weights(columns[part], !AffineTraits<B>::kSteps.absolute, weights[part]);
    AffineFit<B::kSub, Lanes> fit;
    fit_affine<B::kHighest>(columns[part], weights[part], steps, fit);
    store(fit.scale, subs.scale + kLanes * part);
    store(fit.min, subs.min + kLanes * part);
    store(sum_of(weights[part]), subs.weight + kLanes * part);
    std::memcpy(codes[part], fit.codes, sizeof fit.codes);
  }
  store_scales(subs, given != nullptr, b);
  settle_codes(columns, codes, b);
}

// --- without: q3_k, q6_k -------------------------------------------------------------------------

/// Scales relative to the one of largest magnitude, which becomes `lowest`; returns one unit.
[[gnu::noinline]] float round_to_extreme(const float (&scales)[16], int lowest, int (&codes)[16]) {
  float extreme = 0;
  for (const float scale : scales)
    if (std::fabs(scale) > std::fabs(extreme)) extreme = scale;
  std::fill_n(codes, 16, 0);
  if (std::fabs(extreme) < kTinyGroup) return 0;
  const float inverse = static_cast<float>(lowest) / extreme;
  for (int s = 0; s < 16; ++s)
    codes[s] = static_cast<int>(clamp(nearest(inverse * scales[s]), static_cast<float>(lowest),
                                      static_cast<float>(-lowest - 1)));
  return 1 / inverse;
}

/// Scales of the sub-blocks and sums of weights.
struct SymmetricSubs {
  float scale[16], weight[16];
};

[[gnu::noinline]] void store_scales(const SymmetricSubs& subs, bool, BlockQ6K& b) {
  int codes[16];
  b.d = finite_half(round_to_extreme(subs.scale, -128, codes));
  for (int s = 0; s < 16; ++s) b.scales[s] = static_cast<int8_t>(codes[s]);
}

[[gnu::noinline]] void store_scales(const SymmetricSubs& subs, bool weighted, BlockQ3K& b) {
  int codes[16];
  std::memset(b.scales, 0, sizeof b.scales);
  if (weighted) {
    SymmetricFit<16, float> fit;
    fit_symmetric<32>(subs.scale, subs.weight, fit);
    b.d = finite_half(fit.scale);
    for (int s = 0; s < 16; ++s) codes[s] = static_cast<int>(fit.codes[s]);
  } else {
    const float d = round_to_extreme(subs.scale, -32, codes);
    b.d = f32_to_f16(d);
    if (d == 0) return;
  }
  for (int s = 0; s < 16; ++s) add_q3k_scale(b, s, static_cast<uint8_t>(codes[s] + 32));
}

template <class B>
void search_symmetric(const float* x, const float* given, int elements, B& b) {
  Columns<B> columns, weights, codes;
  load<B>(x, elements, columns);
  if (given != nullptr) load<B>(given, elements, weights);
  SymmetricSubs subs;
  for (int part = 0; part < 2; ++part) {
    SymmetricFit<16, Lanes> fit;
    if (given == nullptr)
      for (int i = 0; i < 16; ++i) weights[part][i] = columns[part][i] * columns[part][i];
    if (B::kHighest == 3 && given == nullptr)
      fit_by_descent<-B::kLowest>(columns[part], fit);
    else
      fit_symmetric<-B::kLowest>(columns[part], weights[part], fit);
    store(fit.scale, subs.scale + kLanes * part);
    store(sum_of(weights[part]), subs.weight + kLanes * part);
    std::memcpy(codes[part], fit.codes, sizeof fit.codes);
  }
  store_scales(subs, given != nullptr, b);
  settle_codes(columns, codes, b);
}

}  // namespace

SPIKE_EVERY_TIER void search_blocks(const float* x, const float* w, int elements, BlockQ2K* b) {
  search_affine(x, w, elements, *b);
}
SPIKE_EVERY_TIER void search_blocks(const float* x, const float* w, int elements, BlockQ3K* b) {
  search_symmetric(x, w, elements, *b);
}
SPIKE_EVERY_TIER void search_blocks(const float* x, const float* w, int elements, BlockQ4K* b) {
  search_affine(x, w, elements, *b);
}
SPIKE_EVERY_TIER void search_blocks(const float* x, const float* w, int elements, BlockQ5K* b) {
  search_affine(x, w, elements, *b);
}
SPIKE_EVERY_TIER void search_blocks(const float* x, const float* w, int elements, BlockQ6K* b) {
  search_symmetric(x, w, elements, *b);
  // The reference leaves a block that counts as zero all zero bytes.
  if (std::all_of(b->scales, b->scales + 16, [](int8_t scale) { return scale == 0; }))
    std::memset(b, 0, sizeof *b);
}

}  // namespace spike
