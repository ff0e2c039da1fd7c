// Codes and scales of rows that are quantised already, moved one after the other where that makes
// the squared error e H e^T smaller: coordinate descent, as QuantEase (arXiv 2309.01885) on codes.
#pragma once

#include "core/feedback_tile.h"

namespace spike {
namespace {

/// H between the columns of one sub-block, [sub][sub] row by row.
inline void curvature_of(const Factor& factor, int64_t at, int sub, float* h) {
  for (int i = 0; i < sub; ++i)
    for (int j = 0; j <= i; ++j) {
      const float *a = factor.row(at + i), *b = factor.row(at + j);
      double sum = 0;
      for (int64_t l = at + i; l < factor.k; ++l) sum += double{a[l]} * b[l];
      h[i * sub + j] = h[j * sub + i] = static_cast<float>(sum);
    }
}

/// One sub-block while it is refined: half the error's gradient for e, and what changed.
struct Refinement {
  const GridShape& shape;
  const float* h;
  Rows gradient[kLongestSub];

  /// e_i += by.
  void move(int i, Rows by) {
    for (int j = 0; j < shape.sub; ++j) gradient[j] += by * h[i * shape.sub + j];
  }

  /// The best change of a number that each q_i is `slope[i]` times of, were it not rounded.
  Rows step(const Rows* slope, Rows& curvature) const {
    Rows down{};
    curvature = Rows{};
    for (int i = 0; i < shape.sub; ++i) {
      down += gradient[i] * slope[i];
      Rows row{};
      for (int j = 0; j < shape.sub; ++j) row += slope[j] * h[i * shape.sub + j];
      curvature += row * slope[i];
    }
    return curvature > 0 ? down / curvature : Rows{};
  }

  /// Moves a number to `wanted` in the lanes where the error gets smaller by that.
  void change(const Rows* slope, Rows best, Rows curvature, Rows& number, Rows wanted) {
    Rows by = wanted - number;
    by = curvature * by * (by - 2 * best) < 0 ? by : Rows{};
    number += by;
    for (int i = 0; i < shape.sub; ++i) move(i, -by * slope[i]);
  }
};

/// Scale and min of sub-block s, in turn, for codes that stay.
inline void refine_scales(Refinement& part, LaneGrid& grid, int s, const Rows* codes) {
  const GridShape& shape = part.shape;
  const bool super = shape.is_super();
  Rows slope[kLongestSub], curvature;
  for (int which = 0; which < (shape.has_min ? 2 : 1); ++which) {
    const bool is_min = which == 1;
    const Rows unit = !super ? Rows{} + 1 : is_min ? grid.dmin : grid.d;
    for (int i = 0; i < shape.sub; ++i) slope[i] = is_min ? -unit : unit * codes[i];
    Rows& number = super ? (is_min ? grid.min[s] : grid.scale[s]) : is_min ? grid.dmin : grid.d;
    const Rows best = part.step(slope, curvature);
    Rows wanted = number + best;
    if (!super)
      round_to_half(wanted);
    else
      wanted = clamp<Rows>(nearest<Rows>(wanted), is_min ? 0 : shape.least, shape.most);
    if (shape.positive) wanted = wanted > 0 ? wanted : number;
    part.change(slope, best, curvature, number, wanted);
  }
}

/// Each code of a sub-block, in turn, for a scale and a min that stay.
inline void refine_codes(Refinement& part, Affine grid, Rows* codes) {
  const int sub = part.shape.sub;
  const Rows inverse = inverse_or_zero(grid.scale);
  for (int i = 0; i < sub; ++i) {
    const Rows q = grid.scale * codes[i] - grid.min;
    const Rows wanted = q + part.gradient[i] * (1 / part.h[i * sub + i]);
    const Rows code = code_of(part.shape, wanted, inverse, grid.min);
    part.move(i, q - (grid.scale * code - grid.min));
    codes[i] = code;
  }
}

/// One sub-block, columns from `at` on; `h` as from curvature_of.
SPIKE_EVERY_TIER void refine_sub_block(FeedbackTile& tile, const float* h, int64_t at) {
  const GridShape& shape = tile.shape;
  LaneGrid& grid = tile.grids[static_cast<size_t>(at / shape.elements)];
  const int s = static_cast<int>(at % shape.elements) / shape.sub;
  Rows *y = tile.y.get(), *codes = tile.codes.get() + at, *error = tile.error.get() + at;
  Refinement part{shape, h, {}};
  for (int i = 0; i < shape.sub; i += kGroup) {
    Rows sum[kGroup]{};
    for (int64_t l = at; l < tile.factor.k; ++l)
      for (int c = 0; c < kGroup; ++c) sum[c] += y[l] * tile.factor.row(at + i + c)[l];
    for (int c = 0; c < kGroup; ++c) part.gradient[i + c] = sum[c];
  }
  refine_scales(part, grid, s, codes);
  const Affine chosen{grid.d * grid.scale[s], grid.dmin * grid.min[s]};
  refine_codes(part, chosen, codes);
  Rows moved[kLongestSub];
  for (int i = 0; i < shape.sub; ++i) {
    const Rows now = tile.w[static_cast<size_t>(at + i)] - (chosen.scale * codes[i] - chosen.min);
    moved[i] = now - error[i];
    error[i] = now;
  }
  carry(tile.factor, moved - at, at, at + shape.sub, at, tile.factor.k - at, y + at);
}

}  // namespace
}  // namespace spike
