// Route(logits f32[..., E], correction? f32[E]) -> weights f32[..., k], ids i64[..., k];
// attributes experts, k, scores, groups, best_groups, per_group, softmax_chosen, normalise, eps,
// floor, scale.
#include "core/route.h"

#include "ops/op.h"
#include "ops/ops.h"

namespace spike::ops {
namespace {

Scores read_scores(const std::string& name) {
  if (name == "softmax") return Scores::softmax;
  if (name == "sigmoid") return Scores::sigmoid;
  if (name == "none") return Scores::none;
  throw Failure("unknown scores '" + name + "' (softmax, sigmoid or none)");
}

struct Route final : Kernel {
  static Declaration declare() {
    return {"Route", {{ORT_F32}, {ORT_F32, OPTIONAL}}, {ORT_F32, ORT_I64}};
  }

  explicit Route(const Info& info) : experts(info.integer("experts")) {
    routing.scores = read_scores(info.text("scores"));
    routing.top = info.integer("k");
    routing.groups = info.integer("groups", 1);
    routing.best_groups = info.integer("best_groups", 1);
    routing.per_group = info.integer("per_group", 1);
    routing.softmax_chosen = info.integer("softmax_chosen", 0) != 0;
    routing.normalise = info.integer("normalise", 0) != 0;
    routing.eps = info.number("eps", 0.0f);
    routing.floor = info.number("floor", 0.0f);
    routing.scale = info.number("scale", 1.0f);
    check();
  }

  void check() const {
    const auto& [scores, top, groups, best, per_group, s, n, eps, floor, scale] = routing;
    if (experts < 1 || top < 1 || top > experts)
      throw Failure("can't choose " + std::to_string(top) + " of " + std::to_string(experts) +
                    " experts");
    if (groups < 1 || experts % groups != 0 || best < 1 || best > groups || per_group < 1 ||
        per_group > experts / groups)
      throw Failure(std::to_string(experts) + " experts have no " + std::to_string(groups) +
                    " equal groups to choose " + std::to_string(best) + " of by their " +
                    std::to_string(per_group) + " largest");
  }

  void compute(Context& context) const override {
    const Tensor logits = context.input(0);
    const int64_t tokens = logits.rows(1, "logits");
    if (logits.dims[logits.rank - 1] != experts)
      throw Failure("logits have shape " + logits.shape_text() + ", their last dim should be " +
                    std::to_string(experts));
    const float* correction = context.optional(1, std::span(&experts, 1), "correction");
    Tensor chosen = logits;
    chosen.dims[chosen.rank - 1] = routing.top;
    auto* weights = static_cast<float*>(context.output(0, chosen.shape()));
    auto* ids = static_cast<int64_t*>(context.output(1, chosen.shape()));
    route(context.parallel(), routing, logits.as<float>(), tokens, experts, correction, weights,
          ids);
  }

  int64_t experts;
  Routing routing;
};

}  // namespace

const Op& route_op() { return op_of<Route>(); }

}  // namespace spike::ops
