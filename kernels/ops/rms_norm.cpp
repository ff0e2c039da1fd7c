// RmsNorm(x f32[..., D], w f32[D], residual? f32[..., D]) -> f32[..., D]; attribute eps.
#include "core/norm.h"

#include "ops/op.h"
#include "ops/ops.h"

namespace spike::ops {
namespace {

struct RmsNorm final : Kernel {
  static Declaration declare() {
    return {"RmsNorm", {{ORT_F32}, {ORT_F32}, {ORT_F32, OPTIONAL}}, {ORT_F32}};
  }

  explicit RmsNorm(const Info& info) : eps(info.number("eps")) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0), w = context.input(1);
    const int64_t rows = x.rows(1, "x"), dim = x.dims[x.rank - 1];
    w.require({dim}, "w");
    const float* residual = context.optional(2, x.shape(), "residual");
    float* y = static_cast<float*>(context.output(0, x.shape()));
    rms_norm(context.parallel(), x.as<float>(), w.as<float>(), rows, dim, eps, y, residual);
  }

  float eps;
};

}  // namespace

const Op& rms_norm_op() { return op_of<RmsNorm>(); }

}  // namespace spike::ops
