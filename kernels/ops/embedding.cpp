// Embedding(ids i32 or i64 [...], w u8) -> f32[..., K]; attributes format, n, k.
#include <algorithm>

#include "core/linear.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace spike::ops {
namespace {

struct Embedding final : Kernel {
  static Declaration declare() { return {"Embedding", {{ORT_ANY}, {ORT_U8}}, {ORT_F32}}; }

  explicit Embedding(const Info& info)
      : w(info.weight(1, info.text("format"), info.integer("n"), info.integer("k"))) {}

  /// Row number i of ids, checked against the table.
  int64_t row(const Tensor& ids, int64_t i) const {
    const int64_t id = ids.type == ORT_I32 ? ids.as<int32_t>()[i] : ids.as<int64_t>()[i];
    if (id < 0 || id >= w.n)
      throw Failure("id " + std::to_string(id) + " is outside the table of " +
                    std::to_string(w.n) + " rows");
    return id;
  }

  void compute(Context& context) const override {
    const Tensor ids = context.input(0);
    if (ids.type != ORT_I32 && ids.type != ORT_I64) throw Failure("ids must be int32 or int64");
    if (ids.rank == Tensor::max_rank) throw Failure("ids has too many dims");
    Tensor y = ids;
    y.dims[y.rank++] = w.k;
    const int64_t count = ids.elements();
    for (int64_t i = 0; i < count; ++i) row(ids, i);
    float* out = static_cast<float*>(context.output(0, y.shape()));
    const int64_t per_task = std::max<int64_t>(1, 16384 / w.k);
    context.parallel()((count + per_task - 1) / per_task, [&](int64_t task) {
      const int64_t end = std::min(count, (task + 1) * per_task);
      for (int64_t i = task * per_task; i < end; ++i)
        dequantize_row(w, row(ids, i), out + i * w.k);
    });
  }

  Matrix w;
};

}  // namespace

const Op& embedding_op() { return op_of<Embedding>(); }

}  // namespace spike::ops
