// MoE(x f32[..., K], weights f32[..., top], ids i64[..., top], gate u8, up u8, down u8,
//     gate_bias? f32[E, M], up_bias? f32[E, M], down_bias? f32[E, N]) -> f32[..., N];
// attributes activation, limit, alpha, gate_format, up_format, down_format, experts, k, m, n.
#include "core/moe.h"

#include <algorithm>

#include "ops/activation.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace spike::ops {
namespace {

struct Moe final : Kernel {
  static Declaration declare() {
    return {"MoE",
            {{ORT_F32}, {ORT_F32}, {ORT_ANY}, {ORT_U8}, {ORT_U8}, {ORT_U8},
             {ORT_F32, OPTIONAL}, {ORT_F32, OPTIONAL}, {ORT_F32, OPTIONAL}},
            {ORT_F32}};
  }

  explicit Moe(const Info& info) : count(info.integer("experts")) {
    const int64_t k = info.integer("k"), m = info.integer("m"), n = info.integer("n");
    experts.activation = read_activation(info.text("activation"));
    experts.limit = info.number("limit", 0.0f);
    experts.alpha = info.number("alpha", 1.0f);
    if (experts.limit < 0.0f || experts.alpha <= 0.0f)
      throw Failure("limit must not be negative, and alpha must be positive");
    experts.gate = info.weight(3, info.text("gate_format"), m, k, count);
    experts.up = info.weight(4, info.text("up_format"), m, k, count);
    experts.down = info.weight(5, info.text("down_format"), n, m, count);
  }

  void check_ids(const int64_t* ids, int64_t pairs) const {
    for (int64_t i = 0; i < pairs; ++i)
      if (ids[i] < 0 || ids[i] >= count)
        throw Failure("expert " + std::to_string(ids[i]) + " is not one of " +
                      std::to_string(count));
  }

  void compute(Context& context) const override {
    const Tensor x = context.input(0), weights = context.input(1), ids = context.input(2);
    const int64_t tokens = x.rows(1, "x"), n = experts.down.n, m = experts.gate.n;
    if (x.dims[x.rank - 1] != experts.gate.k)
      throw Failure("x has shape " + x.shape_text() + ", its last dim should be " +
                    std::to_string(experts.gate.k));
    if (ids.type != ORT_I64) throw Failure("ids must be int64");
    if (ids.rank != weights.rank || !std::ranges::equal(ids.shape(), weights.shape()) ||
        ids.rows(1, "ids") != tokens)
      throw Failure("x " + x.shape_text() + ", weights " + weights.shape_text() + " and ids " +
                    ids.shape_text() + " don't belong together");
    check_ids(ids.as<int64_t>(), ids.elements());
    Experts given = experts;
    const int64_t middle[] = {count, m}, out[] = {count, n};
    given.gate_bias = context.optional(6, middle, "gate_bias");
    given.up_bias = context.optional(7, middle, "up_bias");
    given.down_bias = context.optional(8, out, "down_bias");
    moe(context.parallel(), given, x.as<float>(), tokens, weights.as<float>(), ids.as<int64_t>(),
        ids.dims[ids.rank - 1], context.output_like(0, x, n));
  }

  int64_t count;
  Experts experts;
};

}  // namespace

const Op& moe_op() { return op_of<Moe>(); }

}  // namespace spike::ops
