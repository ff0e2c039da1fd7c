// What an op of ours is written with: a declaration, a kernel's attributes and weights, and the
// tensors of one call. Each op is one short file (see rms_norm.cpp for the smallest).
//
// Errors are Failure exceptions inside and OrtStatus outside; none crosses the C ABI, also not from
// another thread.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/linear.h"
#include "core/parallel.h"
#include "ops/op_clock.h"
#include "ops/ort_api.h"

namespace spike::ops {

/// A problem with a model or its inputs; the message becomes the session's error.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws the status' message, if it is an error.
void check(const OrtApi& api, OrtStatus* status);

struct Port {
  OrtElementType type = ORT_F32;
  OrtPortKind kind = ORT_REQUIRED;
};

/// An output that is the same memory as an input.
struct Alias {
  int input = 0;
  int output = 0;
};

struct Declaration {
  const char* name = nullptr;
  std::vector<Port> inputs;
  std::vector<Port> outputs;
  std::vector<Alias> aliases = {};
};

/// Attributes and constant inputs of one node, readable while its kernel is made.
class Info {
 public:
  Info(const OrtApi& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  std::string text(const char* name) const;
  std::string text(const char* name, const char* otherwise) const;
  int64_t integer(const char* name) const;
  int64_t integer(const char* name, int64_t otherwise) const;
  float number(const char* name) const;
  float number(const char* name, float otherwise) const;
  std::string node_name() const;

  /// The packed weight matrix at an input: ONNX Runtime's own (mapped) memory, not a copy.
  Matrix weight(size_t input, const std::string& format, int64_t n, int64_t k,
                int64_t stacked = 1) const;

 private:
  const OrtApi& api_;
  const OrtKernelInfo* info_;
};

/// An input tensor.
struct Tensor {
  static constexpr size_t max_rank = 8;
  const void* data = nullptr;
  OrtElementType type = ORT_ANY;
  size_t rank = 0;
  int64_t dims[max_rank] = {};

  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
  std::span<const int64_t> shape() const { return {dims, rank}; }
  int64_t elements() const;
  /// Product of all dims but the last `dropped`; fails if there are fewer than those.
  int64_t rows(size_t dropped, const char* name) const;
  /// Fails unless the dims are these (-1: any).
  void require(std::initializer_list<int64_t> wanted, const char* name) const;
  std::string shape_text() const;
};

/// One call of a kernel.
class Context {
 public:
  Context(const OrtApi& api, OrtKernelContext* context);

  /// Whether an optional input is there.
  bool given(size_t index) const { return value(index) != nullptr; }
  Tensor input(size_t index) const;
  /// Data of an optional fp32 input, or null; fails unless its dims are `wanted`.
  const float* optional(size_t index, std::span<const int64_t> wanted, const char* name) const;
  void* output(size_t index, std::span<const int64_t> dims) const;
  /// The same, with the last dim of `like` replaced.
  float* output_like(size_t index, const Tensor& like, int64_t last) const;
  /// ONNX Runtime's threads, for the length of this call.
  Parallel parallel();

 private:
  const OrtValue* value(size_t index) const;
  static void run(void* self, int64_t tasks, void (*task)(void*, int64_t), void* arg);

  const OrtApi& api_;
  OrtKernelContext* context_;
  size_t inputs_ = 0;
};

/// OrtStatus with the message of the exception in flight, after the op's and the node's name.
OrtStatus* failure_status(const OrtApi& api, const char* op, const std::string& node) noexcept;

/// The ABI's view of an op. K has `static Declaration declare()`, a constructor from Info and
/// `void compute(Context&) const`.
template <class K>
class CustomOp {
 public:
  static const OrtCustomOp* get() {
    static const OrtCustomOp op = make();
    return &op;
  }

 private:
  struct Instance {
    const OrtApi& api;
    std::string node;
    K kernel;
  };

  static const Declaration& declaration() {
    static const Declaration instance = K::declare();
    return instance;
  }

  static OpClock& clock() {
    static OpClock instance(declaration().name);
    return instance;
  }

  static OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info,
                           void** kernel) noexcept {
    std::string node;
    try {
      const Info reader(*api, info);
      node = reader.node_name();
      *kernel = new Instance{*api, node, K(reader)};
      return nullptr;
    } catch (...) {
      return failure_status(*api, declaration().name, node);
    }
  }

  static OrtStatus* compute(void* kernel, OrtKernelContext* raw) noexcept {
    const OpClock::Span span(clock());
    auto* instance = static_cast<Instance*>(kernel);
    try {
      Context context(instance->api, raw);
      instance->kernel.compute(context);
      return nullptr;
    } catch (...) {
      return failure_status(instance->api, declaration().name, instance->node);
    }
  }

  static size_t alias_map(int** inputs, int** outputs) {
    const auto& aliases = declaration().aliases;
    *inputs = new int[aliases.size()];
    *outputs = new int[aliases.size()];
    for (size_t i = 0; i < aliases.size(); ++i)
      (*inputs)[i] = aliases[i].input, (*outputs)[i] = aliases[i].output;
    return aliases.size();
  }

  static OrtCustomOp make() {
    clock();  // joins the list while one thread registers the ops
    OrtCustomOp op{};
    op.version = 18;
    op.GetName = [](const OrtCustomOp*) { return declaration().name; };
    op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    op.GetInputTypeCount = [](const OrtCustomOp*) { return declaration().inputs.size(); };
    op.GetInputType = [](const OrtCustomOp*, size_t i) { return declaration().inputs[i].type; };
    op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
      return declaration().inputs[i].kind;
    };
    op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return ORT_MEMORY_DEFAULT; };
    op.GetOutputTypeCount = [](const OrtCustomOp*) { return declaration().outputs.size(); };
    op.GetOutputType = [](const OrtCustomOp*, size_t i) { return declaration().outputs[i].type; };
    op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) {
      return declaration().outputs[i].kind;
    };
    op.CreateKernelV2 = create;
    op.KernelComputeV2 = compute;
    op.KernelDestroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
    op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
    if (!declaration().aliases.empty()) {
      op.GetAliasMap = alias_map;
      op.ReleaseAliasMap = [](int* inputs, int* outputs) { delete[] inputs, delete[] outputs; };
    }
    return op;
  }
};

}  // namespace spike::ops
