// The other yardstick of benchmarks: how fast this machine multiplies and adds fp32 right now.
#pragma once

#include <cstdint>

#include "core/parallel.h"

namespace spike {

/// Does fp32 multiply-adds in registers on all threads; returns how many operations (two each).
int64_t fma_burst(const Parallel& parallel, int64_t rounds);

}  // namespace spike
