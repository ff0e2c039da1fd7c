// Row kernels, AVX2 tier.
#include <cmath>
#include <cstdint>

#include "core/row_kernels.h"
#include "core/target.h"

SPIKE_TARGET_BEGIN(SPIKE_AVX2)
#include "core/simd_avx2.h"

#include "core/row_tile.h"

namespace spike {
RowKernels row_kernels_avx2() { return make_row_kernels<Avx2>(); }
}  // namespace spike
SPIKE_TARGET_END
