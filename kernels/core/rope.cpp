#include "core/rope.h"

#include <algorithm>

#include "core/row_kernels.h"

namespace spike {
namespace {

void rope_interleaved_row(const float* x, const float* cos, const float* sin, int64_t width,
                          float* y) {
  for (int64_t i = 0; i < width; i += 2) {
    const float a = x[i], b = x[i + 1];
    y[i] = a * cos[i] - b * sin[i];
    y[i + 1] = b * cos[i + 1] + a * sin[i + 1];
  }
}

}  // namespace

std::optional<RopeStyle> parse_rope_style(std::string_view name) {
  if (name == "half") return RopeStyle::half;
  if (name == "interleaved") return RopeStyle::interleaved;
  return std::nullopt;
}

void rope(const Parallel& parallel, RopeStyle style, const RopeShape& shape, const float* x,
          const float* cos, const float* sin, float* y) {
  const auto row = style == RopeStyle::half ? row_kernels().rope_half : rope_interleaved_row;
  const int64_t elements = shape.tokens * shape.heads * shape.dim;
  const int64_t tasks =
      elements < worth_sharing ? 1 : std::min<int64_t>(shape.tokens, 4 * parallel.threads);
  parallel(tasks, [&](int64_t task) {
    for (int64_t t = shape.tokens * task / tasks; t < shape.tokens * (task + 1) / tasks; ++t) {
      const int64_t angle = t % shape.angles * shape.width;
      for (int64_t h = 0; h < shape.heads; ++h) {
        const int64_t at = (t * shape.heads + h) * shape.dim;
        row(x + at, cos + angle, sin + angle, shape.width, y + at);
        if (x != y) std::copy(x + at + shape.width, x + at + shape.dim, y + at + shape.width);
      }
    }
  });
}

}  // namespace spike
