// The linear kernels for AVX-512 with VNNI (vpdpbusd: unsigned weight codes x signed tokens).
#include "core/linear_kernels.h"
#include "core/target.h"
#include "core/short_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>

SPIKE_TARGET_BEGIN(SPIKE_AVX512)
#include "core/lines_avx512.h"
// after the lanes they are written over:
#include "core/tile_sources.h"
// after the sources:
#include "core/input_tile.h"
#include "core/linear_tile.h"
SPIKE_TARGET_END

namespace spike {
const LinearKernels kLinearAvx512 = {quantize_tokens<Avx512Lines>, dot_rows<Avx512Lines>,
                                     gate_values<Avx512Lines>, finish_products<Avx512Lines>};
}  // namespace spike
#endif
