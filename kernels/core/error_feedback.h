// Quantises a matrix so that its product with typical inputs changes least: GPTQ (arXiv 2210.17323)
// in the form of LDLQ (arXiv 2307.13304), over the grids of all block formats.
#pragma once

#include <cstdint>
#include <optional>

#include "core/format.h"
#include "core/parallel.h"
#include "core/quantize.h"

namespace spike {

/// x [n, k] -> rows [n, row_bytes] and errors [n, 3]; k a row_multiple of a block format.
///
/// errors: (w - q) H (w - q)^T of each row, by how it was quantised: as `quantize` does without and
/// with importances (the diagonal of H), and with feedback.
/// factor: R, upper triangular [k, k], zeros below, positive on its diagonal, with H = R R^T the
/// second moments of the inputs.
///
/// Column after column, a value is rounded after what the errors before it ask of it is added;
/// scales are chosen among neighbours by the error they leave, not by nearness to the weights. Then
/// scales and codes are refined by coordinate descent. Of each row, the bytes with the least of its
/// three errors are kept, the first of equals. The same bytes for any number of threads. Returns
/// the first value that cannot be stored, and then leaves `rows` unspecified.
std::optional<Unrepresentable> quantize_with_feedback(const Parallel& parallel, Format format,
                                                      const float* x, const float* factor,
                                                      int64_t n, int64_t k, uint8_t* rows,
                                                      float* errors);

}  // namespace spike
