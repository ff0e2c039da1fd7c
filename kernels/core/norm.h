// Root-mean-square normalisation.
#pragma once

#include <cstdint>

#include "core/parallel.h"

namespace spike {

/// y[r, i] = x[r, i] / sqrt(mean_i(x[r, i]^2) + eps) * w[i]; x, y: [rows, dim], w: [dim].
/// y may be the same memory as x.
void rms_norm(const Parallel& parallel, const float* x, const float* w, int64_t rows, int64_t dim,
              float eps, float* y);

}  // namespace spike
