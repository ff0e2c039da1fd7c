// Qkv(x f32[..., K], wq u8, wk u8, wv u8, bq? f32[Nq], bk? f32[Nk], bv? f32[Nv])
//   -> (q f32[..., Nq], k f32[..., Nk], v f32[..., Nv]);
// attributes q_format, k_format, v_format, q_n, k_n, v_n, k.
#include "core/linear.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace spike::ops {
namespace {

struct Qkv {
  static Declaration declare() {
    return {"Qkv",
            {{ORT_F32}, {ORT_U8}, {ORT_U8}, {ORT_U8}, {ORT_F32, ORT_OPTIONAL},
             {ORT_F32, ORT_OPTIONAL}, {ORT_F32, ORT_OPTIONAL}},
            {{ORT_F32}, {ORT_F32}, {ORT_F32}}};
  }

  explicit Qkv(const Info& info) {
    const int64_t k = info.integer("k");
    weights.w[0] = info.weight(1, info.text("q_format"), info.integer("q_n"), k);
    weights.w[1] = info.weight(2, info.text("k_format"), info.integer("k_n"), k);
    weights.w[2] = info.weight(3, info.text("v_format"), info.integer("v_n"), k);
  }

  void compute(Context& context) const {
    static constexpr const char* names[3] = {"bq", "bk", "bv"};
    const Tensor x = context.input(0);
    const int64_t tokens = x.rows(1, "x"), k = weights.w[0].k;
    if (x.dims[x.rank - 1] != k)
      throw Failure("x has shape " + x.shape_text() + ", its last dim should be " +
                    std::to_string(k));
    QkvWeights all = weights;
    float* y[3];
    for (size_t i = 0; i < 3; ++i) {
      all.bias[i] = context.optional(4 + i, std::span(&weights.w[i].n, 1), names[i]);
      y[i] = context.output_like(i, x, weights.w[i].n);
    }
    linear_qkv(context.parallel(), all, x.as<float>(), tokens, y);
  }

  QkvWeights weights;
};

}  // namespace

const OrtCustomOp* qkv_op() { return CustomOp<Qkv>::get(); }

}  // namespace spike::ops
