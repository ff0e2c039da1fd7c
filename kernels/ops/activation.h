// Names of activations, as attributes give them.
#pragma once

#include <string>

#include "core/linear.h"
#include "ops/op.h"

namespace spike::ops {

/// "silu" -> Activation::silu; fails for an unknown name.
inline Activation read_activation(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "gelu_erf") return Activation::gelu_erf;
  if (name == "gelu_quick") return Activation::gelu_quick;
  if (name == "relu") return Activation::relu;
  if (name == "relu2") return Activation::relu2;
  throw Failure("unknown activation '" + name +
                "' (silu, gelu_tanh, gelu_erf, gelu_quick, relu or relu2)");
}

}  // namespace spike::ops
