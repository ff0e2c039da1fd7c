// Quantisers of the formats of 32 values: llama.cpp's quantize_row_*_ref without weights,
// quantize_row_*_impl with them (compiled with -ffp-contract=off, so that the bytes agree).
#include "core/block_search.h"

#include <algorithm>
#include <cmath>

#include "core/block_codec.h"
#include "core/half.h"
#include "core/scale_search.h"

namespace spike {
namespace {

void quantize_plain(const float* x, BlockQ8_0& b) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[i]));
  if (largest < kTiny) largest = 0;
  const float d = largest / 127;
  const float inverse = d != 0 ? 1 / d : 0;
  b.d = f32_to_f16(d);
  for (int i = 0; i < 32; ++i) b.codes[i] = static_cast<int8_t>(std::round(x[i] * inverse));
}

/// q4_0 and q5_0: the extreme value maps to the lowest code.
template <class B>
void quantize_plain(const float* x, B& b) {
  float largest = 0, extreme = 0;
  for (int i = 0; i < 32; ++i)
    if (std::fabs(x[i]) > largest) {
      largest = std::fabs(x[i]);
      extreme = x[i];
    }
  if (largest < kTiny) extreme = 0;
  const float d = extreme / B::kLowest;  // minus zero for an empty block, as the reference writes
  const float inverse = d != 0 ? 1 / d : 0;
  b.d = f32_to_f16(d);
  int8_t codes[32];
  for (int i = 0; i < 32; ++i) {
    const int stored = static_cast<int>(x[i] * inverse + (0.5f - B::kLowest));
    codes[i] = static_cast<int8_t>(std::min(stored + B::kLowest, B::kHighest));
  }
  set_codes(b, codes);
}

/// q4_1 and q5_1: from the smallest value to the largest.
template <class B>
  requires requires(B b) { b.m; }
void quantize_plain(const float* x, B& b) {
  float low = x[0], high = x[0];
  for (int i = 1; i < 32; ++i) {
    if (x[i] < low) low = x[i];
    if (x[i] > high) high = x[i];
  }
  const float range = high - low;
  const float d = range < kTiny ? 0 : range / B::kHighest;
  const float inverse = d != 0 ? 1 / d : 0;
  b.d = f32_to_f16(d);
  b.m = f32_to_f16(low);
  int8_t codes[32];
  for (int i = 0; i < 32; ++i)
    codes[i] =
        static_cast<int8_t>(std::min(static_cast<int>((x[i] - low) * inverse + 0.5f), B::kHighest));
  set_codes(b, codes);
}

/// fp16 of a fitted number, kept finite.
uint16_t finite_half(float v) { return f32_to_f16(clamp(v, -65504, 65504)); }

/// Codes of up to eight blocks, one per lane.
template <class B>
[[gnu::noinline]] void set_lanes(const Lanes (&codes)[32], int blocks, B* b) {
  for (int lane = 0; lane < blocks; ++lane) {
    int8_t own[32];
    for (int i = 0; i < 32; ++i) own[i] = static_cast<int8_t>(codes[i][lane]);
    set_codes(b[lane], own);
  }
}

template <class B>
void quantize_weighted(const float* x, const float* weight, int elements, B* b) {
  Lanes columns[32], weights[32];
  load_columns(x, elements, columns);
  load_columns(weight, elements, weights);
  const int blocks = elements / 32;
  if constexpr (requires { b->m; }) {
    AffineFit<32, Lanes> fit;
    fit_affine<B::kHighest>(columns, weights, {-0.9f, 0.05f, 36, false}, fit);
    for (int i = 0; i < blocks; ++i) {
      b[i].d = finite_half(fit.scale[i]);
      b[i].m = finite_half(-fit.min[i]);
    }
    set_lanes(fit.codes, blocks, b);
  } else {
    SymmetricFit<32, Lanes> fit;
    fit_symmetric<-B::kLowest>(columns, weights, fit);
    for (int i = 0; i < blocks; ++i) b[i].d = finite_half(fit.scale[i]);
    set_lanes(fit.codes, blocks, b);
  }
}

template <class B>
void quantize_each(const float* x, int elements, B* b) {
  for (int i = 0; i < elements / 32; ++i) quantize_plain(x + 32 * i, b[i]);
}

SPIKE_EVERY_TIER void weighted(const float* x, const float* w, int elements, BlockQ5_0* b) {
  quantize_weighted(x, w, elements, b);
}
SPIKE_EVERY_TIER void weighted(const float* x, const float* w, int elements, BlockQ5_1* b) {
  quantize_weighted(x, w, elements, b);
}
SPIKE_EVERY_TIER void weighted(const float* x, const float* w, int elements, BlockQ4_0* b) {
  quantize_weighted(x, w, elements, b);
}
SPIKE_EVERY_TIER void weighted(const float* x, const float* w, int elements, BlockQ4_1* b) {
  quantize_weighted(x, w, elements, b);
}

/// int4_sym: the positive scale that fits best, and the codes nearest to it as it is stored.
SPIKE_EVERY_TIER void quantize_positive(const float* x, const float* weight, int elements,
                                        BlockInt4Sym* b) {
  Lanes columns[32], weights[32], codes[32];
  load_columns(x, elements, columns);
  if (weight != nullptr)
    load_columns(weight, elements, weights);
  else
    for (Lanes& w : weights) w = Lanes{} + 1;
  Lanes scale = fit_positive<-BlockInt4Sym::kLowest>(columns, weights);
  const int blocks = elements / 32;
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t half = positive_half(scale[i]);
    if (i < blocks) b[i].d = half;
    scale[i] = f16_to_f32(half);
  }
  for (int i = 0; i < 32; ++i)
    codes[i] = clamp<Lanes>(nearest<Lanes>(columns[i] / scale), BlockInt4Sym::kLowest,
                            BlockInt4Sym::kHighest);
  set_lanes(codes, blocks, b);
}

template <class B>
void search_either(const float* x, const float* weight, int elements, B* b) {
  if (weight == nullptr)
    quantize_each(x, elements, b);
  else
    weighted(x, weight, elements, b);
}

}  // namespace

void search_blocks(const float* x, const float*, int elements, BlockQ8_0* b) {
  quantize_each(x, elements, b);  // the largest value keeps its place: there is nothing to weigh
}

void search_blocks(const float* x, const float* weight, int elements, BlockQ5_0* b) {
  search_either(x, weight, elements, b);
}
void search_blocks(const float* x, const float* weight, int elements, BlockQ5_1* b) {
  search_either(x, weight, elements, b);
}
void search_blocks(const float* x, const float* weight, int elements, BlockQ4_0* b) {
  search_either(x, weight, elements, b);
}
void search_blocks(const float* x, const float* weight, int elements, BlockQ4_1* b) {
  search_either(x, weight, elements, b);
}
void search_blocks(const float* x, const float* weight, int elements, BlockInt4Sym* b) {
  quantize_positive(x, weight, elements, b);
}

}  // namespace spike
