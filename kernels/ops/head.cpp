// Head(x f32[R, K], w u8, wanted i32[F], bias? f32[N], norm? f32[K]) and
// Choose(x f32[R, N], wanted i32[F]) -> (ids i32[R], best f32[R], logits f32[F, N]);
// attributes of Head: format, n, k, norm_eps. `wanted` are rows of x, rising.
#include "core/head.h"

#include <vector>

#include "ops/norm_in_front.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace spike::ops {
namespace {

const std::vector<OrtElementType> outputs = {ORT_I32, ORT_F32, ORT_F32};

/// For each of `rows` rows its place in `wanted`, or -1.
std::vector<int64_t> read_places(const Tensor& wanted, int64_t rows) {
  wanted.require({-1}, "wanted");
  std::vector<int64_t> places(static_cast<size_t>(rows), -1);
  int64_t last = -1;
  for (int64_t i = 0; i < wanted.dims[0]; ++i) {
    const int64_t row = wanted.as<int32_t>()[i];
    if (row <= last || row >= rows)
      throw Failure("wanted row " + std::to_string(row) + " behind " + std::to_string(last) +
                    " of " + std::to_string(rows) + " rows");
    places[static_cast<size_t>(row)] = i;
    last = row;
  }
  return places;
}

HeadOutput open_outputs(const Context& context, const std::vector<int64_t>& places, int64_t wanted,
                        int64_t n) {
  const int64_t rows = static_cast<int64_t>(places.size()), logits[] = {wanted, n};
  return {static_cast<int32_t*>(context.output(0, std::span(&rows, 1))),
          static_cast<float*>(context.output(1, std::span(&rows, 1))), places.data(),
          static_cast<float*>(context.output(2, logits))};
}

struct Head final : Kernel {
  static Declaration declare() {
    return {"Head",
            {{ORT_F32}, {ORT_U8}, {ORT_I32}, {ORT_F32, OPTIONAL}, {ORT_F32, OPTIONAL}},
            outputs};
  }

  explicit Head(const Info& info)
      : w(info.weight(1, info.text("format"), info.integer("n"), info.integer("k"))),
        norm(info, 4) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0), wanted = context.input(2);
    x.require({-1, w.k}, "x");
    const int64_t rows = x.dims[0];
    const std::vector<int64_t> places = read_places(wanted, rows);
    const float* bias = context.optional(3, std::span(&w.n, 1), "bias");
    const HeadOutput output = open_outputs(context, places, wanted.dims[0], w.n);
    head(context.parallel(), w, norm.of(context, x, rows, w.k), rows, bias, output);
  }

  Matrix w;
  NormInFront norm;
};

struct Choose final : Kernel {
  static Declaration declare() { return {"Choose", {{ORT_F32}, {ORT_I32}}, outputs}; }

  explicit Choose(const Info&) {}

  void compute(Context& context) const override {
    const Tensor x = context.input(0), wanted = context.input(1);
    x.require({-1, -1}, "x");
    const int64_t rows = x.dims[0], n = x.dims[1];
    if (n < 1) throw Failure("x has shape " + x.shape_text() + ": rows of nothing");
    const std::vector<int64_t> places = read_places(wanted, rows);
    const HeadOutput output = open_outputs(context, places, wanted.dims[0], n);
    choose(context.parallel(), x.as<float>(), rows, n, output);
  }
};

}  // namespace

const Op& head_op() { return op_of<Head>(); }
const Op& choose_op() { return op_of<Choose>(); }

}  // namespace spike::ops
