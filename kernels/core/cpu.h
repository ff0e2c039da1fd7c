// Which instruction sets the kernels may use on this machine.
#pragma once

#include <functional>
#include <span>
#include <string_view>

namespace spike {

/// Instruction-set tiers, lowest first: a kernel picks the best tier it has.
enum class CpuTier { scalar = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

/// A feature, as /proc/cpuinfo spells it, and the lowest tier that needs it.
struct CpuFeature {
  std::string_view name;
  CpuTier tier;
  bool present;  ///< on this CPU, and its system saves the registers
};

/// Every feature that a tier needs, lowest tier first.
std::span<const CpuFeature> cpu_features();

/// The best tier of a CPU that has those of cpu_features() for which `has` holds: a missing feature
/// costs its tier and those above.
CpuTier best_tier(const std::function<bool(const CpuFeature&)>& has);

/// The tier that the environment variable SPIKE_CPU names, or the best one that this CPU has if it
/// has less; without the variable at most avx512. std::invalid_argument for another value.
CpuTier cpu_tier();

/// Name of a tier as SPIKE_CPU spells it.
const char* tier_name(CpuTier tier);

}  // namespace spike
