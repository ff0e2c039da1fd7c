// The grid of one block of several rows at once, one row per lane: scales fitted to weighted
// values, and the block's bytes. Formats differ in a few numbers only, so that one code serves them
// all; block_codec.h has the same of a single block.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/block_codec.h"
#include "core/lanes.h"

namespace spike {
namespace {

using Rows = Lanes;
constexpr int kLongestSub = 32, kMostSubs = 16, kLongestBlock = 256;

/// What a format's grids have in common. Values are scale * code - min; scale and min of a
/// sub-block are whole numbers of d and dmin in a super-block, and these themselves in a block of
/// 32.
struct GridShape {
  int elements, sub;       ///< values of a block, and of what shares a scale
  float lowest, highest;   ///< codes
  float least, most;       ///< stored scales; a stored min is 0..most
  bool has_min;
  bool positive;           ///< the scale is above zero
  int subs() const { return elements / sub; }
  bool is_super() const { return subs() > 1; }
};

template <class B>
constexpr GridShape shape_with(float least, float most, bool has_min) {
  constexpr bool positive = std::is_same_v<B, BlockInt4Sym>;
  return {B::kElements, B::kSub, B::kLowest, B::kHighest, least, most, has_min, positive};
}
template <class B>
constexpr GridShape kShape = shape_with<B>(1, 1, requires(B b) { b.m; });
template <>
constexpr GridShape kShape<BlockQ2K> = shape_with<BlockQ2K>(0, 15, true);
template <>
constexpr GridShape kShape<BlockQ3K> = shape_with<BlockQ3K>(-32, 31, false);
template <>
constexpr GridShape kShape<BlockQ4K> = shape_with<BlockQ4K>(0, 63, true);
template <>
constexpr GridShape kShape<BlockQ5K> = shape_with<BlockQ5K>(0, 63, true);
template <>
constexpr GridShape kShape<BlockQ6K> = shape_with<BlockQ6K>(-128, 127, false);

/// d * scale[s] * code - dmin * min[s] in sub-block s of each row.
struct LaneGrid {
  Rows d, dmin;
  Rows scale[kMostSubs], min[kMostSubs];
};

/// A scale and a min per row.
struct Affine {
  Rows scale, min;
};

/// Every lane rounded to fp16, kept finite.
[[gnu::noinline]] inline void round_to_half(Rows& v) {
  for (int r = 0; r < kLanes; ++r)
    v[r] = f16_to_f32(f32_to_f16(std::clamp(v[r], -65504.f, 65504.f)));
}

inline Rows inverse_or_zero(Rows v) { return v != 0 ? 1 / v : Rows{}; }

inline Rows code_of(const GridShape& shape, Rows x, Rows inverse_scale, Rows min) {
  return clamp<Rows>(nearest<Rows>((x + min) * inverse_scale), shape.lowest, shape.highest);
}

/// Weighted least squares for scale and min, given codes; a min below zero becomes zero.
inline Affine solve_affine(const GridShape& shape, const Rows* x, const float* weight,
                           const Rows* codes) {
  Rows w{}, wl{}, wll{}, wx{}, wxl{};
  for (int i = 0; i < shape.sub; ++i) {
    const Rows l = codes[i] * weight[i];
    w += weight[i];
    wl += l;
    wll += l * codes[i];
    wx += weight[i] * x[i];
    wxl += l * x[i];
  }
  const Rows alone = wll > 0 ? wxl / wll : Rows{};
  if (!shape.has_min) return {alone, Rows{}};
  const Rows determinant = w * wll - wl * wl;
  const Rows min = (wl * wxl - wll * wx) / determinant;
  const auto usable = (determinant > 0) & (min > 0);
  return {usable ? (w * wxl - wx * wl) / determinant : alone, usable ? min : Rows{}};
}

/// Scale and min that leave the least weighted squared error: candidate steps around the plain grid
/// of the range, each improved by least squares.
inline Affine fit_sub(const GridShape& shape, const Rows* x, const float* weight) {
  Rows low{}, high{}, extreme{};
  for (int i = 0; i < shape.sub; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    extreme = magnitude<Rows>(x[i]) > magnitude<Rows>(extreme) ? x[i] : extreme;
  }
  // A scale without min takes the sign that lets the extreme value have the lowest code.
  Rows span = shape.has_min ? (high - low) / shape.highest : extreme / shape.lowest;
  if (shape.positive) {
    const Rows from_low = low / shape.lowest, from_high = high / shape.highest;
    span = from_low > from_high ? from_low : from_high;
  }
  const Rows min = shape.has_min ? -low : Rows{};
  Affine best{};
  Rows least{};
  constexpr float kSteps[] = {1, 1.08f, 1.04f, 0.97f, 0.94f, 0.9f, 0.86f, 0.81f};
  for (int step = 0; step < 8; ++step) {
    Rows codes[kLongestSub];
    const Rows inverse = inverse_or_zero(span * kSteps[step]);
    for (int i = 0; i < shape.sub; ++i) codes[i] = code_of(shape, x[i], inverse, min);
    const Affine found = solve_affine(shape, x, weight, codes);
    Rows error{};
    for (int i = 0; i < shape.sub; ++i) {
      const Rows off = found.scale * codes[i] - found.min - x[i];
      error += weight[i] * off * off;
    }
    const auto better = step == 0 ? error == error : error < least;
    least = better ? error : least;
    best.scale = better ? found.scale : best.scale;
    best.min = better ? found.min : best.min;
  }
  return best;
}

/// The stored numbers nearest to a scale and a min.
inline Affine round_sub(const GridShape& shape, const LaneGrid& grid, Affine wanted) {
  const Rows scale = nearest<Rows>(wanted.scale * inverse_or_zero(grid.d));
  const Rows min = nearest<Rows>(wanted.min * inverse_or_zero(grid.dmin));
  return {clamp<Rows>(scale, shape.least, shape.most), clamp<Rows>(min, 0, shape.most)};
}

/// d and dmin of a block fitted to its values [elements], and all scales and mins as a first guess.
inline void fit_grid(const GridShape& shape, const Rows* x, const float* weight, LaneGrid& grid) {
  Affine fits[kMostSubs];
  Rows extreme{}, most_min{};
  for (int s = 0; s < shape.subs(); ++s) {
    fits[s] = fit_sub(shape, x + shape.sub * s, weight + shape.sub * s);
    extreme = magnitude<Rows>(fits[s].scale) > magnitude<Rows>(extreme) ? fits[s].scale : extreme;
    most_min = fits[s].min > most_min ? fits[s].min : most_min;
  }
  grid.d = extreme / (shape.least < 0 ? shape.least : shape.most);
  grid.dmin = most_min / shape.most;
  round_to_half(grid.d);
  round_to_half(grid.dmin);
  for (int s = 0; s < shape.subs(); ++s) {
    const Affine stored =
        shape.is_super() ? round_sub(shape, grid, fits[s]) : Affine{Rows{} + 1, Rows{} + 1};
    grid.scale[s] = stored.scale;
    grid.min[s] = stored.min;
  }
}

// --- the bytes of one lane -----------------------------------------------------------------------

template <class B>
void set_scales(B& b, const LaneGrid& grid, int lane) {
  if constexpr (requires { b.m; }) b.m = f32_to_f16(-grid.dmin[lane]);
  if constexpr (requires { b.dmin; }) {  // q4_k and q5_k
    uint8_t scale[8], min[8];
    for (int s = 0; s < 8; ++s) {
      scale[s] = static_cast<uint8_t>(grid.scale[s][lane]);
      min[s] = static_cast<uint8_t>(grid.min[s][lane]);
    }
    b.dmin = f32_to_f16(grid.dmin[lane]);
    set_six_bits(b.scales, scale, min);
  }
}
template <>
void set_scales(BlockInt4Sym& b, const LaneGrid& grid, int lane) {
  b.d = positive_half(grid.d[lane]);
}
template <>
void set_scales(BlockQ2K& b, const LaneGrid& grid, int lane) {
  b.dmin = f32_to_f16(grid.dmin[lane]);
  for (int s = 0; s < 16; ++s)
    b.scales[s] = static_cast<uint8_t>(static_cast<int>(grid.scale[s][lane]) |
                                       (static_cast<int>(grid.min[s][lane]) << 4));
}
template <>
void set_scales(BlockQ3K& b, const LaneGrid& grid, int lane) {
  for (int s = 0; s < 16; ++s)
    add_q3k_scale(b, s, static_cast<uint8_t>(grid.scale[s][lane] + 32));
}
template <>
void set_scales(BlockQ6K& b, const LaneGrid& grid, int lane) {
  for (int s = 0; s < 16; ++s) b.scales[s] = static_cast<int8_t>(grid.scale[s][lane]);
}

/// The block of one lane; codes [elements].
template <class B>
B block_of(const LaneGrid& grid, const Rows* codes, int lane) {
  B b;
  std::memset(&b, 0, sizeof b);
  b.d = f32_to_f16(grid.d[lane]);
  set_scales(b, grid, lane);
  int8_t stored[B::kElements];
  for (int i = 0; i < B::kElements; ++i)
    stored[i] = static_cast<int8_t>(static_cast<int>(codes[i][lane]));
  set_codes(b, stored);
  return b;
}

}  // namespace
}  // namespace spike
