// Which instruction sets the kernels may use on this machine.
#pragma once

namespace spike {

/// Instruction-set tiers, lowest first: a kernel picks the best tier it has.
enum class CpuTier { scalar = 0, avx2 = 1, avx512 = 2 };

/// Best tier of this CPU, lowered by the environment variable SPIKE_CPU=scalar|avx2|avx512.
CpuTier cpu_tier();

/// Name of a tier as SPIKE_CPU spells it.
const char* tier_name(CpuTier tier);

}  // namespace spike
