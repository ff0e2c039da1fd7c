// What an op of ours is written with: a declaration, a kernel's attributes and weights, and the
// tensors of one call. Each op is one short file (see rms_norm.cpp for the smallest).
//
// ONNX Runtime sees none of them by itself, only chains of them (chain_run.cpp). Errors are Failure
// exceptions inside and OrtStatus outside; none crosses the C ABI, also not from another thread.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/linear.h"
#include "core/parallel.h"
#include "ops/link_text.h"
#include "ops/op_clock.h"
#include "ops/ort_api.h"
#include "ops/tensor.h"

namespace spike::ops {

struct Port {
  OrtElementType type = ORT_F32;
  bool optional = false;
};

inline constexpr bool OPTIONAL = true;

struct Declaration {
  const char* name = nullptr;
  std::vector<Port> inputs;
  std::vector<OrtElementType> outputs;
};

/// Attributes and constant inputs of one link, readable while its kernel is made.
class Info {
 public:
  /// `constants`: per input its tensor, without data where it isn't constant.
  Info(const LinkText& link, std::span<const Tensor> constants)
      : link_(link), constants_(constants) {}

  std::string text(const char* name) const;
  std::string text(const char* name, const char* otherwise) const;
  int64_t integer(const char* name) const;
  int64_t integer(const char* name, int64_t otherwise) const;
  float number(const char* name) const;
  float number(const char* name, float otherwise) const;

  /// The packed weight matrix at an input: ONNX Runtime's own (mapped) memory, not a copy.
  Matrix weight(size_t input, const std::string& format, int64_t n, int64_t k,
                int64_t stacked = 1) const;

 private:
  const LinkText& link_;
  std::span<const Tensor> constants_;
};

/// Where a link's results lie; see chain_run.cpp.
class Results {
 public:
  virtual void* open(size_t value, std::span<const int64_t> dims, OrtElementType type) = 0;

 protected:
  ~Results() = default;
};

/// One call of a link's kernel.
class Context {
 public:
  /// `inputs`: null where one is left out; `outputs`: numbers of values.
  Context(std::span<const Tensor* const> inputs, const Declaration& declaration,
          std::span<const size_t> outputs, Results& results, const Parallel& parallel)
      : inputs_(inputs),
        declaration_(declaration),
        outputs_(outputs),
        results_(results),
        parallel_(parallel) {}

  /// Whether an optional input is there.
  bool given(size_t index) const { return index < inputs_.size() && inputs_[index] != nullptr; }
  const Tensor& input(size_t index) const;
  /// Data of an optional fp32 input, or null; fails unless its dims are `wanted`.
  const float* optional(size_t index, std::span<const int64_t> wanted, const char* name) const;
  void* output(size_t index, std::span<const int64_t> dims) const;
  /// The same, with the last dim of `like` replaced.
  float* output_like(size_t index, const Tensor& like, int64_t last) const;
  /// The chain's threads.
  const Parallel& parallel() const { return parallel_; }

 private:
  std::span<const Tensor* const> inputs_;
  const Declaration& declaration_;
  std::span<const size_t> outputs_;
  Results& results_;
  const Parallel& parallel_;
};

/// What an op does with one link's attributes and weights.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void compute(Context& context) const = 0;
};

/// A kind of link.
struct Op {
  Declaration declaration;
  std::unique_ptr<Kernel> (*make)(const Info& info) = nullptr;
  std::unique_ptr<OpClock> clock;
};

/// The op that K is: `static Declaration declare()`, a constructor from Info, a compute of Kernel.
template <class K>
const Op& op_of() {
  static const Op op = [] {
    Declaration declaration = K::declare();
    auto clock = std::make_unique<OpClock>(declaration.name);
    auto make = [](const Info& info) -> std::unique_ptr<Kernel> {
      return std::make_unique<K>(info);
    };
    return Op{std::move(declaration), make, std::move(clock)};
  }();
  return op;
}

}  // namespace spike::ops
