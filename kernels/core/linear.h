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

/// out[k] = row `row` of w in fp32.
void dequantize_row(const Matrix& w, int64_t row, float* out);

enum class Activation { silu, gelu_tanh, gelu_erf, relu, relu2 };

/// y = down(act(gate(x)) * up(x)); gate, up: [m, k]; down: [n, m]; residual: null or [t, n].
void gated_mlp(const Parallel& parallel, const Matrix& gate, const Matrix& up, const Matrix& down,
               Activation act, const float* x, int64_t t, const float* residual, float* y);

}  // namespace spike
