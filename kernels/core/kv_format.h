// Storage formats of cached keys and values: one row per token and head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace spike {

/// f32: floats. f16: IEEE halves. int8: per 32 elements {f16 scale, 32 x i8}, x = scale * q.
/// int4: per 32 elements {f16 scale, f16 min, 16 bytes}, x = scale * q + min; byte i holds
/// element i in its low nibble and element i + 16 in its high one.
enum class KvFormat { f32, f16, int8, int4 };

/// "int8" -> KvFormat::int8; nothing for an unknown name.
std::optional<KvFormat> parse_kv_format(std::string_view name);

/// Elements that share a scale (1 for f32 and f16): a row's length must be a multiple of it.
int64_t kv_group(KvFormat format);

/// Bytes of one row of `dim` elements.
size_t kv_row_bytes(KvFormat format, int64_t dim);

/// Bytes of one group of 32 elements.
inline constexpr int64_t kv_int8_group_bytes = 34;
inline constexpr int64_t kv_int4_group_bytes = 20;

/// row = encoding of x[dim], rounded to nearest. A group of int8 or int4 with a NaN or an infinity
/// becomes NaN as a whole, so that a broken value stays visible.
void kv_encode(KvFormat format, const float* x, int64_t dim, uint8_t* row);

/// out[dim] = the values that `row` holds.
void kv_decode(KvFormat format, const uint8_t* row, int64_t dim, float* out);

}  // namespace spike
