#include "core/peak.h"

#include <atomic>

#include "core/row_kernels.h"

namespace spike {

int64_t fma_burst(const Parallel& parallel, int64_t rounds) {
  std::atomic<int64_t> operations{0};
  parallel(parallel.threads, [&](int64_t) {
    float sink = 0.0f;
    operations += row_kernels().fma_burst(rounds, sink);
    volatile float keep = sink;
    static_cast<void>(keep);
  });
  return operations;
}

}  // namespace spike
