// Rotary position embedding.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/parallel.h"

namespace spike {

/// Which elements are rotated together: i and i + width / 2, or 2i and 2i + 1.
enum class RopeStyle { half, interleaved };

/// "half" -> RopeStyle::half; nothing for an unknown name.
std::optional<RopeStyle> parse_rope_style(std::string_view name);

struct RopeShape {
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t dim = 0;     ///< elements of one head
  int64_t width = 0;   ///< the first `width` of them are rotated (even), the rest is copied
  int64_t angles = 1;  ///< rows of cos and sin; token t uses row t mod angles
};

/// y = x * cos + turned(x) * sin, turned = (-second, first) of each pair.
/// x, y: [tokens, heads, dim]; cos, sin: [angles, width]. y may be the same memory as x.
void rope(const Parallel& parallel, RopeStyle style, const RopeShape& shape, const float* x,
          const float* cos, const float* sin, float* y);

}  // namespace spike
