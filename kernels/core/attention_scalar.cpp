// Attention, scalar tier.
#include <cmath>

#include "core/attention_kernel.h"
#include "core/half.h"
#include "core/simd_scalar.h"

#include "core/attention_tile.h"

namespace spike {
SegmentKernel segment_kernel_scalar(KvFormat format) { return segment_kernel<Scalar>(format); }
}  // namespace spike
