// Linear(x f32[..., K], w u8, bias? f32[N], residual? f32[..., N], norm? f32[K]) -> f32[..., N];
// attributes format, n, k, norm_eps.
#include "core/linear.h"

#include "ops/norm_in_front.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace spike::ops {
namespace {

struct Linear final : Kernel {
  static Declaration declare() {
    return {"Linear",
            {{ORT_F32}, {ORT_U8}, {ORT_F32, OPTIONAL}, {ORT_F32, OPTIONAL},
             {ORT_F32, OPTIONAL}},
            {ORT_F32}};
  }

  explicit Linear(const Info& info)
      : w(info.weight(1, info.text("format"), info.integer("n"), info.integer("k"))),
        norm(info, 4) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0);
    const int64_t tokens = x.rows(1, "x");
    if (x.dims[x.rank - 1] != w.k)
      throw Failure("x has shape " + x.shape_text() + ", its last dim should be " +
                    std::to_string(w.k));
    Tensor y = x;
    y.dims[y.rank - 1] = w.n;
    const float* bias = context.optional(2, std::span(&w.n, 1), "bias");
    const float* residual = context.optional(3, y.shape(), "residual");
    float* out = context.output_like(0, x, w.n);
    linear(context.parallel(), w, norm.of(context, x, tokens, w.k), tokens, bias, residual, out);
  }

  Matrix w;
  NormInFront norm;
};

}  // namespace

const Op& linear_op() { return op_of<Linear>(); }

}  // namespace spike::ops
