#include "core/cpu.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace spike {
namespace {

CpuTier detect() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  return avx512 ? CpuTier::avx512 : avx2 ? CpuTier::avx2 : CpuTier::scalar;
}

CpuTier limited(CpuTier best) {
  const char* wish = std::getenv("SPIKE_CPU");
  if (wish == nullptr) return best;
  for (CpuTier t : {CpuTier::scalar, CpuTier::avx2, CpuTier::avx512})
    if (std::strcmp(wish, tier_name(t)) == 0) return t < best ? t : best;
  return best;
}

}  // namespace

CpuTier cpu_tier() {
  static const CpuTier tier = limited(detect());
  return tier;
}

const char* tier_name(CpuTier tier) {
  switch (tier) {
    case CpuTier::avx512: return "avx512";
    case CpuTier::avx2: return "avx2";
    default: return "scalar";
  }
}

}  // namespace spike
