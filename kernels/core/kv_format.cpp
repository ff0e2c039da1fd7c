#include "core/kv_format.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "core/half.h"

namespace spike {
namespace {

constexpr int64_t group = 32;
constexpr float half_max = 65504.0f;

bool all_finite(const float* x) {
  bool finite = true;
  for (int64_t i = 0; i < group; ++i) finite &= std::fabs(x[i]) <= FLT_MAX;
  return finite;
}

/// 1 / scale as the reader will see it; 0 where the scale vanished in half precision.
float inverse(const uint8_t* scale) {
  const float s = load_half(scale);
  return s > 0.0f ? 1.0f / s : 0.0f;
}

int quantum(float x, int low, int high) {
  return static_cast<int>(
      std::lrintf(std::clamp(x, static_cast<float>(low), static_cast<float>(high))));
}

void encode_int8(const float* x, uint8_t* out) {
  float top = 0.0f;
  for (int64_t i = 0; i < group; ++i) top = std::max(top, std::fabs(x[i]));
  const bool finite = all_finite(x);
  store_half(out, finite ? std::min(top / 127.0f, half_max) : std::nanf(""));
  const float scale = finite ? inverse(out) : 0.0f;
  for (int64_t i = 0; i < group; ++i)
    out[2 + i] = finite ? static_cast<uint8_t>(quantum(x[i] * scale, -127, 127)) : 0;
}

void encode_int4(const float* x, uint8_t* out) {
  const auto [low, high] = std::minmax_element(x, x + group);
  const bool finite = all_finite(x);
  const float base = std::clamp(*low, -half_max, half_max);
  store_half(out + 2, finite ? base : std::nanf(""));
  store_half(out, finite ? std::min(*high / 15.0f - *low / 15.0f, half_max) : 0.0f);
  const float scale = finite ? inverse(out) : 0.0f;
  const float min = load_half(out + 2);
  auto nibble = [&](int64_t i) { return finite ? quantum((x[i] - min) * scale, 0, 15) : 0; };
  for (int64_t i = 0; i < group / 2; ++i)
    out[4 + i] = static_cast<uint8_t>(nibble(i) | nibble(i + group / 2) << 4);
}

void decode_int8(const uint8_t* in, float* out) {
  const float scale = load_half(in);
  for (int64_t i = 0; i < group; ++i) out[i] = scale * static_cast<int8_t>(in[2 + i]);
}

void decode_int4(const uint8_t* in, float* out) {
  const float scale = load_half(in), min = load_half(in + 2);
  for (int64_t i = 0; i < group / 2; ++i) {
    out[i] = scale * (in[4 + i] & 15) + min;
    out[i + group / 2] = scale * (in[4 + i] >> 4) + min;
  }
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
  return format == KvFormat::int8 || format == KvFormat::int4 ? group : 1;
}

size_t kv_row_bytes(KvFormat format, int64_t dim) {
  switch (format) {
    case KvFormat::f32: return static_cast<size_t>(4 * dim);
    case KvFormat::f16: return static_cast<size_t>(2 * dim);
    case KvFormat::int8: return static_cast<size_t>(dim / group * kv_int8_group_bytes);
    default: return static_cast<size_t>(dim / group * kv_int4_group_bytes);
  }
}

void kv_encode(KvFormat format, const float* x, int64_t dim, uint8_t* row) {
  switch (format) {
    case KvFormat::f32: std::memcpy(row, x, static_cast<size_t>(4 * dim)); return;
    case KvFormat::f16:
      for (int64_t i = 0; i < dim; ++i) store_half(row + 2 * i, x[i]);
      return;
    case KvFormat::int8:
      for (int64_t i = 0; i < dim; i += group, row += kv_int8_group_bytes) encode_int8(x + i, row);
      return;
    case KvFormat::int4:
      for (int64_t i = 0; i < dim; i += group, row += kv_int4_group_bytes) encode_int4(x + i, row);
      return;
  }
}

void kv_decode(KvFormat format, const uint8_t* row, int64_t dim, float* out) {
  switch (format) {
    case KvFormat::f32: std::memcpy(out, row, static_cast<size_t>(4 * dim)); return;
    case KvFormat::f16:
      for (int64_t i = 0; i < dim; ++i) out[i] = load_half(row + 2 * i);
      return;
    case KvFormat::int8:
      for (int64_t i = 0; i < dim; i += group, row += kv_int8_group_bytes) decode_int8(row, out + i);
      return;
    case KvFormat::int4:
      for (int64_t i = 0; i < dim; i += group, row += kv_int4_group_bytes) decode_int4(row, out + i);
      return;
  }
}

}  // namespace spike
