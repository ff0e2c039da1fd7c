// What one instruction-set tier offers to linear.cpp and gated_mlp.cpp.
//
// All tiers perform the same fp32 operations in the same order for every (token, row), whatever the
// number of tokens in the call, so results are bit-identical between tiers and between batch sizes.
#pragma once

#include <cstdint>

#include "core/linear.h"

namespace spike {

/// Tokens [t, k] as the kernels want them. For block formats each 32 elements are int8 codes and one
/// scale: x is about scale * code. f32, f16 and bf16 weights use only `x`.
struct Input {
  int64_t k = 0;
  const float* x = nullptr;           ///< [t, k]
  int8_t* codes = nullptr;            ///< [t, k], -127..127
  float* scale = nullptr;             ///< [t, k / 32]
  float* negative_sum = nullptr;      ///< [t, k / 32]: -scale * sum of the 32 codes
  int32_t* negative_codes_16 = nullptr;  ///< [t, k / 16]: minus the sum of 16 codes
  int32_t* negative_codes_32 = nullptr;  ///< [t, k / 32]: minus the sum of 32 codes
};

struct LinearKernels {
  /// Fills the rows [token, token + tokens) of everything but `x`; k is a multiple of 32.
  /// A block that holds NaN or infinity gets scale NaN, so that the fault stays visible.
  void (*quantize)(const Input& input, int64_t token, int64_t tokens);

  /// out[i, 16 * groups] = dot products of tokens [token, token + tokens) with the rows of `groups`
  /// row groups from `group` on (1 <= groups <= row_groups_per_step).
  void (*dot)(const Matrix& w, const Input& input, int64_t group, int64_t groups, int64_t token,
              int64_t tokens, float* out);

  /// gate[i] = act(gate[i]) * up[i].
  void (*gate)(Activation act, float* gate, const float* up, int64_t count);
};

/// Row groups that one call of `dot` may take: what the register blocking of the format uses.
inline int64_t row_groups_per_step(Format format) {
  return block_elements(format) == 1 ? 4 : 2;
}

extern const LinearKernels kLinearScalar, kLinearAvx512;

/// The kernels of cpu_tier().
const LinearKernels& linear_kernels();

}  // namespace spike
