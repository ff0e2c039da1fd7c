// GatedMlp(x f32[..., K], gate u8, up u8, down u8, residual? f32[..., N],
//   gate_bias? f32[M], up_bias? f32[M], down_bias? f32[N], norm? f32[K]) -> f32[..., N];
// attributes activation, gate_format, up_format, down_format, k, m, n, norm_eps.
#include "core/linear.h"
#include "ops/activation.h"
#include "ops/norm_in_front.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace spike::ops {
namespace {

struct GatedMlp final : Kernel {
  static Declaration declare() {
    return {"GatedMlp",
            {{ORT_F32}, {ORT_U8}, {ORT_U8}, {ORT_U8}, {ORT_F32, OPTIONAL},
             {ORT_F32, OPTIONAL}, {ORT_F32, OPTIONAL}, {ORT_F32, OPTIONAL},
             {ORT_F32, OPTIONAL}},
            {ORT_F32}};
  }

  explicit GatedMlp(const Info& info)
      : activation(read_activation(info.text("activation"))),
        gate(info.weight(1, info.text("gate_format"), info.integer("m"), info.integer("k"))),
        up(info.weight(2, info.text("up_format"), info.integer("m"), info.integer("k"))),
        down(info.weight(3, info.text("down_format"), info.integer("n"), info.integer("m"))),
        norm(info, 8) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0);
    const int64_t tokens = x.rows(1, "x");
    if (x.dims[x.rank - 1] != gate.k)
      throw Failure("x has shape " + x.shape_text() + ", its last dim should be " +
                    std::to_string(gate.k));
    Tensor y = x;
    y.dims[y.rank - 1] = down.n;
    const float* residual = context.optional(4, y.shape(), "residual");
    GatedMlpWeights weights{gate, up, down};
    weights.gate_bias = context.optional(5, std::span(&gate.n, 1), "gate_bias");
    weights.up_bias = context.optional(6, std::span(&up.n, 1), "up_bias");
    weights.down_bias = context.optional(7, std::span(&down.n, 1), "down_bias");
    float* out = context.output_like(0, x, down.n);
    gated_mlp(context.parallel(), weights, activation, norm.of(context, x, tokens, gate.k), tokens,
              residual, out);
  }

  Activation activation;
  Matrix gate, up, down;
  NormInFront norm;
};

}  // namespace

const Op& gated_mlp_op() { return op_of<GatedMlp>(); }

}  // namespace spike::ops
