// Attention, AVX512_BF16 tier: products of bf16, sums in fp32.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/attention_kernel.h"
#include "core/half.h"
#include "core/target.h"

SPIKE_TARGET_BEGIN(SPIKE_AVX512_BF16)
#include "core/simd_avx512.h"
// after the lanes that it extends:
#include "core/simd_avx512_bf16.h"

#include "core/attention_tile.h"

namespace spike {
AttentionKernels attention_kernels_avx512_bf16(KvFormat format) {
  switch (format) {
    case KvFormat::f32: return attention_kernels_avx512(format);  // who keeps fp32 wants it
    case KvFormat::f16: return kernels_for<Avx512Bf16, KvFormat::f16>();
    case KvFormat::int8: return kernels_for<Avx512Bf16, KvFormat::int8>();
    default: return kernels_for<Avx512Bf16, KvFormat::int4>();
  }
}
}  // namespace spike
SPIKE_TARGET_END
