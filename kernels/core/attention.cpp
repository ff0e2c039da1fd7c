#include "core/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "core/attention_kernel.h"
#include "core/recent_tokens.h"

namespace spike {
namespace {

constexpr float nothing = -std::numeric_limits<float>::infinity();
constexpr int64_t rows_per_item = 32;  // query rows that share one reading of the cache

/// End of the segment that holds `position`. Segments are the unit in which a long context may be
/// shared between threads. Their borders are fixed, so results don't depend on the sharing; they
/// grow, so that partial results stay few.
int64_t segment_end(int64_t position) {
  const int64_t size = position < 4096 ? 256 : position < 32768 ? 1024 : 4096;
  return (position / size + 1) * size;
}

/// A run of kv heads and a run of tokens of one sequence.
struct Item {
  int64_t sequence = 0;
  int64_t kv_head = 0;
  int64_t kv_heads = 1;
  int64_t token = 0;  ///< first row in the step
  int64_t tokens = 0;
  int64_t first = 0;  ///< position of that token
  int64_t low = 0;    ///< positions seen by any of the tokens: [low, high)
  int64_t high = 0;
  float* shared = nullptr;  ///< partial results per segment, if several tasks work on the item

  int64_t cost() const { return (high - low) * tokens * kv_heads; }

  int64_t segments() const {
    int64_t count = 0;
    for (int64_t at = low; at < high; at = segment_end(at)) ++count;
    return count;
  }
};

struct Task {
  int64_t item = 0;
  int64_t begin = 0;  ///< segment to work on, if the item is shared
  float* part = nullptr;
};

/// Grows, is reused by all tasks of a thread, and is aligned for vectors.
class Workspace {
 public:
  float* get(int64_t floats) {
    if (floats > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(new (std::align_val_t{64}) float[static_cast<size_t>(floats)]);
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Free> memory_;
  int64_t size_ = 0;
};

class Attention {
 public:
  Attention(const Parallel& parallel, const AttentionSpec& spec, const KvPool& pool,
            const AttentionStep& step, float* out)
      : parallel_(parallel), spec_(spec), pool_(pool), step_(step), out_(out) {
    key_row_ = static_cast<int64_t>(kv_row_bytes(spec.format, spec.key_dim));
    value_row_ = static_cast<int64_t>(kv_row_bytes(spec.format, spec.value_dim));
    if (spec.format == KvFormat::int4) recent_.emplace(spec, pool, step);
    group_ = spec.heads / spec.kv_heads;
    key_stride_ = padded_row(spec.key_dim);
    value_stride_ = padded_row(spec.value_dim);
    switch (cpu_tier()) {
      case CpuTier::avx512: kernel_ = segment_kernel_avx512(spec.format); break;
      case CpuTier::avx2: kernel_ = segment_kernel_avx2(spec.format); break;
      default: kernel_ = segment_kernel_scalar(spec.format); break;
    }
  }

  void run() {
    store();
    if (recent_) recent_->encode_groups(parallel_);
    plan();
    parallel_(static_cast<int64_t>(tasks_.size()), [this](int64_t i) { work(tasks_[i]); });
    parallel_(static_cast<int64_t>(shared_.size()), [this](int64_t i) { join(items_[shared_[i]]); });
    if (recent_) recent_->keep(parallel_);
  }

 private:
  void store() const {
    const int64_t per_task = 16, tasks = (step_.tokens + per_task - 1) / per_task;
    parallel_(tasks, [&](int64_t i) {
      const int64_t end = std::min(step_.tokens, (i + 1) * per_task);
      for (int64_t t = i * per_task; t < end; ++t) {
        if (recent_) recent_->take(t);
        if (step_.slots[t] >= 0) store_token(t, step_.slots[t]);
      }
    });
  }

  void store_token(int64_t t, int64_t slot) const {
    for (int64_t h = 0; h < spec_.kv_heads; ++h) {
      const int64_t from = t * spec_.kv_heads + h, to = slot * spec_.kv_heads + h;
      if (!recent_)  // or keys are coded by groups of tokens
        kv_encode(spec_.format, step_.k + from * spec_.key_dim, spec_.key_dim,
                  pool_.keys + to * key_row_);
      kv_encode(spec_.format, step_.v + from * spec_.value_dim, spec_.value_dim,
                pool_.values + to * value_row_);
    }
  }

  void plan() {
    const bool together = heads_together();
    for (int64_t b = 0; b < step_.sequences; ++b) plan_sequence(b, together);
    int64_t total = 0;
    for (const Item& item : items_) total += item.cost();
    // Items above this share of the work are cut, so that no thread waits long for another one.
    const int64_t large = parallel_.threads > 1 ? total / (4 * parallel_.threads)
                                                : std::numeric_limits<int64_t>::max();
    int64_t floats = 0;
    for (const Item& item : items_)
      if (cut(item, large)) floats += item.segments() * partial_floats(rows(item));
    partials_.reset(new float[static_cast<size_t>(floats)]);
    float* next = partials_.get();
    for (size_t i = 0; i < items_.size(); ++i) {
      Item& item = items_[i];
      if (!cut(item, large)) {
        tasks_.push_back({static_cast<int64_t>(i), 0, nullptr});
        continue;
      }
      item.shared = next;
      shared_.push_back(static_cast<int64_t>(i));
      for (int64_t at = item.low; at < item.high; at = segment_end(at)) {
        tasks_.push_back({static_cast<int64_t>(i), at, next});
        next += partial_floats(rows(item));
      }
    }
  }

  /// Whether short runs of tokens take all kv heads in one item. The cache is then read in the
  /// order in which it lies in memory, which decode steps live on; but there are fewer tasks.
  bool heads_together() const {
    int64_t tasks = 0;
    for (int64_t b = 0; b < step_.sequences; ++b)
      if (short_run(b)) tasks += make_item(b, 0, new_tokens(b)).segments();
    return tasks >= 2 * parallel_.threads;
  }

  int64_t new_tokens(int64_t b) const { return step_.seq_starts[b + 1] - step_.seq_starts[b]; }

  int64_t tokens_per_item() const { return std::max<int64_t>(1, rows_per_item / group_); }

  bool short_run(int64_t b) const {
    return new_tokens(b) > 0 && new_tokens(b) <= std::min<int64_t>(4, tokens_per_item());
  }

  void plan_sequence(int64_t b, bool together) {
    const bool all = together && short_run(b);
    for (int64_t h = 0; h < (all ? 1 : spec_.kv_heads); ++h)
      for (int64_t t = 0, count; t < new_tokens(b); t += count) {
        count = item_tokens(b, t);
        items_.push_back(make_item(b, t, count));
        items_.back().kv_head = h;
        items_.back().kv_heads = all ? spec_.kv_heads : 1;
      }
  }

  /// Tokens of the item that begins with new token `from`. All of them must read the same keys
  /// coded, so int4's items end where groups do; what is left of a group is shared out evenly.
  int64_t item_tokens(int64_t b, int64_t from) const {
    const int64_t left = new_tokens(b) - from, most = tokens_per_item();
    if (!recent_) return std::min(most, left);
    const int64_t position = step_.kv_lens[b] - left;
    const int64_t run = std::min(left, kv_group_tokens - position % kv_group_tokens);
    const int64_t items = (run + most - 1) / most;
    return (run + items - 1) / items;
  }

  /// New tokens [from, from + tokens) of sequence b.
  Item make_item(int64_t b, int64_t from, int64_t tokens) const {
    Item item;
    item.sequence = b;
    item.token = step_.seq_starts[b] + from;
    item.tokens = tokens;
    item.first = step_.kv_lens[b] - new_tokens(b) + from;
    item.high = item.first + tokens;
    item.low = spec_.first_seen(item.first);
    return item;
  }

  static bool cut(const Item& item, int64_t large) {
    return item.cost() > large && segment_end(item.low) < item.high;
  }

  /// Query rows of an item: by kv head, then token, then query head of the group.
  int64_t rows(const Item& item) const { return item.kv_heads * rows_per_head(item); }
  int64_t rows_per_head(const Item& item) const { return item.tokens * group_; }

  /// Which row of [tokens, heads] an item's row r is.
  int64_t place(const Item& item, int64_t r) const {
    const int64_t per_head = rows_per_head(item), token = item.token + r % per_head / group_;
    return token * spec_.heads + (item.kv_head + r / per_head) * group_ + r % group_;
  }

  int64_t partial_floats(int64_t rows) const { return rows * (2 + value_stride_); }

  Partial partial(float* memory, int64_t rows) const {
    return {memory, memory + rows, memory + 2 * rows};
  }

  /// A segment of a shared item, or all of an item.
  void work(const Task& task) const {
    const Item& item = items_[task.item];
    const int64_t count = rows(item), per_head = padded_row(rows_per_head(item));
    thread_local Workspace workspace;
    float* next = workspace.get(padded_row(count * key_stride_) + per_head * (score_stride + 1) +
                                tile_positions * (key_stride_ + value_stride_) +
                                2 * partial_floats(count));
    auto take = [&next](int64_t floats) { return std::exchange(next, next + floats); };
    float* q = take(padded_row(count * key_stride_));
    Scratch scratch;
    scratch.scores = take(per_head * score_stride);
    scratch.keys = take(tile_positions * key_stride_);
    scratch.values = take(tile_positions * value_stride_);
    scratch.carry = take(per_head);
    load_queries(item, q);
    if (task.part != nullptr) {
      attend(item, q, task.begin, partial(task.part, count), scratch);
      return;
    }
    const Partial all = partial(take(partial_floats(count)), count);
    const Partial part = partial(take(partial_floats(count)), count);
    clear(all, count);
    for (int64_t at = item.low; at < item.high; at = segment_end(at)) {
      attend(item, q, at, part, scratch);
      fold(all, part, count);
    }
    finish(item, all);
  }

  /// part = the item's rows over the segment that begins at `begin`.
  void attend(const Item& item, const float* q, int64_t begin, const Partial& part,
              Scratch& scratch) const {
    const int64_t end = std::min(segment_end(begin), item.high), per_head = rows_per_head(item);
    for (int64_t h = 0; h < item.kv_heads; ++h) {
      const int64_t row = h * per_head;
      const float* slopes =
          step_.slopes != nullptr ? step_.slopes + (item.kv_head + h) * group_ : nullptr;
      const QueryRows query{&spec_,     q + row * key_stride_, per_head,      group_,
                            item.first, key_stride_,           value_stride_, slopes};
      kernel_(query, cached(item, item.kv_head + h), begin, end,
              {part.max + row, part.sum + row, part.out + row * value_stride_}, scratch);
    }
  }

  /// Puts the segments of a shared item together, in the order in which one task would have.
  void join(const Item& item) const {
    const int64_t count = rows(item), floats = partial_floats(count);
    thread_local Workspace workspace;
    const Partial all = partial(workspace.get(floats), count);
    clear(all, count);
    float* part = item.shared;
    for (int64_t at = item.low; at < item.high; at = segment_end(at), part += floats)
      fold(all, partial(part, count), count);
    finish(item, all);
  }

  void load_queries(const Item& item, float* q) const {
    for (int64_t r = 0; r < rows(item); ++r, q += key_stride_) {
      const float* from = step_.q + place(item, r) * spec_.key_dim;
      for (int64_t i = 0; i < spec_.key_dim; ++i) q[i] = from[i] * spec_.scale;
      std::fill(q + spec_.key_dim, q + key_stride_, 0.0f);
    }
  }

  KvRows cached(const Item& item, int64_t kv_head) const {
    KvRows kv;
    kv.keys = pool_.keys + kv_head * key_row_;
    kv.values = pool_.values + kv_head * value_row_;
    kv.key_step = spec_.kv_heads * key_row_;
    kv.value_step = spec_.kv_heads * value_row_;
    kv.table = step_.block_tables + item.sequence * step_.table_width;
    kv.block_size = pool_.block_size;
    if (!recent_) return kv;
    kv.keys = pool_.keys + kv_head * kv_group_tokens * key_row_;
    kv.table += kv_recent_blocks(spec_.format, pool_.block_size);
    kv.header_bytes = 4 * spec_.key_dim;
    kv.code_bytes = spec_.key_dim / 2;
    kv.recent = item.first / kv_group_tokens * kv_group_tokens;
    recent_->locate(item.sequence, kv_head, item.high, kv);
    return kv;
  }

  void clear(const Partial& all, int64_t rows) const {
    std::fill(all.max, all.max + rows, nothing);
    std::fill(all.sum, all.sum + rows, 0.0f);
    std::fill(all.out, all.out + rows * value_stride_, 0.0f);
  }

  void fold(const Partial& all, const Partial& part, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (part.sum[r] == 0.0f) continue;  // the row sees nothing of this segment
      const float max = std::max(all.max[r], part.max[r]);
      const float base = max == nothing ? 0.0f : max;
      const float a = std::exp(all.max[r] - base), b = std::exp(part.max[r] - base);
      all.max[r] = max;
      all.sum[r] = all.sum[r] * a + part.sum[r] * b;
      float* out = all.out + r * value_stride_;
      const float* more = part.out + r * value_stride_;
      for (int64_t i = 0; i < value_stride_; ++i) out[i] = out[i] * a + more[i] * b;
    }
  }

  /// out = weighted values / sum of weights, a sink being one more weight.
  void finish(const Item& item, const Partial& all) const {
    for (int64_t r = 0; r < rows(item); ++r) {
      const int64_t row = place(item, r);
      float factor = 1.0f, sum = all.sum[r];
      if (step_.sinks != nullptr) {
        const float sink = step_.sinks[row % spec_.heads], max = std::max(all.max[r], sink);
        factor = std::exp(all.max[r] - max);
        sum = sum * factor + std::exp(sink - max);
      }
      factor /= sum;
      float* to = out_ + row * spec_.value_dim;
      const float* from = all.out + r * value_stride_;
      for (int64_t i = 0; i < spec_.value_dim; ++i) to[i] = from[i] * factor;
    }
  }

  const Parallel& parallel_;
  const AttentionSpec& spec_;
  const KvPool& pool_;
  const AttentionStep& step_;
  float* out_;
  SegmentKernel kernel_ = nullptr;
  std::optional<RecentTokens> recent_;  ///< int4 only
  int64_t key_row_ = 0, value_row_ = 0, group_ = 1, key_stride_ = 0, value_stride_ = 0;
  std::vector<Item> items_;
  std::vector<Task> tasks_;
  std::vector<int64_t> shared_;
  std::unique_ptr<float[]> partials_;
};

std::string number(int64_t x) { return std::to_string(x); }

/// A block table's entry `i`, if it names no block of the pool.
std::string entry_fault(const KvPool& pool, const AttentionStep& step, int64_t b, int64_t i) {
  const int64_t block = step.block_tables[b * step.table_width + i];
  if (block >= 0 && block < pool.blocks) return {};
  return "block_tables entry " + number(i) + " is block " + number(block) + ", the pool has " +
         number(pool.blocks);
}

/// Coded keys go where the table says: a group of tokens has one place, not a slot for each.
std::string slots_fault(const KvPool& pool, const AttentionStep& step, int64_t b, int64_t lead) {
  const int64_t end = step.seq_starts[b + 1];
  for (int64_t t = step.seq_starts[b]; t < end; ++t) {
    const int64_t position = step.kv_lens[b] - (end - t), slot = step.slots[t];
    const int64_t entry = b * step.table_width + lead + position / pool.block_size;
    const int64_t own = step.block_tables[entry] * pool.block_size + position % pool.block_size;
    if (slot >= 0 && slot != own)
      return "token " + number(t) + " has slot " + number(slot) + ", its block table says " +
             number(own);
  }
  return {};
}

/// Checks one sequence: its lengths, and the table entries that its tokens can see.
std::string sequence_fault(const AttentionSpec& spec, const KvPool& pool, const AttentionStep& step,
                           int64_t b) {
  const std::string name = "sequence " + number(b) + ": ";
  const int64_t tokens = int64_t{step.seq_starts[b + 1]} - step.seq_starts[b];
  if (tokens < 0) return name + "seq_starts decreases";
  if (tokens == 0) return {};
  const int64_t length = step.kv_lens[b];
  if (length < tokens)
    return name + "kv_lens is " + number(length) + ", less than its " + number(tokens) +
           " new tokens";
  const int64_t lead = kv_recent_blocks(spec.format, pool.block_size);
  const int64_t first = length - tokens, last = lead + (length - 1) / pool.block_size;
  if (last >= step.table_width)
    return name + "kv_lens " + number(length) + " needs " + number(last + 1) +
           " blocks, block_tables has " + number(step.table_width);
  const int64_t seen = lead + spec.first_seen(first) / pool.block_size;
  for (int64_t i = 0; i <= last; ++i) {
    if (i >= lead && i < seen) continue;  // left of the window
    if (std::string fault = entry_fault(pool, step, b, i); !fault.empty()) return name + fault;
  }
  return {};
}

}  // namespace

std::string attention_fault(const AttentionSpec& spec, const KvPool& pool,
                            const AttentionStep& step) {
  if (step.seq_starts[0] != 0) return "seq_starts begins with " + number(step.seq_starts[0]);
  for (int64_t b = 0; b < step.sequences; ++b)
    if (std::string fault = sequence_fault(spec, pool, step, b); !fault.empty()) return fault;
  if (step.seq_starts[step.sequences] != step.tokens)
    return "seq_starts ends with " + number(step.seq_starts[step.sequences]) + ", the step has " +
           number(step.tokens) + " tokens";
  const int64_t slots = pool.blocks * pool.block_size;
  for (int64_t t = 0; t < step.tokens; ++t)
    if (step.slots[t] >= slots)
      return "token " + number(t) + ": slot " + number(step.slots[t]) + ", the pool has " +
             number(slots);
  const int64_t lead = kv_recent_blocks(spec.format, pool.block_size);
  for (int64_t b = 0; lead > 0 && b < step.sequences; ++b)
    if (std::string fault = slots_fault(pool, step, b, lead); !fault.empty()) return fault;
  return {};
}

void attention(const Parallel& parallel, const AttentionSpec& spec, const KvPool& pool,
               const AttentionStep& step, float* out) {
  if (step.tokens > 0) Attention(parallel, spec, pool, step, out).run();
}

}  // namespace spike
