// Encoding of keys and values, AVX2 tier.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "core/kv_encoders.h"
#include "core/target.h"

SPIKE_TARGET_BEGIN(SPIKE_AVX2)
#include "core/simd_avx2.h"

#include "core/kv_encode_tile.h"

namespace spike {
KvEncoders kv_encoders_avx2() { return kv_encoders<Avx2>(); }
}  // namespace spike
SPIKE_TARGET_END
