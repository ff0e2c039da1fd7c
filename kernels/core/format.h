// Storage formats of weight matrices: logical blocks (as GGUF defines them) and packed layout
// (ours).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace spike {

enum class Format {
  f32, f16, bf16, q8_0, q5_0, q5_1, q4_0, q4_1, q2_k, q3_k, q4_k, q5_k, q6_k, int4_sym
};

/// Rows interleaved in one packed tile: one per 32-bit lane of a 64-byte line.
inline constexpr int64_t kTileRows = 16;

/// "q4_k" -> Format::q4_k; nothing for an unknown name.
std::optional<Format> parse_format(std::string_view name);
std::string_view format_name(Format format);

/// Elements that share one block: 1, 32 or 256.
int64_t block_elements(Format format);

/// What a row's length must be a multiple of: 1, 32, or 64 for blocks of 256, where the last one may
/// be short (short_block.h).
int64_t row_multiple(Format format);

/// Bytes of one logical row of k elements.
size_t row_bytes(Format format, int64_t k);

/// Bytes of an [n, k] matrix in packed layout: n padded to a multiple of kTileRows, nothing more.
size_t packed_bytes(Format format, int64_t n, int64_t k);

/// Logical rows -> packed layout and back. `rows` is [n, row_bytes], `packed` packed_bytes long.
/// Padding rows are zeros. The layout is specified in docs/storage-formats.md.
void pack(Format format, const uint8_t* rows, int64_t n, int64_t k, uint8_t* packed);
void unpack(Format format, const uint8_t* packed, int64_t n, int64_t k, uint8_t* rows);

}  // namespace spike
