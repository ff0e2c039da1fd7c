// Storage formats of cached keys and values: one row per token and head, or, for int4 keys, one
// block of rows per 32 tokens and head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace spike {

/// f32: floats. f16: IEEE halves. int8: per 32 elements {f16 scale, 32 x i8}, x = scale * q.
/// int4: x = scale * q + min. Values: per 32 elements {f16 scale, f16 min, 16 bytes}; byte i holds
/// element i in its low nibble and element i + 16 in its high one. Keys: few channels are much
/// larger than the others, in every token alike, so each channel has its own scale and min over 32
/// tokens (KIVI, Liu et al. 2024): {f16 scale[dim], f16 min[dim], 32 rows of dim / 2 bytes}, a row's
/// bytes as those of values. Such a group exists once all of its tokens do; a sequence keeps those
/// of its last, unfinished group as f16, in blocks of its own (see kv_recent_blocks).
enum class KvFormat { f32, f16, int8, int4 };

/// "int8" -> KvFormat::int8; nothing for an unknown name.
std::optional<KvFormat> parse_kv_format(std::string_view name);

/// Elements that share a scale (1 for f32 and f16): a row's length must be a multiple of it.
int64_t kv_group(KvFormat format);

/// Bytes of one row of `dim` elements.
size_t kv_row_bytes(KvFormat format, int64_t dim);

/// Tokens of a group of int4 keys. A query reads the tokens of its own group as f16, keys and
/// values, and all earlier ones coded: so its result depends on its position, not on the steps.
inline constexpr int64_t kv_group_tokens = 32;

/// Rows of f16 that fit in a block of the int4 cache (0 if none does).
int64_t kv_recent_rows(int64_t block_size);

/// Blocks that lead each sequence's block table and hold its unfinished group: row i of the group is
/// row i % kv_recent_rows of the block i / kv_recent_rows. 0 for other formats.
int64_t kv_recent_blocks(KvFormat format, int64_t block_size);

/// Bytes of one group of 32 elements.
inline constexpr int64_t kv_int8_group_bytes = 34;
inline constexpr int64_t kv_int4_group_bytes = 20;

/// row = encoding of x[dim], rounded to nearest. A group of int8 or int4 with a NaN or an infinity
/// becomes NaN as a whole, so that a broken value stays visible.
void kv_encode(KvFormat format, const float* x, int64_t dim, uint8_t* row);

/// group = the coded keys of 32 tokens, given as rows of `dim` halves. A channel with a NaN or an
/// infinity becomes NaN as a whole.
void kv_encode_keys(const uint8_t* const* rows, int64_t dim, uint8_t* group);

/// row = x[dim] as halves: what is finite is clamped to +-65504, the rest becomes NaN.
void kv_encode_recent(const float* x, int64_t dim, uint8_t* row);

}  // namespace spike
