// What the scheduler of attention.cpp and the per-tier kernels say to each other.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/attention.h"
#include "core/cpu.h"

namespace spike {

/// Positions that share one softmax update; tiles start at its multiples.
inline constexpr int64_t tile_positions = 64;
/// Keys that are turned into columns together; a multiple of it begins in every such run.
inline constexpr int64_t turned_keys = 32;
/// Query rows between two turns of the softmax: their logits stay in the first cache.
inline constexpr int64_t softened_rows = 48;
/// Rows in scratch are padded to this many floats, a multiple of every tier's width.
inline constexpr int64_t row_floats = 16;

constexpr int64_t padded_row(int64_t dim) { return (dim + row_floats - 1) / row_floats * row_floats; }
constexpr int64_t value_panels(int64_t stride) {
  return (stride + tile_positions - 1) / tile_positions;
}

/// Query rows of a run of kv heads: by kv head, `group` heads of each of a run of tokens.
struct QueryRows {
  const AttentionSpec* spec = nullptr;
  const float* q = nullptr;  ///< [kv_heads, rows, key_stride], multiplied by the scale
  int64_t kv_heads = 1;
  int64_t rows = 0;  ///< of each kv head
  int64_t group = 1;
  int64_t first = 0;  ///< position of the first token
  int64_t key_stride = 0;
  int64_t value_stride = 0;
  const float* slopes = nullptr;  ///< [kv_heads, group], or null

  /// The positions that row r sees: [low, high).
  int64_t high(int64_t r) const { return first + r / group + 1; }
  int64_t low(int64_t r) const { return spec->first_seen(high(r) - 1); }
};

/// The cached rows of one sequence, from one kv head on.
struct KvRows {
  const uint8_t* keys = nullptr;    ///< the first head's row in slot 0
  const uint8_t* values = nullptr;
  int64_t key_head = 0;    ///< bytes from head to head
  int64_t value_head = 0;
  int64_t key_step = 0;    ///< bytes from slot to slot
  int64_t value_step = 0;
  const int32_t* table = nullptr;
  int64_t block_size = 1;

  // int4 only: `keys` is the head's part of the first group in the pool.
  int64_t code_bytes = 0;  ///< of one coded row of keys
  int64_t header_bytes = 0;  ///< scales and mins before a group's rows
  int64_t recent = 0;        ///< from this position on, a multiple of 32, rows are f16:
  int64_t recent_key_head = 0;  ///< bytes from head to head
  int64_t recent_value_head = 0;
  const uint8_t* recent_keys[kv_group_tokens];  ///< by place in the group
  const uint8_t* recent_values[kv_group_tokens];

  /// Addresses of positions [begin, begin + count).
  void locate(int64_t begin, int64_t count, const uint8_t** k, const uint8_t** v) const {
    int64_t block = begin / block_size, offset = begin % block_size;
    while (count > 0) {
      const int64_t slot = table[block] * block_size + offset;
      const int64_t run = std::min(count, block_size - offset);
      for (int64_t i = 0; i < run; ++i) k[i] = keys + (slot + i) * key_step;
      for (int64_t i = 0; i < run; ++i) v[i] = values + (slot + i) * value_step;
      k += run, v += run, count -= run, offset = 0, ++block;
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
  float* scores = nullptr;  ///< [softened_rows, tile_positions]
  float* keys = nullptr;    ///< [key_dim, tile_positions]: turned
  float* values = nullptr;  ///< [value_panels, tile_positions, tile_positions]: columns in panels
  int64_t touched = 0;      ///< positions before this one are on their way into the cache
};

/// The kernels of one tier.
struct AttentionKernels {
  /// Turns rows of queries, in place, into what `segment` multiplies. Null: as they are.
  void (*queries)(float* q, int64_t rows, int64_t stride);
  /// part = attention of the rows over those of positions [begin, end) that each of them sees. Both
  /// ends are tile borders, or where the first row begins and the last one ends to see. Positions
  /// up to `horizon` come next.
  void (*segment)(const QueryRows& q, const KvRows& kv, int64_t begin, int64_t end, int64_t horizon,
                  const Partial& part, Scratch& scratch);
  /// all = all and part together.
  void (*fold)(const Partial& all, const Partial& part, int64_t rows, int64_t value_stride);
};

AttentionKernels attention_kernels_scalar(KvFormat format);
AttentionKernels attention_kernels_avx2(KvFormat format);
AttentionKernels attention_kernels_avx512(KvFormat format);
AttentionKernels attention_kernels_avx512_bf16(KvFormat format);

}  // namespace spike
