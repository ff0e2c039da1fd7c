#include "core/recent_tokens.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace spike {
namespace {

int64_t block_bytes(const AttentionSpec& spec, const KvPool& pool, int64_t dim) {
  return pool.block_size * spec.kv_heads * static_cast<int64_t>(kv_row_bytes(spec.format, dim));
}

}  // namespace

RecentTokens::RecentTokens(const AttentionSpec& spec, const KvPool& pool, const AttentionStep& step)
    : spec_(spec),
      pool_(pool),
      step_(step),
      rows_per_block_(kv_recent_rows(pool.block_size)),
      keys_(pool.keys, block_bytes(spec, pool, spec.key_dim), spec.key_dim,
            step.tokens * spec.kv_heads),
      values_(pool.values, block_bytes(spec, pool, spec.value_dim), spec.value_dim,
              step.tokens * spec.kv_heads) {}

void RecentTokens::take(int64_t t) const {
  const int64_t heads = spec_.kv_heads;
  const auto round = [&](const Side& side, const float* x) {
    const int64_t elements = heads * side.head_bytes / 2;
    kv_encode_recent(x + t * elements, elements, side.step.get() + 2 * t * elements);
  };
  round(keys_, step_.k);
  round(values_, step_.v);
}

uint8_t* RecentTokens::kept(const Side& side, int64_t b, int64_t place, int64_t kv_head) const {
  const int64_t block = step_.block_tables[b * step_.table_width + place / rows_per_block_];
  const int64_t row = place % rows_per_block_ * spec_.kv_heads + kv_head;
  return side.pool + block * side.block_bytes + row * side.head_bytes;
}

const uint8_t* RecentTokens::row(const Side& side, int64_t b, int64_t position,
                                 int64_t kv_head) const {
  if (position < first(b)) return kept(side, b, position % kv_group_tokens, kv_head);
  const int64_t token = step_.seq_starts[b] + position - first(b);
  return side.step.get() + (token * spec_.kv_heads + kv_head) * side.head_bytes;
}

void RecentTokens::encode_groups(const Parallel& parallel) const {
  struct Group {
    int64_t sequence, index;
  };
  std::vector<Group> groups;
  for (int64_t b = 0; b < step_.sequences; ++b) {
    if (new_tokens(b) == 0) continue;
    const int64_t end = step_.kv_lens[b] / kv_group_tokens;
    for (int64_t g = first(b) / kv_group_tokens; g < end; ++g) groups.push_back({b, g});
  }
  parallel(static_cast<int64_t>(groups.size()),
           [&](int64_t i) { encode_group(groups[i].sequence, groups[i].index); });
}

void RecentTokens::encode_group(int64_t b, int64_t group) const {
  const int64_t begin = group * kv_group_tokens, last = begin + kv_group_tokens - 1;
  const int64_t slot = step_.slots[step_.seq_starts[b] + last - first(b)];
  if (slot < 0) return;
  const int64_t key_row = static_cast<int64_t>(kv_row_bytes(spec_.format, spec_.key_dim));
  uint8_t* out = pool_.keys + (slot + 1 - kv_group_tokens) * spec_.kv_heads * key_row;
  for (int64_t h = 0; h < spec_.kv_heads; ++h, out += kv_group_tokens * key_row) {
    const uint8_t* rows[kv_group_tokens];
    for (int64_t i = 0; i < kv_group_tokens; ++i) rows[i] = row(keys_, b, begin + i, h);
    kv_encode_keys(rows, spec_.key_dim, out);
  }
}

void RecentTokens::locate(int64_t b, int64_t kv_head, int64_t end, KvRows& kv) const {
  for (int64_t at = kv.recent; at < end; ++at) {
    kv.recent_keys[at - kv.recent] = row(keys_, b, at, kv_head);
    kv.recent_values[at - kv.recent] = row(values_, b, at, kv_head);
  }
}

void RecentTokens::keep(const Parallel& parallel) const {
  const auto copy = [&](const Side& side, int64_t b, int64_t at) {
    const size_t bytes = static_cast<size_t>(spec_.kv_heads * side.head_bytes);
    std::memcpy(kept(side, b, at % kv_group_tokens, 0), row(side, b, at, 0), bytes);
  };
  parallel(step_.sequences, [&](int64_t b) {
    const int64_t end = step_.kv_lens[b], group = end / kv_group_tokens * kv_group_tokens;
    for (int64_t at = std::max(group, first(b)); at < end; ++at) {
      if (step_.slots[step_.seq_starts[b] + at - first(b)] < 0) continue;
      copy(keys_, b, at);
      copy(values_, b, at);
    }
  });
}

}  // namespace spike
