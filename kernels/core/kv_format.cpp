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

/// Stores scale and min of 32 elements, each clamped to what a half holds; NaN as the min of a group
/// that is not finite. Returns 1 / scale as the reader will see it, 0 if all codes are 0.
float store_range(const float* x, uint8_t* scale, uint8_t* min) {
  const auto [low, high] = std::minmax_element(x, x + group);
  const bool finite = all_finite(x);
  store_half(min, finite ? std::clamp(*low, -half_max, half_max) : std::nanf(""));
  store_half(scale, finite ? std::min(*high / 15.0f - *low / 15.0f, half_max) : 0.0f);
  return finite ? inverse(scale) : 0.0f;
}

void encode_int4(const float* x, uint8_t* out) {
  const float scale = store_range(x, out, out + 2);
  const float min = load_half(out + 2);
  auto nibble = [&](int64_t i) {
    return scale > 0.0f ? quantum((x[i] - min) * scale, 0, 15) : 0;
  };
  for (int64_t i = 0; i < group / 2; ++i)
    out[4 + i] = static_cast<uint8_t>(nibble(i) | nibble(i + group / 2) << 4);
}

/// Channels [from, from + group) of a group of keys.
void encode_channels(const uint8_t* const* rows, int64_t from, int64_t dim, uint8_t* out) {
  float x[kv_group_tokens][group], scale[group], min[group];
  for (int64_t t = 0; t < kv_group_tokens; ++t)
    for (int64_t c = 0; c < group; ++c) x[t][c] = load_half(rows[t] + 2 * (from + c));
  for (int64_t c = 0; c < group; ++c) {
    float channel[kv_group_tokens];
    for (int64_t t = 0; t < kv_group_tokens; ++t) channel[t] = x[t][c];
    uint8_t* const header = out + 2 * (from + c);
    scale[c] = store_range(channel, header, header + 2 * dim);
    min[c] = load_half(header + 2 * dim);
  }
  for (int64_t t = 0; t < kv_group_tokens; ++t) {
    uint8_t* const row = out + 4 * dim + (t * dim + from) / 2;
    auto nibble = [&](int64_t c) {
      return scale[c] > 0.0f ? quantum((x[t][c] - min[c]) * scale[c], 0, 15) : 0;
    };
    for (int64_t c = 0; c < group / 2; ++c)
      row[c] = static_cast<uint8_t>(nibble(c) | nibble(c + group / 2) << 4);
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

int64_t kv_recent_rows(int64_t block_size) {
  return block_size * kv_int4_group_bytes / (2 * group);
}

int64_t kv_recent_blocks(KvFormat format, int64_t block_size) {
  const int64_t rows = kv_recent_rows(block_size);
  return format == KvFormat::int4 && rows > 0 ? (kv_group_tokens + rows - 1) / rows : 0;
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

void kv_encode_keys(const uint8_t* const* rows, int64_t dim, uint8_t* out) {
  for (int64_t from = 0; from < dim; from += group) encode_channels(rows, from, dim, out);
}

void kv_encode_recent(const float* x, int64_t dim, uint8_t* row) {
  for (int64_t i = 0; i < dim; ++i) {
    const bool finite = std::fabs(x[i]) <= FLT_MAX;
    store_half(row + 2 * i, finite ? std::clamp(x[i], -half_max, half_max) : std::nanf(""));
  }
}

}  // namespace spike
