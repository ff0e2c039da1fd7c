// A few rows of a matrix while they are quantised with error feedback, one row per lane.
//
// With e = w - q of one row and H = R R^T, R upper triangular, the squared error is
//
//     e H e^T = sum over j of y_j^2,   y_j = sum over i <= j of e_i R_ij.
#pragma once

#include <algorithm>
#include <memory>

#include "core/lane_grid.h"

namespace spike {
namespace {

constexpr int kPanel = 64;  // rows of the factor that stay in the cache for all columns of a block
constexpr int kGroup = 8;   // rows or columns summed in registers

/// R, row-major [k, k], zeros below the diagonal.
struct Factor {
  const float* data;
  int64_t k;
  const float* row(int64_t i) const { return data + i * k; }
};

/// What is known of the rows so far; all arrays are [k], codes up to the end of the last block.
struct FeedbackTile {
  const Factor& factor;
  const GridShape& shape;
  std::unique_ptr<Rows[]> w, error, y, codes;
  std::unique_ptr<LaneGrid[]> grids;  ///< of every block

  FeedbackTile(const Factor& factor, const GridShape& shape) : factor(factor), shape(shape) {
    const auto k = static_cast<size_t>(factor.k), elements = static_cast<size_t>(shape.elements);
    const size_t blocks = (k + elements - 1) / elements;
    for (auto* array : {&w, &error, &y}) *array = std::make_unique<Rows[]>(k);
    codes = std::make_unique<Rows[]>(blocks * elements);
    grids = std::make_unique<LaneGrid[]>(blocks);
  }

  /// The squared error of each row.
  Rows cost() const {
    Rows sum{};
    for (size_t j = 0; j < static_cast<size_t>(factor.k); ++j) sum += y[j] * y[j];
    return sum;
  }
};

/// to[j] += sum of error[i] * R[i, begin + j] over first <= i < last, for j < count.
inline void carry(const Factor& factor, const Rows* error, int64_t first, int64_t last,
                  int64_t begin, int64_t count, Rows* to) {
  for (int64_t panel = first; panel < last; panel += kPanel) {
    const int64_t end = std::min<int64_t>(last, panel + kPanel);
    for (int64_t j = 0; j < count; j += kGroup) {
      Rows sum[kGroup];
      for (int c = 0; c < kGroup; ++c) sum[c] = to[j + c];
      for (int64_t i = panel; i < end; ++i) {
        const float* r = factor.row(i) + begin + j;
        for (int c = 0; c < kGroup; ++c) sum[c] += error[i] * r[c];
      }
      for (int c = 0; c < kGroup; ++c) to[j + c] = sum[c];
    }
  }
}

}  // namespace
}  // namespace spike
