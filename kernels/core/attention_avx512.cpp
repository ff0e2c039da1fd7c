// Attention, AVX512 tier.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/attention_kernel.h"
#include "core/half.h"
#include "core/target.h"

SPIKE_TARGET_BEGIN(SPIKE_AVX512)
#include "core/simd_avx512.h"

#include "core/attention_tile.h"

namespace spike {
AttentionKernels attention_kernels_avx512(KvFormat format) {
  return attention_kernels<Avx512>(format);
}
}  // namespace spike
SPIKE_TARGET_END
