#include "core/norm.h"

#include <algorithm>

#include "core/row_kernels.h"

namespace spike {

void rms_norm(const Parallel& parallel, const float* x, const float* w, int64_t rows, int64_t dim,
              float eps, float* y, const float* residual) {
  const auto row = row_kernels().rms_norm;
  const int64_t tasks =
      rows * dim < worth_sharing ? 1 : std::min<int64_t>(rows, 4 * parallel.threads);
  parallel(tasks, [&](int64_t task) {
    for (int64_t r = rows * task / tasks; r < rows * (task + 1) / tasks; ++r) {
      row(x + r * dim, w, dim, eps, y + r * dim);
      if (residual == nullptr) continue;
      for (int64_t i = r * dim; i < (r + 1) * dim; ++i) y[i] += residual[i];
    }
  });
}

}  // namespace spike
