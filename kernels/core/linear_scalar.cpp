// The linear kernels in plain C++.
#include "core/linear_kernels.h"
#include "core/lines_scalar.h"
#include "core/short_tile.h"

#include "core/tile_sources.h"

#include "core/input_tile.h"
#include "core/linear_tile.h"

namespace spike {

const LinearKernels kLinearScalar = {quantize_tokens<ScalarLines>, dot_rows<ScalarLines>,
                                     gate_values<ScalarLines>, finish_products<ScalarLines>};

}  // namespace spike
