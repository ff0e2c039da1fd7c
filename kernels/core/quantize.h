// fp32 rows <-> logical rows of a storage format.
#pragma once

#include <cstdint>
#include <optional>

#include "core/format.h"
#include "core/parallel.h"

namespace spike {

/// A value the format cannot hold: NaN, infinite, or too large for its fp16 scale.
struct Unrepresentable {
  int64_t row = 0;
  int64_t column = 0;
  float value = 0;
};

/// Largest magnitude that `quantize` accepts.
float largest_value(Format format);

/// x[n, k] -> rows[n, row_bytes]; k fits row_multiple. Scales are searched as llama.cpp does with the importance matrix `importance` [k] (finite, not negative) or, if that is null, without,
/// so that the bytes are those of its quantiser. The same for any number of threads and any CPU.
/// Returns the first value that cannot be stored, and then leaves `rows` unspecified.
std::optional<Unrepresentable> quantize(const Parallel& parallel, Format format, const float* x,
                                        int64_t n, int64_t k, const float* importance,
                                        uint8_t* rows);

/// rows[n, row_bytes] -> x[n, k], each value rounded to fp32 once per arithmetic step as GGUF's
/// reference does.
void dequantize(const Parallel& parallel, Format format, const uint8_t* rows, int64_t n, int64_t k,
                float* x);

}  // namespace spike
