#include "core/cpu.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace spike {
namespace {

constexpr CpuTier kTiers[] = {CpuTier::scalar, CpuTier::avx2, CpuTier::avx512, CpuTier::avx512_bf16};

/// What SPIKE_CPU asks for, as far as there is that; without a wish the best tier with float32
/// attention: products of bf16 pairs are faster, and cost more than the golden gate allows 16-bit
/// weights.
CpuTier limited(CpuTier best) {
  const char* wish = std::getenv("SPIKE_CPU");
  if (wish == nullptr || *wish == '\0') return std::min(best, CpuTier::avx512);
  for (CpuTier tier : kTiers)
    if (std::string_view(wish) == tier_name(tier)) return std::min(tier, best);
  throw std::invalid_argument("the environment variable SPIKE_CPU is '" + std::string(wish) +
                              "', not scalar, avx2, avx512 or avx512_bf16");
}

}  // namespace

std::span<const CpuFeature> cpu_features() {
#if defined(__x86_64__)
  // __builtin_cpu_supports wants literals; target.h compiles for the same sets.
  static const CpuFeature features[] = {
      {"avx2", CpuTier::avx2, __builtin_cpu_supports("avx2") != 0},
      {"fma", CpuTier::avx2, __builtin_cpu_supports("fma") != 0},
      {"f16c", CpuTier::avx2, __builtin_cpu_supports("f16c") != 0},
      {"avx512f", CpuTier::avx512, __builtin_cpu_supports("avx512f") != 0},
      {"avx512bw", CpuTier::avx512, __builtin_cpu_supports("avx512bw") != 0},
      {"avx512vl", CpuTier::avx512, __builtin_cpu_supports("avx512vl") != 0},
      {"avx512dq", CpuTier::avx512, __builtin_cpu_supports("avx512dq") != 0},
      {"avx512_vnni", CpuTier::avx512, __builtin_cpu_supports("avx512vnni") != 0},
      {"avx512_bf16", CpuTier::avx512_bf16, __builtin_cpu_supports("avx512bf16") != 0},
  };
  return features;
#else
  return {};
#endif
}

CpuTier best_tier(const std::function<bool(const CpuFeature&)>& has) {
  CpuTier best = cpu_features().empty() ? CpuTier::scalar : CpuTier::avx512_bf16;
  for (const CpuFeature& feature : cpu_features())
    if (feature.tier <= best && !has(feature))
      best = static_cast<CpuTier>(static_cast<int>(feature.tier) - 1);
  return best;
}

CpuTier cpu_tier() {
  static const CpuTier tier = limited(best_tier([](const CpuFeature& f) { return f.present; }));
  return tier;
}

const char* tier_name(CpuTier tier) {
  switch (tier) {
    case CpuTier::avx512_bf16: return "avx512_bf16";
    case CpuTier::avx512: return "avx512";
    case CpuTier::avx2: return "avx2";
    default: return "scalar";
  }
}

}  // namespace spike
