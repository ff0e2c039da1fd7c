// Attention, AVX512 tier.
#include <cmath>

#include "core/attention_kernel.h"
#include "core/half.h"
#include "core/target.h"

SPIKE_TARGET_BEGIN(SPIKE_AVX512)
#include "core/simd_avx512.h"

#include "core/attention_tile.h"

namespace spike {
SegmentKernel segment_kernel_avx512(KvFormat format) { return segment_kernel<Avx512>(format); }
}  // namespace spike
SPIKE_TARGET_END
