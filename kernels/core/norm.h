// Root-mean-square normalisation.
#pragma once

#include <cstdint>

#include "core/parallel.h"

namespace spike {

/// y[r, i] = x[r, i] / sqrt(mean_i(x[r, i]^2) + eps) * w[i] + residual[r, i]; x, y: [rows, dim],
/// w: [dim], residual: [rows, dim] or null. y may be the same memory as x.
void rms_norm(const Parallel& parallel, const float* x, const float* w, int64_t rows, int64_t dim,
              float eps, float* y, const float* residual = nullptr);

}  // namespace spike
