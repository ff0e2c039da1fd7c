// The attribute `style` of ops that rotate.
#pragma once

#include <string>

#include "core/rope.h"
#include "ops/op.h"

namespace spike::ops {

/// Fails for an unknown name.
inline RopeStyle read_style(const std::string& name) {
  if (const auto style = parse_rope_style(name)) return *style;
  throw Failure("unknown style '" + name + "' (half or interleaved)");
}

}  // namespace spike::ops
