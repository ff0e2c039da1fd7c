// The last product of a model: logits, or only the best of each row of them.
#pragma once

#include <cstdint>

#include "core/linear.h"

namespace spike {

/// Where the results of a head go. A NaN is the best of its row; of equal logits the one with the
/// lowest id is: numpy's argmax. A row without anything above -infinity has id 0.
struct HeadOutput {
  int32_t* ids;          ///< [t]: id of the best logit
  float* best;           ///< [t]: that logit
  const int64_t* places;  ///< [t]: row of `logits`, or negative: the row isn't wanted
  float* logits;         ///< [rows, n]
};

/// x w^T + bias, with the bits of `linear`; rows that aren't wanted are never written to memory.
void head(const Parallel& parallel, const Matrix& w, const float* x, int64_t t, const float* bias,
          const HeadOutput& output);

/// The same of logits [t, n] that are there already.
void choose(const Parallel& parallel, const float* x, int64_t t, int64_t n,
            const HeadOutput& output);

}  // namespace spike
