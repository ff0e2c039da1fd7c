// Attention, scalar tier.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/attention_kernel.h"
#include "core/half.h"
#include "core/simd_scalar.h"

#include "core/attention_tile.h"

namespace spike {
AttentionKernels attention_kernels_scalar(KvFormat format) {
  return attention_kernels<Scalar>(format);
}
}  // namespace spike
