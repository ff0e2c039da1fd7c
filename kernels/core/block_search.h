// Quantisers of one block; quantize.cpp runs them over matrices.
#pragma once

#include "core/blocks.h"

namespace spike {

void quantize_block(const float* x, BlockQ8_0& b);
void quantize_block(const float* x, BlockQ5_0& b);
void quantize_block(const float* x, BlockQ4K& b);
void quantize_block(const float* x, BlockQ6K& b);

}  // namespace spike
