// The links of a chain as its attribute gives them: a line each, in the order they run, and a last
// line with the values that leave the chain.
//
//   %3 %4 %5 = Qkv %0 @4096:u8[1327104] @... @... - - - @8192:f32[576] k=576 q_format=q4_k ...
//   return %7
//
// %i is a value: the chain's input i, or what a link makes. @offset:type[dims] is a constant in the
// chain's weights, - an input that is left out.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ops/tensor.h"

namespace spike::ops {

/// An input of a link. The tensor's data is null as yet.
struct Operand {
  enum class Kind { missing, value, stored } kind = Kind::missing;
  size_t value = 0;   ///< its number
  size_t offset = 0;  ///< stored: bytes into the weights
  Tensor tensor;      ///< stored: type and dims
};

struct LinkText {
  std::string op;
  std::vector<Operand> inputs;
  std::vector<size_t> outputs;
  std::map<std::string, std::string, std::less<>> attributes;
};

struct ChainText {
  std::vector<LinkText> links;
  std::vector<size_t> outputs;
};

/// Fails with the word that can't be read.
ChainText read_chain(std::string_view text);

}  // namespace spike::ops
