// Attention(q f32[T, H*Dk], k f32[T, Hkv*Dk], v f32[T, Hkv*Dv], key_pool u8[NB, BS, Hkv, RBk],
//   value_pool u8[NB, BS, Hkv, RBv], slots i32[T], seq_starts i32[B+1], kv_lens i32[B],
//   block_tables i32[B, M], sinks? f32[H], slopes? f32[H]) -> (o f32[T, H*Dv], key_pool, value_pool);
// attributes heads, kv_heads, scale, window, chunk, softcap, kv_format. The pools are written in place.
#include "core/attention.h"

#include <cstring>

#include "ops/op.h"
#include "ops/ops.h"

namespace spike::ops {
namespace {

struct Attention final : Kernel {
  static Declaration declare() {
    return {"Attention",
            {{ORT_F32}, {ORT_F32}, {ORT_F32}, {ORT_U8}, {ORT_U8}, {ORT_I32}, {ORT_I32}, {ORT_I32},
             {ORT_I32}, {ORT_F32, OPTIONAL}, {ORT_F32, OPTIONAL}},
            {ORT_F32, ORT_U8, ORT_U8}};
  }

  explicit Attention(const Info& info) {
    base.heads = info.integer("heads");
    base.kv_heads = info.integer("kv_heads");
    base.scale = info.number("scale");
    base.window = info.integer("window", 0);
    base.chunk = info.integer("chunk", 0);
    base.softcap = info.number("softcap", 0.0f);
    const std::string name = info.text("kv_format");
    const auto format = parse_kv_format(name);
    if (!format) throw Failure("unknown kv_format '" + name + "' (f32, f16, int8 or int4)");
    base.format = *format;
    if (base.kv_heads < 1 || base.heads < 1 || base.heads % base.kv_heads != 0)
      throw Failure(std::to_string(base.heads) + " heads can't share " +
                    std::to_string(base.kv_heads) + " kv heads");
    if (base.window < 0 || base.chunk < 0 || !(base.softcap >= 0.0f))
      throw Failure("window, chunk and softcap must not be negative");
  }

  void compute(Context& context) const override {
    const Tensor q = context.input(0), k = context.input(1), v = context.input(2);
    const Tensor key_pool = context.input(3), value_pool = context.input(4);
    const AttentionSpec spec = read_spec(q, k, v);
    AttentionStep step = read_step(context, q.dims[0]);
    step.q = q.as<float>();
    step.k = k.as<float>();
    step.v = v.as<float>();
    KvPool pool = read_pool(spec, key_pool, value_pool);
    if (const std::string fault = attention_fault(spec, pool, step); !fault.empty())
      throw Failure(fault);
    pool.keys = take_over(context, 1, key_pool);
    pool.values = take_over(context, 2, value_pool);
    const int64_t out[] = {q.dims[0], spec.heads * spec.value_dim};
    attention(context.parallel(), spec, pool, step, static_cast<float*>(context.output(0, out)));
  }

 private:
  /// The head sizes follow from the widths of q and v.
  AttentionSpec read_spec(const Tensor& q, const Tensor& k, const Tensor& v) const {
    AttentionSpec spec = base;
    q.require({-1, -1}, "q");
    spec.key_dim = head_dim(q, spec.heads, "q");
    k.require({q.dims[0], spec.kv_heads * spec.key_dim}, "k");
    v.require({q.dims[0], -1}, "v");
    spec.value_dim = head_dim(v, spec.kv_heads, "v");
    const int64_t group = kv_group(spec.format);
    if (spec.key_dim % group != 0 || spec.value_dim % group != 0)
      throw Failure("head sizes " + std::to_string(spec.key_dim) + " and " +
                    std::to_string(spec.value_dim) + " must be multiples of 32 for this kv_format");
    return spec;
  }

  static int64_t head_dim(const Tensor& x, int64_t heads, const char* name) {
    if (x.dims[1] == 0 || x.dims[1] % heads != 0)
      throw Failure(std::string(name) + " has shape " + x.shape_text() + ", no " +
                    std::to_string(heads) + " heads");
    return x.dims[1] / heads;
  }

  AttentionStep read_step(const Context& context, int64_t tokens) const {
    const Tensor slots = context.input(5), starts = context.input(6), lens = context.input(7),
                 tables = context.input(8);
    slots.require({tokens}, "slots");
    lens.require({-1}, "kv_lens");
    starts.require({lens.dims[0] + 1}, "seq_starts");
    tables.require({lens.dims[0], -1}, "block_tables");
    AttentionStep step;
    step.tokens = tokens;
    step.sequences = lens.dims[0];
    step.table_width = tables.dims[1];
    step.slots = slots.as<int32_t>();
    step.seq_starts = starts.as<int32_t>();
    step.kv_lens = lens.as<int32_t>();
    step.block_tables = tables.as<int32_t>();
    step.sinks = context.optional(9, std::span(&base.heads, 1), "sinks");
    step.slopes = context.optional(10, std::span(&base.heads, 1), "slopes");
    return step;
  }

  static KvPool read_pool(const AttentionSpec& spec, const Tensor& keys, const Tensor& values) {
    auto row = [&](int64_t dim) { return static_cast<int64_t>(kv_row_bytes(spec.format, dim)); };
    keys.require({-1, -1, spec.kv_heads, row(spec.key_dim)}, "key_pool");
    values.require({keys.dims[0], keys.dims[1], spec.kv_heads, row(spec.value_dim)}, "value_pool");
    if (keys.dims[1] < 1) throw Failure("key_pool has blocks without slots");
    if (spec.format == KvFormat::int4 && keys.dims[1] % kv_group_tokens != 0)
      throw Failure("key_pool has blocks of " + std::to_string(keys.dims[1]) +
                    " slots; int4 needs a multiple of 32");
    return {nullptr, nullptr, keys.dims[0], keys.dims[1]};
  }

  /// The output that continues a pool: the same memory if the caller bound it so, else a copy.
  static uint8_t* take_over(const Context& context, size_t output, const Tensor& pool) {
    auto* out = static_cast<uint8_t*>(context.output(output, pool.shape()));
    if (out != pool.data) std::memcpy(out, pool.data, static_cast<size_t>(pool.elements()));
    return out;
  }

  AttentionSpec base;
};

}  // namespace

const Op& attention_op() { return op_of<Attention>(); }

}  // namespace spike::ops
