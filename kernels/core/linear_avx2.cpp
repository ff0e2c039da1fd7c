// The linear kernels for AVX2 (vpmaddubsw: unsigned weight codes x signed tokens).
#include "core/linear_kernels.h"
#include "core/target.h"
#include "core/short_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>

SPIKE_TARGET_BEGIN(SPIKE_AVX2)
#include "core/lines_avx2.h"
// after the lanes they are written over:
#include "core/tile_sources.h"
// after the sources:
#include "core/input_tile.h"
#include "core/linear_tile.h"
SPIKE_TARGET_END

namespace spike {
const LinearKernels kLinearAvx2 = {quantize_tokens<Avx2Lines>, dot_rows<Avx2Lines>,
                                   gate_values<Avx2Lines>, finish_products<Avx2Lines>};
}  // namespace spike
#endif
