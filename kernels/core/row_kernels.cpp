// Row kernels, scalar tier, and the choice of tier.
#include "core/row_kernels.h"

#include <cmath>

#include "core/cpu.h"
#include "core/simd_scalar.h"

#include "core/row_tile.h"

namespace spike {

RowKernels row_kernels_scalar() { return make_row_kernels<Scalar>(); }

const RowKernels& row_kernels() {
  static const RowKernels kernels = [] {
    switch (cpu_tier()) {
      case CpuTier::avx512_bf16:
      case CpuTier::avx512: return row_kernels_avx512();
      case CpuTier::avx2: return row_kernels_avx2();
      default: return row_kernels_scalar();
    }
  }();
  return kernels;
}

}  // namespace spike
