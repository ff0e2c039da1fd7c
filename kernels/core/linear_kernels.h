// What one instruction-set tier offers to linear.cpp and gated_mlp.cpp.
//
// All tiers perform the same fp32 operations in the same order for every (token, row), whatever the
// number of tokens in the call, so results are bit-identical between tiers and between batch sizes.
#pragma once

#include <cstdint>

#include "core/linear.h"

namespace spike {

/// 32 elements of a token, quantised: x is about scale * code. One cache line.
struct alignas(64) InputBlock {
  int8_t codes[32];  ///< -127..127
  float scale;
  float negative_sum;        ///< -scale * (sum of the codes)
  int32_t negative_codes;    ///< -(sum of the codes)
  int32_t negative_half[2];  ///< the same of codes 0..15 and 16..31
  float negative_half_sum[2];  ///< -scale * (sum of the codes) of those
};

/// Tokens [t, k] as the kernels want them: f32, f16 and bf16 weights use `x`, block formats
/// `blocks`.
struct Input {
  int64_t k = 0;
  const float* x = nullptr;      ///< [t, k]
  InputBlock* blocks = nullptr;  ///< [t, k / 32]
};

struct LinearKernels {
  /// out[i, b] = block b of token i, for `tokens` i and `blocks` b. A token's floats are `stride`
  /// apart in x, its blocks `out_stride` in out.
  /// A block that holds NaN or infinity gets scale NaN, so that the fault stays visible.
  void (*quantize)(const float* x, int64_t stride, int64_t tokens, int64_t blocks, InputBlock* out,
                   int64_t out_stride);

  /// out[i, 16 * groups] = dot products of tokens [token, token + tokens) with the rows of `groups`
  /// row groups from `group` on (1 <= groups <= row_groups_per_step).
  void (*dot)(const Matrix& w, const Input& input, int64_t group, int64_t groups, int64_t token,
              int64_t tokens, float* out);

  /// gate[i] = act(gate[i]) * up[i].
  void (*gate)(Activation act, float* gate, const float* up, int64_t count);

  /// y[i, r] = products[i, r] + bias[r] + residual[i, r], in that order, for `tokens` i and `rows` r.
  /// A token's products are `stride` apart, its y and residual n. bias, residual: null or given; y
  /// may be the same memory as products or residual.
  void (*finish)(const float* products, int64_t stride, int64_t tokens, int64_t rows,
                 const float* bias, const float* residual, float* y, int64_t n);
};

/// Row groups that one call of `dot` may take: what the register blocking of the format uses.
inline int64_t row_groups_per_step(Format format) { return block_elements(format) == 1 ? 4 : 2; }

extern const LinearKernels kLinearScalar, kLinearAvx2, kLinearAvx512;

/// The kernels of cpu_tier().
const LinearKernels& linear_kernels();

}  // namespace spike
