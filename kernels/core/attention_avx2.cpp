// Attention, AVX2 tier.
#include <cmath>

#include "core/attention_kernel.h"
#include "core/half.h"
#include "core/target.h"

SPIKE_TARGET_BEGIN(SPIKE_AVX2)
#include "core/simd_avx2.h"

#include "core/attention_tile.h"

namespace spike {
SegmentKernel segment_kernel_avx2(KvFormat format) { return segment_kernel<Avx2>(format); }
}  // namespace spike
SPIKE_TARGET_END
