// The yardsticks of benchmarks: how fast this machine reads memory and multiplies int8 right now.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/parallel.h"

namespace spike {

/// Reads `bytes` bytes once, on all threads; returns the sum of their 64-bit words.
uint64_t stream_read(const Parallel& parallel, const uint8_t* data, size_t bytes);

/// Multiplies int8 in registers with VNNI, `rounds` times on each thread; returns how many
/// operations that were (two per multiply-add), or 0 if the tier in use has no VNNI.
int64_t vnni_run(const Parallel& parallel, int64_t rounds);

}  // namespace spike
