// Per-tier kernels on single rows, for norm.cpp and rope.cpp, and peak.cpp's yardstick.
#pragma once

#include <cstdint>

namespace spike {

/// The kernels of one tier; see row_tile.h for what each does.
struct RowKernels {
  void (*rms_norm)(const float* x, const float* w, int64_t dim, float eps, float* y);
  void (*rope_half)(const float* x, const float* cos, const float* sin, int64_t width, float* y);
  int64_t (*fma_burst)(int64_t rounds, float& sink);
};

/// The kernels of this CPU's tier.
const RowKernels& row_kernels();

RowKernels row_kernels_scalar();
RowKernels row_kernels_avx2();
RowKernels row_kernels_avx512();

/// Elements from which sharing the work between threads pays for waking them.
inline constexpr int64_t worth_sharing = 1 << 15;

}  // namespace spike
