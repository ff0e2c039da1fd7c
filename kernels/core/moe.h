// Mixture of experts: each token goes through the gated MLPs of the few experts chosen for it.
#pragma once

#include <cstdint>

#include "core/linear.h"

namespace spike {

/// The stacked matrices of E experts, each packed by itself, one behind the other.
/// gate, up: expert 0's [m, k]; down: expert 0's [n, m].
struct Experts {
  Matrix gate, up, down;
  Activation activation = Activation::silu;
  float limit = 0.0f;  ///< 0: act(g) * u; else act(alpha * min(g, limit)) / alpha
  float alpha = 1.0f;  ///<    * (clamp(u, -limit, limit) + 1)
  const float* gate_bias = nullptr;  ///< [E, m], null or given
  const float* up_bias = nullptr;    ///< [E, m]
  const float* down_bias = nullptr;  ///< [E, n]
};

/// y[t] = sum over slots j of weights[t, j] * expert ids[t, j] (x[t]), in order of j.
/// x [t, k], weights and ids [t, top], y [t, n]; every id must be a stacked expert.
///
/// Tokens are sorted by expert, so that each chosen expert's weights are read once and the other
/// experts' not at all. A token's result has the same bits for any t and any number of threads.
void moe(const Parallel& parallel, const Experts& experts, const float* x, int64_t t,
         const float* weights, const int64_t* ids, int64_t top, float* y);

}  // namespace spike
