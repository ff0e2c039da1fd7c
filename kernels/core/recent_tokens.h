// The int4 cache's tokens that are not coded: those of each sequence's last group of 32.
#pragma once

#include <cstdint>
#include <memory>

#include "core/attention_kernel.h"

namespace spike {

/// Keys and values of recent tokens as f16 rows [kv_heads, dim]. Those of the step's tokens lie in a
/// buffer, older ones in the blocks that lead their sequence's table, and go there from the buffer
/// once nothing of the step reads the older ones any more. Keys are coded when their group is
/// complete, always from these rows, so a group's bytes don't depend on the steps that made it.
class RecentTokens {
 public:
  RecentTokens(const AttentionSpec& spec, const KvPool& pool, const AttentionStep& step);

  /// Rounds token t of the step.
  void take(int64_t t) const;

  /// Codes the keys of the groups that the step completes; after every token was taken.
  void encode_groups(const Parallel& parallel) const;

  /// Addresses of the tokens from `kv.recent` to `end`, all of one group.
  void locate(int64_t sequence, int64_t kv_head, int64_t end, KvRows& kv) const;

  /// Keeps the tokens of groups that are not complete; after everything was read.
  void keep(const Parallel& parallel) const;

 private:
  /// Keys or values.
  struct Side {
    Side(uint8_t* pool, int64_t block_bytes, int64_t dim, int64_t rows)
        : pool(pool), block_bytes(block_bytes), head_bytes(2 * dim),
          step(new uint8_t[static_cast<size_t>(2 * dim * rows)]) {}

    uint8_t* pool;
    int64_t block_bytes;
    int64_t head_bytes;
    std::unique_ptr<uint8_t[]> step;  ///< [tokens, kv_heads, dim] halves
  };

  int64_t new_tokens(int64_t b) const { return step_.seq_starts[b + 1] - step_.seq_starts[b]; }
  int64_t first(int64_t b) const { return step_.kv_lens[b] - new_tokens(b); }

  /// The row in `b`'s own blocks of a place in a group.
  uint8_t* kept(const Side& side, int64_t b, int64_t place, int64_t kv_head) const;
  const uint8_t* row(const Side& side, int64_t b, int64_t position, int64_t kv_head) const;
  void encode_group(int64_t b, int64_t group) const;

  const AttentionSpec& spec_;
  const KvPool& pool_;
  const AttentionStep& step_;
  int64_t rows_per_block_;
  Side keys_, values_;
};

}  // namespace spike
