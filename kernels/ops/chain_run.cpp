// Chain(weights u8?, any...) -> any...; attribute links (link_text.h).
//
// ONNX Runtime is asked once for its threads, for all links (core/team.h). What one link makes for
// another lies in memory that the calling thread keeps from run to run, whatever chain it runs; an
// output of the node is written where ONNX Runtime wants it.
#include <array>
#include <exception>
#include <thread>

#include "core/linear_input.h"
#include "core/team.h"
#include "ops/chain.h"
#include "ops/ops.h"
#include "ops/ort_values.h"

namespace spike::ops {
namespace {

int thread_count() {
  static const int count = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return count;
}

struct Node {
  const OrtApi& api;
  Chain chain;
};

/// One run of a chain, on the thread that ONNX Runtime called.
class Run final : Results {
 public:
  Run(const Node& node, OrtKernelContext* context)
      : api_(node.api), chain_(node.chain), context_(context), values_(chain_.places().size()) {
    size_t given = 0;
    check(api_, api_.KernelContext_GetInputCount(context_, &given));
    if (given < chain_.inputs())
      throw Failure("the node has " + std::to_string(given) + " inputs of " +
                    std::to_string(chain_.inputs()));
    for (size_t i = 0; i < chain_.inputs(); ++i) {
      const OrtValue* value = nullptr;
      check(api_, api_.KernelContext_GetInput(context_, i, &value));
      values_[i] = read_value(api_, value);
    }
  }

  /// All links; `at` follows.
  void links(const Parallel& parallel, size_t& at) {
    for (at = 0; at < chain_.links().size(); ++at) link(chain_.links()[at], parallel);
  }

 private:
  static constexpr size_t most_inputs = 16;

  void link(const Link& link, const Parallel& parallel) {
    const OpClock::Span span(*link.op->clock);
    const std::vector<Port>& ports = link.op->declaration.inputs;
    std::array<const Tensor*, most_inputs> inputs{};
    for (size_t i = 0; i < link.inputs.size(); ++i) {
      const Operand& operand = link.inputs[i];
      if (operand.kind == Operand::Kind::missing) continue;
      inputs[i] = operand.kind == Operand::Kind::stored ? &operand.tensor : &values_[operand.value];
      if (ports[i].type != ORT_ANY && ports[i].type != inputs[i]->type)
        throw Failure("input " + std::to_string(i) + " is " + type_text(inputs[i]->type) +
                      ", should be " + type_text(ports[i].type));
    }
    Context context({inputs.data(), link.inputs.size()}, link.op->declaration, link.outputs, *this,
                    parallel);
    link.kernel->compute(context);
  }

  void* open(size_t value, std::span<const int64_t> dims, OrtElementType type) override {
    static thread_local std::vector<Scratch> slots;
    Tensor& tensor = values_[value];
    tensor.type = type;
    tensor.rank = dims.size();
    std::copy(dims.begin(), dims.end(), tensor.dims);
    void* data = nullptr;
    const Place place = chain_.places()[value];
    if (place.output != Place::none) {
      OrtValue* output = nullptr;
      check(api_, api_.KernelContext_GetOutput(context_, place.output, dims.data(), dims.size(),
                                               &output));
      check(api_, api_.GetTensorMutableData(output, &data));
    } else {
      if (slots.size() <= place.slot) slots.resize(place.slot + 1);
      data = slots[place.slot].reserve(static_cast<size_t>(tensor.elements()) *
                                       element_bytes(type));
    }
    tensor.data = data;
    return data;
  }

  const OrtApi& api_;
  const Chain& chain_;
  OrtKernelContext* context_;
  std::vector<Tensor> values_;  // by number
};

/// What ONNX Runtime's threads have in common during a run.
struct Gathering {
  Team team;
  Run& run;
  const std::thread::id leader = std::this_thread::get_id();
  size_t at = 0;
  bool started = false;
  std::exception_ptr error = nullptr;

  /// Called often enough for every thread of the pool. Whoever helps does so to the end, so that the
  /// caller is left at least one of the calls.
  static void join(void* self, size_t) noexcept {
    auto* gathering = static_cast<Gathering*>(self);
    if (std::this_thread::get_id() != gathering->leader) return gathering->team.help();
    if (!gathering->started) gathering->lead();
  }

  void lead() noexcept {
    started = true;
    try {
      run.links(team.parallel(thread_count()), at);
    } catch (...) {
      error = std::current_exception();
    }
    team.dismiss();
  }
};

constexpr size_t most_threads = 1024;

OrtStatus* compute(void* kernel, OrtKernelContext* context) noexcept {
  const auto& node = *static_cast<const Node*>(kernel);
  size_t at = 0;
  try {
    Run run(node, context);
    Gathering gathering{{}, run};
    check(node.api, node.api.KernelContext_ParallelFor(context, Gathering::join, most_threads, 0,
                                                       &gathering));
    at = gathering.at;
    if (gathering.error) std::rethrow_exception(gathering.error);
    return nullptr;
  } catch (...) {
    return failure_status(node.api, node.chain.name_of(at));
  }
}

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info,
                  void** kernel) noexcept {
  try {
    *kernel = new Node{*api, Chain(*api, info)};
    return nullptr;
  } catch (...) {
    return failure_status(*api, "spike.Chain");
  }
}

OrtCustomOp make() {
  all_ops();  // their clocks join the list while one thread registers
  OrtCustomOp op{};
  op.version = 18;
  op.GetName = [](const OrtCustomOp*) { return "Chain"; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  op.GetInputType = [](const OrtCustomOp*, size_t) { return ORT_ANY; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return ORT_VARIADIC; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return ORT_MEMORY_DEFAULT; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) { return ORT_ANY; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return ORT_VARIADIC; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  return op;
}

}  // namespace

std::span<const Op* const> all_ops() {
  static const Op* const ops[] = {
      &linear_op(),   &embedding_op(), &gated_mlp_op(), &qkv_op(),  &moe_op(),   &route_op(),
      &rms_norm_op(), &rope_op(),      &attention_op(), &head_op(), &choose_op()};
  return ops;
}

const OrtCustomOp* chain_op() {
  static const OrtCustomOp op = make();
  return &op;
}

}  // namespace spike::ops
