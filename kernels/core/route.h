// Choosing experts for each token from its router's logits.
#pragma once

#include <cstdint>

#include "core/parallel.h"

namespace spike {

enum class Scores { softmax, sigmoid, none };

/// How experts are chosen; the fields are the attributes of the IR's op `route`.
struct Routing {
  Scores scores = Scores::softmax;
  int64_t top = 1;                          ///< experts per token
  int64_t groups = 1, best_groups = 1;      ///< only experts of the best groups, if groups > 1
  int64_t per_group = 1;                    ///< a group counts as the sum of that many largest
  bool softmax_chosen = false;              ///< weights are the softmax of the chosen scores
  bool normalise = false;                   ///< weights are divided by max(sum + eps, floor)
  float eps = 0.0f, floor = 0.0f, scale = 1.0f;
};

/// Weights and ids [t, top] in descending order of score + correction [experts] (null or given),
/// of logits [t, experts]. Of equal ones the lower id comes first; NaN counts as the largest.
void route(const Parallel& parallel, const Routing& routing, const float* logits, int64_t t,
           int64_t experts, const float* correction, float* weights, int64_t* ids);

}  // namespace spike
