// The Python face of the kernels: quantisation, tests and benchmarks. No logic of its own.
#include <nanobind/nanobind.h>

#include "core/cpu.h"

namespace nb = nanobind;

NB_MODULE(_kernels, m) {
  m.def("cpu_tier", [] { return spike::tier_name(spike::cpu_tier()); },
        "Instruction-set tier in use: scalar, avx2 or avx512.");
}
