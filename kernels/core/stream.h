// The yardstick of benchmarks: how fast this machine reads memory right now.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/parallel.h"

namespace spike {

/// Reads `bytes` bytes once, on all threads; returns the sum of their 64-bit words.
uint64_t stream_read(const Parallel& parallel, const uint8_t* data, size_t bytes);

}  // namespace spike
