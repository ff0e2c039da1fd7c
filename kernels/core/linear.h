// y = x W^T + bias over packed weights; and the gated MLP made of three of them.
#pragma once

#include <cstdint>

#include "core/format.h"
#include "core/parallel.h"

namespace spike {

/// A weight matrix [n, k] in packed layout; `data` must be 64-byte aligned.
struct Matrix {
  Format format = Format::f32;
  const uint8_t* data = nullptr;
  int64_t n = 0;
  int64_t k = 0;
};

/// y[t, n] = sum_k x[t, k] w[n, k] + bias[n] + residual[t, n].  bias, residual: null or given.
/// Block formats quantise x to int8 per 32 elements; f32/f16/bf16 weights keep x in fp32.
/// y may be the same memory as residual.
void linear(const Parallel& parallel, const Matrix& w, const float* x, int64_t t, const float* bias,
            const float* residual, float* y);

/// The three projections of attention, which read the same x: one quantisation, one start of threads.
struct QkvWeights {
  Matrix w[3];
  const float* bias[3] = {};  ///< [n] each, or null
};

/// y[i] = x w[i]^T + bias[i], with the bits of three calls of `linear`.
void linear_qkv(const Parallel& parallel, const QkvWeights& weights, const float* x, int64_t t,
                float* const y[3]);

/// out[k] = row `row` of w in fp32.
void dequantize_row(const Matrix& w, int64_t row, float* out);

enum class Activation { silu, gelu_tanh, gelu_erf, gelu_quick, relu, relu2 };

/// gate, up: [m, k]; down: [n, m]; biases: null or given.
struct GatedMlpWeights {
  Matrix gate, up, down;
  const float* gate_bias = nullptr;
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;
};

/// y = down(act(gate(x)) * up(x)) + residual; residual: null or [t, n].
void gated_mlp(const Parallel& parallel, const GatedMlpWeights& weights, Activation act,
               const float* x, int64_t t, const float* residual, float* y);

}  // namespace spike
