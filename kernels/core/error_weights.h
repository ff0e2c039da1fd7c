// How much each value's squared error counts, given the importance of its input channel (the mean
// square of the channel's activations): llama.cpp's weights in quantize_row_*_impl.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/blocks.h"

namespace spike {

/// Mean of x^2, summed in order of i.
inline float mean_square(const float* x, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return sum / static_cast<float>(n);
}

/// weight[i] = importance[i] * sqrt(variance + x[i]^2) for `elements` values of a row whose mean
/// square is `row_variance`: formats of 32 values take that variance, super-blocks their own (all
/// but q2_k twice it). q6_k counts the importance alone.
template <class B>
void weigh_errors(const float* x, const float* importance, int elements, float row_variance,
                  float* weight) {
  float variance = row_variance;
  if constexpr (B::kElements == 256) {
    variance = mean_square(x, elements);
    if constexpr (!std::is_same_v<B, BlockQ2K>) variance *= 2;
  }
  for (int i = 0; i < elements; ++i)
    weight[i] = std::is_same_v<B, BlockQ6K> ? importance[i]
                                            : importance[i] * std::sqrt(variance + x[i] * x[i]);
}

}  // namespace spike
