#include "core/kv_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/cpu.h"
#include "core/half.h"
#include "core/kv_encoders.h"
#include "core/simd_scalar.h"

#include "core/kv_encode_tile.h"

namespace spike {
namespace {

const KvEncoders& encoders() {
  static const KvEncoders chosen = [] {
    switch (cpu_tier()) {
      case CpuTier::avx512_bf16:
      case CpuTier::avx512: return kv_encoders_avx512();
      case CpuTier::avx2: return kv_encoders_avx2();
      default: return kv_encoders<Scalar>();
    }
  }();
  return chosen;
}

}  // namespace

std::optional<KvFormat> parse_kv_format(std::string_view name) {
  if (name == "f32") return KvFormat::f32;
  if (name == "f16") return KvFormat::f16;
  if (name == "int8") return KvFormat::int8;
  if (name == "int4") return KvFormat::int4;
  return std::nullopt;
}

int64_t kv_group(KvFormat format) {
  return format == KvFormat::int8 || format == KvFormat::int4 ? coded_group : 1;
}

int64_t kv_recent_rows(int64_t block_size) {
  return block_size * kv_int4_group_bytes / (2 * coded_group);
}

int64_t kv_recent_blocks(KvFormat format, int64_t block_size) {
  const int64_t rows = kv_recent_rows(block_size);
  return format == KvFormat::int4 && rows > 0 ? (kv_group_tokens + rows - 1) / rows : 0;
}

size_t kv_row_bytes(KvFormat format, int64_t dim) {
  switch (format) {
    case KvFormat::f32: return static_cast<size_t>(4 * dim);
    case KvFormat::f16: return static_cast<size_t>(2 * dim);
    case KvFormat::int8: return static_cast<size_t>(dim / coded_group * kv_int8_group_bytes);
    default: return static_cast<size_t>(dim / coded_group * kv_int4_group_bytes);
  }
}

void kv_encode(KvFormat format, const float* x, int64_t dim, uint8_t* row) {
  encoders().row(format, x, dim, row);
}

void kv_encode_keys(const uint8_t* const* rows, int64_t dim, uint8_t* group) {
  encoders().keys(rows, dim, group);
}

void kv_encode_recent(const float* x, int64_t dim, uint8_t* row) {
  encoders().recent(x, dim, row);
}

}  // namespace spike
