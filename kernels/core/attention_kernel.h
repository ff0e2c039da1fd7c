// What the scheduler of attention.cpp and the per-tier kernels say to each other.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/attention.h"
#include "core/cpu.h"

namespace spike {

/// Positions that share one softmax update; tiles start at its multiples.
inline constexpr int64_t tile_positions = 64;
/// Floats from one row of logits to the next: a tile, and room for a whole four past its end.
inline constexpr int64_t score_stride = tile_positions + 16;
/// From this many query rows on, a tile is converted to fp32 once instead of once per four rows.
inline constexpr int64_t rows_worth_expanding = 12;
/// Rows in scratch are padded to this many floats, a multiple of every tier's width.
inline constexpr int64_t row_floats = 16;

constexpr int64_t padded_row(int64_t dim) { return (dim + row_floats - 1) / row_floats * row_floats; }

/// Query rows that share one kv head: `group` heads of each of a run of tokens, token by token.
struct QueryRows {
  const AttentionSpec* spec = nullptr;
  const float* q = nullptr;  ///< [rows, key_stride], multiplied by the scale, zero padded
  int64_t rows = 0;
  int64_t group = 1;
  int64_t first = 0;  ///< position of the first token
  int64_t key_stride = 0;
  int64_t value_stride = 0;
  const float* slopes = nullptr;  ///< [group], or null

  /// The positions that row r sees: [low, high).
  int64_t high(int64_t r) const { return first + r / group + 1; }
  int64_t low(int64_t r) const { return spec->first_seen(high(r) - 1); }
};

/// The cached rows of one sequence and kv head.
struct KvRows {
  const uint8_t* keys = nullptr;    ///< the head's row in slot 0
  const uint8_t* values = nullptr;
  int64_t key_step = 0;    ///< bytes from slot to slot
  int64_t value_step = 0;
  const int32_t* table = nullptr;
  int64_t block_size = 1;

  // int4 only: `keys` is the head's part of the first group in the pool.
  int64_t code_bytes = 0;  ///< of one coded row of keys
  int64_t header_bytes = 0;  ///< scales and mins before a group's rows
  int64_t recent = 0;        ///< from this position on, a multiple of 32, rows are f16:
  const uint8_t* recent_keys[kv_group_tokens];  ///< by place in the group
  const uint8_t* recent_values[kv_group_tokens];

  /// Addresses of positions [begin, begin + count).
  void locate(int64_t begin, int64_t count, const uint8_t** k, const uint8_t** v) const {
    int64_t block = begin / block_size, offset = begin % block_size;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = table[block] * block_size + offset;
      k[i] = keys + slot * key_step;
      v[i] = values + slot * value_step;
      if (++offset == block_size) offset = 0, ++block;
    }
  }

  /// The same for int4.
  void locate_coded(int64_t begin, int64_t count, const uint8_t** k, const uint8_t** v) const {
    const int64_t coded = std::clamp<int64_t>(recent - begin, 0, count);
    locate(begin, coded, k, v);
    for (int64_t i = 0; i < coded; ++i) {
      const int64_t place = (begin + i) % kv_group_tokens;
      k[i] += header_bytes + place * (code_bytes - key_step);
    }
    for (int64_t i = coded; i < count; ++i) {
      k[i] = recent_keys[begin + i - recent];
      v[i] = recent_values[begin + i - recent];
    }
  }
};

/// Attention over some of a row's positions: softmax = out / sum with logits relative to max.
struct Partial {
  float* max = nullptr;  ///< [rows], -infinity where a row saw no position
  float* sum = nullptr;  ///< [rows]
  float* out = nullptr;  ///< [rows, value_stride]
};

/// One task's working memory.
struct Scratch {
  float* scores = nullptr;  ///< [rows, score_stride]
  float* carry = nullptr;   ///< [rows]
  float* keys = nullptr;    ///< [tile_positions, key_stride]
  float* values = nullptr;  ///< [tile_positions, value_stride]
};

/// part = attention of the rows over those of positions [begin, end) that each of them sees. Both
/// ends are tile borders, or where the first row begins and the last one ends to see.
using SegmentKernel = void (*)(const QueryRows& q, const KvRows& kv, int64_t begin, int64_t end,
                               const Partial& part, Scratch& scratch);

SegmentKernel segment_kernel_scalar(KvFormat format);
SegmentKernel segment_kernel_avx2(KvFormat format);
SegmentKernel segment_kernel_avx512(KvFormat format);

}  // namespace spike
