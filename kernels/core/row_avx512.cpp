// Row kernels, AVX512 tier.
#include <cmath>
#include <cstdint>

#include "core/row_kernels.h"
#include "core/target.h"

SPIKE_TARGET_BEGIN(SPIKE_AVX512)
#include "core/simd_avx512.h"

#include "core/row_tile.h"

namespace spike {
RowKernels row_kernels_avx512() { return make_row_kernels<Avx512>(); }
}  // namespace spike
SPIKE_TARGET_END
