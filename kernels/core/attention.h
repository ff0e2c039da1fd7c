// Attention over a paged cache of keys and values, for any mix of prompts and decode steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/kv_format.h"
#include "core/parallel.h"

namespace spike {

struct AttentionSpec {
  int64_t heads = 0;       ///< query heads, a multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t key_dim = 0;     ///< elements of one q and k head
  int64_t value_dim = 0;   ///< elements of one v and output head
  float scale = 1.0f;      ///< logit = scale * q.k
  int64_t window = 0;      ///< token i sees j with i - window < j <= i; 0: every j <= i
  int64_t chunk = 0;       ///< token i sees j <= i of its own chunk only; 0: no chunks
  float softcap = 0.0f;    ///< logit = softcap * tanh(logit / softcap); 0: unchanged
  KvFormat format = KvFormat::f32;

  /// The first position that the token at `position` sees.
  int64_t first_seen(int64_t position) const {
    const int64_t behind = window > 0 && position >= window ? position + 1 - window : 0;
    return chunk > 0 ? std::max(behind, position / chunk * chunk) : behind;
  }
};

/// The cache: slot s = block * block_size + offset holds one row per kv head.
struct KvPool {
  uint8_t* keys = nullptr;    ///< [blocks, block_size, kv_heads, kv_row_bytes(key_dim)]
                              ///< (int4: [blocks, block_size / 32, kv_heads, a group's bytes])
  uint8_t* values = nullptr;  ///< [blocks, block_size, kv_heads, kv_row_bytes(value_dim)]
  int64_t blocks = 0;
  int64_t block_size = 0;
};

/// The new tokens of one step: sequence b owns rows seq_starts[b] .. seq_starts[b + 1].
struct AttentionStep {
  int64_t tokens = 0;
  int64_t sequences = 0;
  int64_t table_width = 0;
  const float* q = nullptr;               ///< [tokens, heads, key_dim]
  const float* k = nullptr;               ///< [tokens, kv_heads, key_dim]
  const float* v = nullptr;               ///< [tokens, kv_heads, value_dim]
  const int32_t* slots = nullptr;         ///< [tokens] where k, v go; negative: not stored
  const int32_t* seq_starts = nullptr;    ///< [sequences + 1]
  const int32_t* kv_lens = nullptr;       ///< [sequences] cached + new tokens
  const int32_t* block_tables = nullptr;  ///< [sequences, table_width] block of each run of positions,
                                          ///< behind the sequence's own (kv_recent_blocks)
  const float* sinks = nullptr;           ///< [heads] extra logit without a value, or null
  const float* slopes = nullptr;          ///< [heads] ALiBi: logit += slope * (j - i), or null
};

/// What is wrong with the numbers of a step, naming the offender; empty if nothing is. Only table
/// entries that some token of the step can see are looked at (those left of a window may be stale).
std::string attention_fault(const AttentionSpec& spec, const KvPool& pool,
                            const AttentionStep& step);

/// Stores k and v in the pool, then out[tokens, heads, value_dim] = softmax(logits) v, in fp32.
/// Requires attention_fault to be empty. A token's result has the same bits whatever else is in the
/// batch, however its prompt was cut into steps, and with any number of threads. Method:
/// online softmax (Milakov & Gimelshein 2018) over tiles of positions, as in FlashAttention.
void attention(const Parallel& parallel, const AttentionSpec& spec, const KvPool& pool,
               const AttentionStep& step, float* out);

}  // namespace spike
