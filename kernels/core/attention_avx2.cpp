// Attention, AVX2 tier.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/attention_kernel.h"
#include "core/half.h"
#include "core/target.h"

SPIKE_TARGET_BEGIN(SPIKE_AVX2)
#include "core/simd_avx2.h"

#include "core/attention_tile.h"

namespace spike {
AttentionKernels attention_kernels_avx2(KvFormat format) {
  return attention_kernels<Avx2>(format);
}
}  // namespace spike
SPIKE_TARGET_END
