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

// Query rows that share one reading of the cache: few if threads would else have nothing to do.
constexpr int64_t fewest_rows = 32, most_rows = 96;
// Positions that a thread should have to itself, as the first ones of a task are waited for.
constexpr int64_t fewest_positions = 512;
// Multiply-adds from which sharing the work between threads pays for waking them.
constexpr int64_t worth_sharing = 100000;

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
  int64_t begin = 0;  ///< segments to work on, if the item is shared: up to `end`
  int64_t end = 0;
  float* part = nullptr;  ///< one partial result per segment
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
      case CpuTier::avx512_bf16: kernels_ = attention_kernels_avx512_bf16(spec.format); break;
      case CpuTier::avx512: kernels_ = attention_kernels_avx512(spec.format); break;
      case CpuTier::avx2: kernels_ = attention_kernels_avx2(spec.format); break;
      default: kernels_ = attention_kernels_scalar(spec.format); break;
    }
  }

  void run() {
    store();
    if (recent_) recent_->encode_groups(parallel_);
    plan();
    const Parallel threads = alone_ ? Parallel{} : parallel_;
    threads(static_cast<int64_t>(tasks_.size()), [this](int64_t i) { work(tasks_[i]); });
    threads(static_cast<int64_t>(shared_.size()), [this](int64_t i) { join(items_[shared_[i]]); });
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
    int64_t total = 0;
    for (int64_t b = 0; b < step_.sequences; ++b)
      if (new_tokens(b) > 0) total += make_item(b, 0, new_tokens(b)).cost() * spec_.kv_heads;
    alone_ = parallel_.threads <= 1 ||
             total * group_ * (spec_.key_dim + spec_.value_dim) < worth_sharing;
    const int64_t share_of_rows = step_.tokens * spec_.heads / (8 * parallel_.threads);
    tokens_per_item_ =
        std::max<int64_t>(1, std::clamp(share_of_rows, fewest_rows, most_rows) / group_);
    const bool together = alone_ || heads_together();
    for (int64_t b = 0; b < step_.sequences; ++b) plan_sequence(b, together);
    // Items above this share of the work are cut, so that no thread waits long for another one.
    const int64_t large =
        alone_ ? std::numeric_limits<int64_t>::max() : total / (2 * parallel_.threads);
    int64_t floats = 0;
    for (const Item& item : items_)
      if (cut(item, large)) floats += item.segments() * partial_floats(rows(item));
    partials_.reset(new float[static_cast<size_t>(floats)]);
    float* next = partials_.get();
    for (size_t i = items_.size(); i-- > 0;)  // late tokens see most: begin with the long tasks
      if (cut(items_[i], large))
        next = share(static_cast<int64_t>(i), large, next);
      else
        tasks_.push_back({static_cast<int64_t>(i), 0, 0, nullptr});
  }

  /// Runs of an item's segments become tasks of about `large` each; `next` is where partial results
  /// go. Neighbouring segments stay together, so that each finds its first keys on their way.
  float* share(int64_t i, int64_t large, float* next) {
    Item& item = items_[i];
    item.shared = next;
    shared_.push_back(i);
    const int64_t each = (item.high - item.low) / parallel_.threads;
    const int64_t positions =
        std::max(large / (item.tokens * item.kv_heads), std::min(each, fewest_positions));
    for (int64_t begin = item.low; begin < item.high;) {
      Task task{i, begin, begin, next};
      while (task.end < item.high && task.end - begin < positions) {
        task.end = std::min(item.high, segment_end(task.end));
        next += partial_floats(rows(item));
      }
      tasks_.push_back(task);
      begin = task.end;
    }
    return next;
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

  bool short_run(int64_t b) const {
    return new_tokens(b) > 0 && new_tokens(b) <= std::min<int64_t>(4, tokens_per_item_);
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
    const int64_t left = new_tokens(b) - from, most = tokens_per_item_;
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

  /// Calls use(r, row of [tokens, heads]) for an item's rows.
  template <class Use>
  void each_row(const Item& item, Use use) const {
    int64_t r = 0;
    for (int64_t h = item.kv_head; h < item.kv_head + item.kv_heads; ++h)
      for (int64_t t = item.token; t < item.token + item.tokens; ++t)
        for (int64_t g = 0; g < group_; ++g) use(r++, t * spec_.heads + h * group_ + g);
  }

  int64_t partial_floats(int64_t rows) const { return rows * (2 + value_stride_); }

  Partial partial(float* memory, int64_t rows) const {
    return {memory, memory + rows, memory + 2 * rows};
  }

  /// Segments of a shared item, or all of an item.
  void work(const Task& task) const {
    const Item& item = items_[task.item];
    const int64_t count = rows(item), floats = partial_floats(count);
    thread_local Workspace workspace;
    float* next = workspace.get(count * key_stride_ + softened_rows * tile_positions +
                                spec_.key_dim * tile_positions +
                                value_panels(value_stride_) * tile_positions * tile_positions +
                                2 * padded_row(floats));
    auto take = [&next](int64_t floats) { return std::exchange(next, next + floats); };
    float* q = take(count * key_stride_);
    Scratch scratch;
    scratch.scores = take(softened_rows * tile_positions);
    scratch.keys = take(spec_.key_dim * tile_positions);
    scratch.values = take(value_panels(value_stride_) * tile_positions * tile_positions);
    load_queries(item, q);
    if (task.part != nullptr) {
      float* part = task.part;
      for (int64_t at = task.begin; at < task.end; at = segment_end(at), part += floats)
        attend(item, q, at, task.end, partial(part, count), scratch);
      return;
    }
    const Partial all = partial(take(padded_row(floats)), count);
    const Partial part = partial(take(padded_row(floats)), count);
    attend(item, q, item.low, item.high, all, scratch);
    for (int64_t at = segment_end(item.low); at < item.high; at = segment_end(at)) {
      attend(item, q, at, item.high, part, scratch);
      kernels_.fold(all, part, count, value_stride_);
    }
    finish(item, all);
  }

  /// part = the item's rows over the segment that begins at `begin`; more follows up to `horizon`.
  void attend(const Item& item, const float* q, int64_t begin, int64_t horizon,
              const Partial& part, Scratch& scratch) const {
    const int64_t end = std::min(segment_end(begin), item.high);
    const float* slopes = step_.slopes != nullptr ? step_.slopes + item.kv_head * group_ : nullptr;
    const QueryRows query{&spec_,      q,           item.kv_heads, rows_per_head(item), group_,
                          item.first,  key_stride_, value_stride_, slopes};
    kernels_.segment(query, cached(item), begin, end, horizon, part, scratch);
  }

  /// Puts the segments of a shared item together, in the order in which one task would have.
  void join(const Item& item) const {
    const int64_t count = rows(item), floats = partial_floats(count);
    thread_local Workspace workspace;
    const Partial all = partial(workspace.get(floats), count);
    std::copy_n(item.shared, floats, all.max);
    float* part = item.shared + floats;
    for (int64_t at = segment_end(item.low); at < item.high; at = segment_end(at), part += floats)
      kernels_.fold(all, partial(part, count), count, value_stride_);
    finish(item, all);
  }

  void load_queries(const Item& item, float* q) const {
    each_row(item, [&](int64_t r, int64_t row) {
      const float* from = step_.q + row * spec_.key_dim;
      float* const to = q + r * key_stride_;
      for (int64_t i = 0; i < spec_.key_dim; ++i) to[i] = from[i] * spec_.scale;
      std::fill(to + spec_.key_dim, to + key_stride_, 0.0f);
    });
    if (kernels_.queries != nullptr) kernels_.queries(q, rows(item), key_stride_);
  }

  KvRows cached(const Item& item) const {
    KvRows kv;
    kv.key_head = key_row_;
    kv.value_head = value_row_;
    kv.keys = pool_.keys + item.kv_head * key_row_;
    kv.values = pool_.values + item.kv_head * value_row_;
    kv.key_step = spec_.kv_heads * key_row_;
    kv.value_step = spec_.kv_heads * value_row_;
    kv.table = step_.block_tables + item.sequence * step_.table_width;
    kv.block_size = pool_.block_size;
    if (!recent_) return kv;
    kv.key_head = kv_group_tokens * key_row_;
    kv.keys = pool_.keys + item.kv_head * kv.key_head;
    kv.table += kv_recent_blocks(spec_.format, pool_.block_size);
    kv.header_bytes = 4 * spec_.key_dim;
    kv.code_bytes = spec_.key_dim / 2;
    kv.recent = item.first / kv_group_tokens * kv_group_tokens;
    kv.recent_key_head = 2 * spec_.key_dim;
    kv.recent_value_head = 2 * spec_.value_dim;
    recent_->locate(item.sequence, item.kv_head, item.high, kv);
    return kv;
  }

  /// out = weighted values / sum of weights, a sink being one more weight.
  void finish(const Item& item, const Partial& all) const {
    each_row(item, [&](int64_t r, int64_t row) {
      float factor = 1.0f, sum = all.sum[r];
      if (step_.sinks != nullptr) {
        const float sink = step_.sinks[row % spec_.heads], max = std::max(all.max[r], sink);
        factor = std::exp(all.max[r] - max);
        sum = sum * factor + std::exp(sink - max);
      }
      factor /= sum;
      float* to = out_ + row * spec_.value_dim;
      const float* from = all.out + r * value_stride_;
      // A masked position adds nothing, but turns -0 into 0: so do all.
      for (int64_t i = 0; i < spec_.value_dim; ++i) to[i] = from[i] * factor + 0.0f;
    });
  }

  const Parallel& parallel_;
  const AttentionSpec& spec_;
  const KvPool& pool_;
  const AttentionStep& step_;
  float* out_;
  AttentionKernels kernels_{};
  std::optional<RecentTokens> recent_;  ///< int4 only
  int64_t key_row_ = 0, value_row_ = 0, group_ = 1, key_stride_ = 0, value_stride_ = 0;
  int64_t tokens_per_item_ = 1;
  bool alone_ = false;  ///< the work isn't worth waking other threads
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
