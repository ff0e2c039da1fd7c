// Rope(x f32[..., H, D], cos f32[..., R], sin f32[..., R]) -> f32[..., H, D]; attribute style.
// The leading dims of cos and sin are those of x, or ones that repeat for each of x's first dims.
#include "core/rope.h"

#include <algorithm>

#include "ops/op.h"
#include "ops/ops.h"
#include "ops/rope_style.h"

namespace spike::ops {
namespace {

/// The rows of cos must be x's, or the last of x's dims after leading ones: then row t of x uses
/// row t mod rows of cos.
bool repeats(const Tensor& x, const Tensor& cos) {
  if (cos.rank + 1 > x.rank) return false;
  const int64_t* of_x = x.dims + (x.rank - cos.rank - 1);
  size_t i = 0;
  while (i + 1 < cos.rank && cos.dims[i] == 1) ++i;
  return std::equal(cos.dims + i, cos.dims + cos.rank - 1, of_x + i);
}

struct Rope final : Kernel {
  static Declaration declare() {
    return {"Rope", {{ORT_F32}, {ORT_F32}, {ORT_F32}}, {ORT_F32}};
  }

  explicit Rope(const Info& info) : style(read_style(info.text("style"))) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0), cos = context.input(1), sin = context.input(2);
    RopeShape shape;
    shape.tokens = x.rows(2, "x");
    shape.heads = x.dims[x.rank - 2];
    shape.dim = x.dims[x.rank - 1];
    shape.angles = cos.rows(1, "cos");
    shape.width = cos.dims[cos.rank - 1];
    if (!std::ranges::equal(cos.shape(), sin.shape()))
      throw Failure("cos has shape " + cos.shape_text() + ", sin " + sin.shape_text());
    if (shape.width > shape.dim || shape.width % 2 != 0 || !repeats(x, cos))
      throw Failure("cos of shape " + cos.shape_text() + " doesn't fit x of shape " +
                    x.shape_text());
    float* y = static_cast<float*>(context.output(0, x.shape()));
    rope(context.parallel(), style, shape, x.as<float>(), cos.as<float>(), sin.as<float>(), y);
  }

  RopeStyle style;
};

}  // namespace

const Op& rope_op() { return op_of<Rope>(); }

}  // namespace spike::ops
