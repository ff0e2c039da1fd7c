// The RMS norm that an op may compute of its input first, which saves a node.
#pragma once

#include "core/linear_input.h"
#include "core/norm.h"
#include "ops/op.h"

namespace spike::ops {

/// An optional input (the norm's weight, f32[K]) and the attribute norm_eps.
class NormInFront {
 public:
  NormInFront(const Info& info, size_t input) : input_(input), eps_(info.number("norm_eps", 0.0f)) {}

  /// x [rows, k] itself, or its norm in memory that lasts until this thread's next call.
  const float* of(Context& context, const Tensor& x, int64_t rows, int64_t k) const {
    const float* weight = context.optional(input_, std::span(&k, 1), "norm");
    if (weight == nullptr) return x.as<float>();
    static thread_local Scratch scratch;
    const size_t bytes = static_cast<size_t>(rows * k) * sizeof(float);
    auto* normed = reinterpret_cast<float*>(scratch.reserve(bytes));
    rms_norm(context.parallel(), x.as<float>(), weight, rows, k, eps_, normed);
    return normed;
  }

 private:
  size_t input_;
  float eps_;
};

}  // namespace spike::ops
