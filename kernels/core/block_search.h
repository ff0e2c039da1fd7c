// Quantisers of up to 256 values; quantize.cpp runs them over matrices. Each fits the scales, then
// chooses the codes; block_codec.h reads the scales back and sets other codes.
#pragma once

#include "core/blocks.h"

namespace spike {

/// x [elements] -> the blocks they fill: one of a super-block format, else elements / 32. At most
/// 256 elements, a multiple of 32; those that a super-block lacks count as zeros without weight.
///
/// `weight` [elements]: of the squared error of each value (see weigh_errors); null: the format's
/// own choice, llama.cpp's without importance matrix.
void search_blocks(const float* x, const float* weight, int elements, BlockQ8_0* b);
void search_blocks(const float* x, const float* weight, int elements, BlockQ5_0* b);
void search_blocks(const float* x, const float* weight, int elements, BlockQ5_1* b);
void search_blocks(const float* x, const float* weight, int elements, BlockQ4_0* b);
void search_blocks(const float* x, const float* weight, int elements, BlockQ4_1* b);
void search_blocks(const float* x, const float* weight, int elements, BlockInt4Sym* b);
void search_blocks(const float* x, const float* weight, int elements, BlockQ2K* b);
void search_blocks(const float* x, const float* weight, int elements, BlockQ3K* b);
void search_blocks(const float* x, const float* weight, int elements, BlockQ4K* b);
void search_blocks(const float* x, const float* weight, int elements, BlockQ5K* b);
void search_blocks(const float* x, const float* weight, int elements, BlockQ6K* b);

}  // namespace spike
