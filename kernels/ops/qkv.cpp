// Qkv(x f32[..., K], wq u8, wk u8, wv u8, bq? f32[Nq], bk? f32[Nk], bv? f32[Nv], norm? f32[K],
//   q_norm? f32[Dq], k_norm? f32[Dk], cos? f32[..., R], sin? f32[..., R])
//   -> (q f32[..., Nq], k f32[..., Nk], v f32[..., Nv]);
// attributes q_format, k_format, v_format, q_n, k_n, v_n, k, norm_eps, q_norm_eps, k_norm_eps,
// q_heads, k_heads, style.
#include "core/linear.h"
#include "core/rope.h"
#include "ops/norm_in_front.h"
#include "ops/op.h"
#include "ops/ops.h"
#include "ops/rope_style.h"

namespace spike::ops {
namespace {

struct Qkv final : Kernel {
  static Declaration declare() {
    Declaration declaration{"Qkv", {{ORT_F32}, {ORT_U8}, {ORT_U8}, {ORT_U8}},
                            {ORT_F32, ORT_F32, ORT_F32}};
    declaration.inputs.resize(12, {ORT_F32, OPTIONAL});
    return declaration;
  }

  explicit Qkv(const Info& info)
      : norm(info, 7),
        heads{info.integer("q_heads", 1), info.integer("k_heads", 1)},
        head_eps{info.number("q_norm_eps", 0.0f), info.number("k_norm_eps", 0.0f)},
        style(read_style(info.text("style", "half"))) {
    const int64_t k = info.integer("k");
    weights.w[0] = info.weight(1, info.text("q_format"), info.integer("q_n"), k);
    weights.w[1] = info.weight(2, info.text("k_format"), info.integer("k_n"), k);
    weights.w[2] = info.weight(3, info.text("v_format"), info.integer("v_n"), k);
    for (size_t i = 0; i < 2; ++i)
      if (heads[i] < 1 || weights.w[i].n % heads[i] != 0)
        throw Failure(std::to_string(weights.w[i].n) + " rows can't be " +
                      std::to_string(heads[i]) + " heads");
  }

  void compute(Context& context) const override {
    static constexpr const char* names[3] = {"bq", "bk", "bv"};
    const Tensor x = context.input(0);
    const int64_t tokens = x.rows(1, "x"), k = weights.w[0].k;
    if (x.dims[x.rank - 1] != k)
      throw Failure("x has shape " + x.shape_text() + ", its last dim should be " +
                    std::to_string(k));
    const Rotation rotation = read_rotation(context, tokens);
    const Tensor head_norm[2] = {read_norm(context, 0), read_norm(context, 1)};
    QkvWeights all = weights;
    float* y[3];
    for (size_t i = 0; i < 3; ++i) {
      all.bias[i] = context.optional(4 + i, std::span(&weights.w[i].n, 1), names[i]);
      y[i] = context.output_like(i, x, weights.w[i].n);
    }
    linear_qkv(context.parallel(), all, norm.of(context, x, tokens, k), tokens, y);
    for (size_t i = 0; i < 2; ++i) {
      if (head_norm[i].data != nullptr) normalise(context, head_norm[i], i, tokens, y[i]);
      if (rotation.cos != nullptr) rotate(context, rotation, i, tokens, y[i]);
    }
  }

 private:
  /// cos and sin [tokens, width], or null.
  struct Rotation {
    const float* cos = nullptr;
    const float* sin = nullptr;
    int64_t width = 0;
  };

  Rotation read_rotation(const Context& context, int64_t tokens) const {
    if (!context.given(10)) return {};
    const Tensor cos = context.input(10), sin = context.input(11);
    if (!std::ranges::equal(cos.shape(), sin.shape()))
      throw Failure("cos has shape " + cos.shape_text() + ", sin " + sin.shape_text());
    const int64_t width = cos.rank == 0 ? 1 : cos.dims[cos.rank - 1];
    for (size_t i = 0; i < 2; ++i)
      if (cos.rows(1, "cos") != tokens || width % 2 != 0 || width > weights.w[i].n / heads[i])
        throw Failure("cos of shape " + cos.shape_text() + " doesn't fit " +
                      std::to_string(tokens) + " tokens and heads of " +
                      std::to_string(weights.w[i].n / heads[i]));
    return {cos.as<float>(), sin.as<float>(), width};
  }

  /// The norm's weight; its data is null if there is none.
  Tensor read_norm(const Context& context, size_t i) const {
    if (!context.given(8 + i)) return {};
    const Tensor w = context.input(8 + i);
    w.require({-1}, i == 0 ? "q_norm" : "k_norm");
    if (w.dims[0] < 1 || weights.w[i].n % w.dims[0] != 0)
      throw Failure("a norm of " + w.shape_text() + " doesn't fit " +
                    std::to_string(weights.w[i].n) + " rows");
    return w;
  }

  void normalise(Context& context, const Tensor& w, size_t i, int64_t tokens, float* y) const {
    const int64_t dim = w.dims[0], rows = tokens * (weights.w[i].n / dim);
    rms_norm(context.parallel(), y, w.as<float>(), rows, dim, head_eps[i], y);
  }

  void rotate(Context& context, const Rotation& rotation, size_t i, int64_t tokens,
              float* y) const {
    if (tokens == 0) return;
    const RopeShape shape{tokens, heads[i], weights.w[i].n / heads[i], rotation.width, tokens};
    rope(context.parallel(), style, shape, y, rotation.cos, rotation.sin, y);
  }

  QkvWeights weights;
  NormInFront norm;
  int64_t heads[2];
  float head_eps[2];
  RopeStyle style;
};

}  // namespace

const Op& qkv_op() { return op_of<Qkv>(); }

}  // namespace spike::ops
