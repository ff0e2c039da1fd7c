// The inner part of attention, written once against the SIMD interface (see simd_avx512.h).
//
// Every result depends only on its own query row and on absolute positions: tiles and segments
// start at fixed positions, a logit is summed channel by channel and an output position by
// position, and a masked position contributes exactly nothing. So a row has the same bits in a
// prompt as in a decode step. Include inside a SPIKE_TARGET region.
#pragma once

#include "core/key_tile.h"

namespace spike {
namespace {

/// Memory that is needed soon, touched bit by bit while other rows are worked on: no hardware
/// prefetcher follows a block table, and many requests at once only wait for each other.
class Ahead {
 public:
  /// To be spread over so many ticks.
  void spread(int64_t ticks) { lines_ = (lines_ + ticks - 1) / std::max<int64_t>(1, ticks); }

  /// Rows of so many bytes.
  void add(const uint8_t* const* rows, int64_t count, int64_t bytes) {
    if (count <= 0) return;
    parts_[parts_end_++] = {rows, count, bytes};
    lines_ += count * ((bytes + line - 1) / line);
  }

  /// Inlined by force: GCC 12 takes a function that only prefetches for one without effect, and
  /// drops calls to it.
  [[gnu::always_inline]] void tick() {
    for (int64_t n = 0; n < lines_ && part_ < parts_end_; ++n) {
      const Part& part = parts_[part_];
      __builtin_prefetch(part.rows[row_] + offset_, 0, 2);
      if ((offset_ += line) < part.bytes) continue;
      offset_ = 0;
      if (++row_ == part.count) row_ = 0, ++part_;
    }
  }

 private:
  static constexpr int64_t line = 64;
  struct Part {
    const uint8_t* const* rows;
    int64_t count, bytes;
  };
  Part parts_[4];
  int64_t lines_ = 0;  ///< of all rows, then of each tick
  int64_t parts_end_ = 0, part_ = 0, row_ = 0, offset_ = 0;
};

/// The right side of a product as floats: row k, column c in panels of tile_positions.
template <class V>
struct Panels {
  const float* at;

  template <int C>
  Panels columns(int64_t c) const {
    return {at + c / tile_positions * tile_positions * tile_positions + c % tile_positions};
  }
  typename V::F load(int64_t k, int64_t c) const {
    return V::load(at + k * tile_positions + c * V::width);
  }
  void tick(int64_t) const {}
};

/// Values as they are stored, at `offset` bytes from each address. `whole`: columns begin with a
/// group of 32, so that the compiler sees which registers share a scale.
template <class V, KvFormat format, bool whole = false>
struct StoredValues {
  const uint8_t* const* rows;
  int64_t offset;
  Ahead* ahead;
  int64_t chunk = 0;

  template <int C>
  auto columns(int64_t c) const {
    constexpr bool groups = C * V::width % 32 == 0;
    return StoredValues<V, format, groups>{rows, offset + c / 32 * group_bytes<format>, ahead,
                                           c % 32 / V::width};
  }
  typename V::F load(int64_t k, int64_t c) const {
    return load_chunk<V, format>(rows[k] + offset, (whole ? 0 : chunk) + c);
  }
  [[gnu::always_inline]] void tick(int64_t k) const {
    if (k % 4 == 0) ahead->tick();
  }
};

/// The left side of a product.
struct LeftRows {
  const float* at;
  int64_t stride;
};

/// out[r][c] = carry[r] * out[r][c] + sum over k in [from, to) of left[r][k] right[k][c], in the
/// order of k; R rows, C registers of columns. Without carry the sum begins with zero.
template <class V, int R, int C, class Right>
void multiply(const LeftRows& left, const Right& right, int64_t from, int64_t to,
              const float* carry, float* out, int64_t out_stride) {
  using F = typename V::F;
  F acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      acc[r][c] = carry == nullptr
                      ? V::zero()
                      : V::mul(V::load(out + r * out_stride + c * V::width), V::set(carry[r]));
  for (int64_t k = from; k < to; ++k) {
    right.tick(k);
    F column[C];
    for (int c = 0; c < C; ++c) column[c] = right.load(k, c);
    for (int r = 0; r < R; ++r) {
      const F x = V::set(left.at[r * left.stride + k]);
      for (int c = 0; c < C; ++c) acc[r][c] = V::fma(x, column[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) V::store(out + r * out_stride + c * V::width, acc[r][c]);
}

/// Columns [begin, end) of R rows; both multiples of the width.
template <class V, int R, class Right>
void multiply_columns(const LeftRows& left, const Right& right, int64_t from, int64_t to,
                      int64_t begin, int64_t end, const float* carry, float* out,
                      int64_t out_stride) {
  constexpr int C = V::accumulators / R >= 4 ? 4 : 2;
  int64_t c = begin;
  for (; c + C * V::width <= end; c += C * V::width)
    multiply<V, R, C>(left, right.template columns<C>(c), from, to, carry, out + c, out_stride);
  for (; c < end; c += V::width)
    multiply<V, R, 1>(left, right.template columns<1>(c), from, to, carry, out + c, out_stride);
}

/// s[r][j] = left[r] . key j of sixteen in f16, for R rows, summed in the order that `multiply` has.
/// For so few rows that storing the turned keys would cost more than to turn them in registers.
template <class V, int R, class Tick>
[[gnu::noinline]] void stored_scores(const LeftRows& left, const uint8_t* const* keys, int64_t dim,
                                     float* s, const Tick& tick) {
  using F = typename V::F;
  constexpr int registers = 16 / V::width;
  F acc[R][registers];
  for (auto& row : acc)
    for (F& a : row) a = V::zero();
  for (int64_t i = 0; i < dim; i += 8, tick()) {
    F columns[8][registers];
    V::columns_f16(keys, 2 * i, columns);
    for (int e = 0; e < 8; ++e)
      for (int r = 0; r < R; ++r) {
        const F query = V::set(left.at[r * left.stride + i + e]);
        for (int c = 0; c < registers; ++c) acc[r][c] = V::fma(query, columns[e][c], acc[r][c]);
      }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < registers; ++c)
      V::store(s + r * tile_positions + c * V::width, acc[r][c]);
}

/// Calls use<R>() with R = rows, which is at most V::rows.
template <class V, int R = V::rows, class Use>
void with_rows(int64_t rows, const Use& use) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<V, R - 1>(rows, use);
  }
  use.template operator()<R>();
}

/// softcap * tanh(x / softcap) in place.
template <class V>
void cap_row(float* s, int64_t begin, int64_t end, float softcap) {
  const auto twice = V::set(2.0f / softcap), one = V::set(1.0f);
  for (int64_t j = begin; j < end; j += V::width) {
    const auto e = V::exp(V::mul(V::load(s + j), twice));
    const auto tanh = V::sub(one, V::div(V::set(2.0f), V::add(e, one)));
    V::store(s + j, V::mul(tanh, V::set(softcap)));
  }
}

/// ALiBi (Press et al. 2022): a logit falls by slope for every position that the key lies back.
inline void bias_row(float* s, int64_t begin, int64_t end, float slope, int64_t distance) {
  for (int64_t j = begin; j < end; ++j)
    s[j] += slope * static_cast<float>(static_cast<int32_t>(distance + j));
}

/// Positions of a tile, relative to its begin.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;

  bool empty() const { return begin >= end; }
  Span widened(int64_t to) const {
    return empty() ? Span{} : Span{begin / to * to, (end + to - 1) / to * to};
  }
};

/// Turns logits [rows, tile_positions] into weights relative to each row's new maximum; updates max
/// and sum. carry = the factors by which what was accumulated so far shrinks.
template <class V>
class Softening {
 public:
  Softening(const QueryRows& q, int64_t tile, const float* slopes) : q_(q), tile_(tile), slopes_(slopes) {}

  /// Masks row r over `span`; returns its largest logit.
  float prepare(int64_t r, const Span& span, float* s) const {
    const int64_t low = std::clamp(q_.low(r) - tile_, span.begin, span.end);
    const int64_t high = std::clamp(q_.high(r) - tile_, low, span.end);
    if (q_.spec->softcap > 0.0f) cap_row<V>(s, span.begin, span.end, q_.spec->softcap);
    if (slopes_ != nullptr)
      bias_row(s, span.begin, span.end, slopes_[r % q_.group], tile_ + 1 - q_.high(r));
    std::fill(s + span.begin, s + low, -INFINITY);
    std::fill(s + high, s + span.end, -INFINITY);
    auto top = V::set(-INFINITY);
    for (int64_t j = span.begin; j < span.end; j += V::width) top = V::max(V::load(s + j), top);
    return V::top(top);
  }

  /// carry[r] = e^(max[r] - top[r]), max = top = the larger one, for a register of rows.
  static void shrink(float* max, float* top, float* carry) {
    const auto old = V::load(max), now = V::max(V::load(top), old);
    V::store(carry, V::exp(V::sub(old, base(now))));
    V::store(max, now);
    V::store(top, now);
  }

  /// s = e^(s - top) over `span`; returns the sum.
  static float weigh(const Span& span, float top, float* s) {
    const auto low = base(V::set(top));
    auto total = V::zero();
    for (int64_t j = span.begin; j < span.end; j += V::width) {
      const auto p = V::exp(V::sub(V::load(s + j), low));
      V::store(s + j, p);
      total = V::add(total, p);
    }
    return V::sum(total);
  }

 private:
  /// -infinity minus -infinity would be NaN.
  static typename V::F base(typename V::F top) { return V::max(V::set(-FLT_MAX), top); }

  const QueryRows& q_;
  int64_t tile_;
  const float* slopes_;
};

/// Addresses of the rows of one tile's positions, by place in the tile.
struct TileRows {
  int64_t tile = 0;
  Span there;
  const uint8_t* keys[tile_positions];
  const uint8_t* values[tile_positions];

  /// The positions of a tile from `at` to `end`; empty if there are none.
  template <KvFormat format>
  void locate(const KvRows& kv, int64_t at, int64_t end) {
    tile = at / tile_positions * tile_positions;
    there = {at - tile, std::max(at, std::min(end, tile + tile_positions)) - tile};
    const int64_t count = there.end - there.begin;
    if constexpr (format == KvFormat::int4)
      kv.locate_coded(at, count, keys + there.begin, values + there.begin);
    else
      kv.locate(at, count, keys + there.begin, values + there.begin);
  }

  int64_t end() const { return tile + there.end; }
};

/// The queries' rows against one tile of the cache.
template <class V, KvFormat format>
class Tile {
 public:
  Tile(const QueryRows& q, const KvRows& kv, const TileRows& rows, const TileRows& next,
       const Partial& part, Scratch& scratch)
      : q_(q), kv_(kv), rows_(rows), next_(next), part_(part), scratch_(scratch) {}

  void run() {
    look_ahead();
    for (int64_t h = 0; h < q_.kv_heads; ++h) {
      if (!direct()) turn(h);
      const bool expanded = q_.rows > V::rows || q_.spec->value_dim % V::width != 0;
      if (expanded) expand(h);
      for (int64_t r = 0; r < q_.rows; r += softened_rows)
        rows(h, r, std::min(softened_rows, q_.rows - r), expanded);
    }
  }

 private:
  static constexpr bool coded = format == KvFormat::int4;

  /// Whether logits are made from keys as they are stored.
  bool direct() const {
    return V::width > 1 && format == KvFormat::f16 && q_.rows <= V::rows &&
           q_.spec->key_dim % 8 == 0;
  }

  /// Where coded positions end and those of the queries' own group begin.
  int64_t border() const {
    return rows_.there.begin + coded_count(rows_);
  }

  /// The next tile's rows of all heads, and this one's if nobody has touched them.
  void look_ahead() {
    if (scratch_.touched < rows_.end()) {
      Ahead now;
      add_keys(now, rows_);
      now.spread(1);
      now.tick();
      add_values(ahead_, rows_);
    }
    scratch_.touched = next_.end();
    add_keys(ahead_, next_);
    add_values(ahead_, next_);
    const int64_t runs = tile_positions / (direct() ? 16 : turned_keys);
    const int64_t turns = runs * q_.spec->key_dim / turn_elements<format>;
    const int64_t sums = tile_positions / 4 * std::max<int64_t>(1, q_.spec->value_dim / (4 * V::width));
    ahead_.spread(q_.kv_heads * (turns + sums));
  }

  /// Coded keys lie by groups of tokens, those of all heads together.
  void add_keys(Ahead& ahead, const TileRows& rows) {
    const int64_t begin = rows.there.begin, old = coded_count(rows);
    if constexpr (coded) {
      int64_t groups = 0;
      for (int64_t j = begin; j < begin + old; j = (j / turned_keys + 1) * turned_keys)
        groups_[groups++] = rows.keys[j] - j % turned_keys * kv_.code_bytes - kv_.header_bytes;
      ahead.add(groups_, groups, q_.kv_heads * kv_.key_head);
    } else {
      ahead.add(rows.keys + begin, rows.there.end - begin, q_.kv_heads * kv_.key_head);
    }
  }

  void add_values(Ahead& ahead, const TileRows& rows) const {
    ahead.add(rows.values + rows.there.begin, coded_count(rows), q_.kv_heads * kv_.value_head);
  }

  /// How many of a tile's rows have the pool's format; recent ones have been read a moment ago.
  int64_t coded_count(const TileRows& rows) const {
    const int64_t count = rows.there.end - rows.there.begin;
    if (!coded) return count;
    return std::clamp<int64_t>(kv_.recent - rows.tile - rows.there.begin, 0, count);
  }

  /// Keys as columns, those of whole runs of turned_keys: what is not there is another key again.
  void turn(int64_t h) {
    const Span whole = rows_.there.widened(turned_keys);
    const auto tick = [this] { ahead_.tick(); };
    for (int64_t j = whole.begin; j < whole.end; j += turned_keys) {
      const uint8_t* at[turned_keys];
      const bool recent = coded && rows_.tile + j >= kv_.recent;
      const int64_t offset = h * (recent ? kv_.recent_key_head : kv_.key_head);
      for (int64_t i = 0; i < turned_keys; ++i)
        at[i] = rows_.keys[std::clamp(j + i, rows_.there.begin, rows_.there.end - 1)] + offset;
      float* const out = scratch_.keys + j;
      const int64_t dim = q_.spec->key_dim;
      if constexpr (coded) {
        // The clamped keys of a run with a border at its begin belong to it: runs are groups.
        if (recent) {
          turn_keys<V, KvFormat::f16>(at, nullptr, dim, out, tick);
          continue;
        }
        const int64_t from = std::max(j, rows_.there.begin);
        turn_keys<V, format>(at, rows_.keys[from] + offset - (from - j) * kv_.code_bytes - kv_.header_bytes,
                             dim, out, tick);
      } else {
        turn_keys<V, format>(at, nullptr, dim, out, tick);
      }
    }
  }

  /// Values as floats, so that many query rows share one conversion.
  void expand(int64_t h) {
    if constexpr (coded) {
      expand_rows<format>(rows_.there.begin, border(), h * kv_.value_head);
      expand_rows<KvFormat::f16>(border(), rows_.there.end, h * kv_.recent_value_head);
    } else {
      expand_rows<format>(rows_.there.begin, rows_.there.end, h * kv_.value_head);
    }
  }

  template <KvFormat stored>
  void expand_rows(int64_t begin, int64_t end, int64_t offset) {
    const int64_t dim = q_.spec->value_dim, whole = dim / V::width * V::width;
    for (int64_t j = begin; j < end; ++j) {
      if (j % 4 == 0) ahead_.tick();
      const uint8_t* from = rows_.values[j] + offset;
      float* const to = scratch_.values + j * tile_positions;
      const auto place = [to](int64_t i) {
        return to + i / tile_positions * tile_positions * tile_positions + i % tile_positions;
      };
      for (int64_t i = 0; i < whole; i += V::width)
        V::store(place(i), load_chunk<V, stored>(from, i / V::width));
      for (int64_t i = whole; i < q_.value_stride; ++i)
        *place(i) = i < dim ? load_one<stored>(from, i) : 0.0f;
    }
  }

  /// Query rows [row, row + count) of a head.
  void rows(int64_t h, int64_t row, int64_t count, bool expanded) {
    const int64_t at = h * q_.rows + row;
    const float* slopes = q_.slopes != nullptr ? q_.slopes + h * q_.group : nullptr;
    const Softening<V> softening(q_, rows_.tile, slopes);
    alignas(64) float top[softened_rows], carry[softened_rows], max[softened_rows];
    for (int64_t r = 0; r < count; r += V::rows) {
      const int64_t n = std::min<int64_t>(V::rows, count - r);
      const Span span = seen(row + r, n).widened(row_floats);
      float* const s = scratch_.scores + r * tile_positions;
      const LeftRows left{q_.q + (at + r) * q_.key_stride, q_.key_stride};
      if (direct())
        score_stored(h, left, n, span, s);
      else
        with_rows<V>(n, [&]<int R>() {
          multiply_columns<V, R>(left, Panels<V>{scratch_.keys}, 0, q_.spec->key_dim, span.begin,
                                 span.end, nullptr, s, tile_positions);
        });
      for (int64_t i = 0; i < n; ++i)
        top[r + i] = softening.prepare(row + r + i, span, s + i * tile_positions);
    }
    std::copy_n(part_.max + at, count, max);
    std::fill(max + count, max + padded_row(count), 0.0f);
    std::fill(top + count, top + padded_row(count), 0.0f);
    for (int64_t r = 0; r < count; r += V::width) softening.shrink(max + r, top + r, carry + r);
    std::copy_n(max, count, part_.max + at);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t first = r / V::rows * V::rows;
      const Span span = seen(row + first, std::min<int64_t>(V::rows, count - first));
      const float more = softening.weigh(span.widened(row_floats), top[r],
                                         scratch_.scores + r * tile_positions);
      part_.sum[at + r] = part_.sum[at + r] * carry[r] + more;
    }
    for (int64_t r = 0; r < count; r += V::rows)
      sum_values(h, row + r, std::min<int64_t>(V::rows, count - r),
                 scratch_.scores + r * tile_positions, carry + r, expanded);
  }

  /// Logits of up to V::rows rows; a key that is not there is another one again.
  void score_stored(int64_t h, const LeftRows& left, int64_t n, const Span& span, float* s) {
    if constexpr (V::width > 1 && format == KvFormat::f16) {
      const auto tick = [this] { ahead_.tick(); };
      for (int64_t j = span.begin; j < span.end; j += 16) {
        const uint8_t* at[16];
        for (int64_t i = 0; i < 16; ++i)
          at[i] = rows_.keys[std::clamp(j + i, rows_.there.begin, rows_.there.end - 1)] +
                  h * kv_.key_head;
        with_rows<V>(n, [&]<int R>() {
          stored_scores<V, R>(left, at, q_.spec->key_dim, s + j, tick);
        });
      }
    }
  }

  /// What rows [row, row + rows) see of the tile's positions that are there.
  Span seen(int64_t row, int64_t rows) const {
    const Span& there = rows_.there;
    return {std::max(there.begin, q_.low(row) - rows_.tile),
            std::min(there.end, q_.high(row + rows - 1) - rows_.tile)};
  }

  /// out = carry * out + weights . values, for up to V::rows rows of a head.
  void sum_values(int64_t h, int64_t row, int64_t n, const float* s, const float* carry,
                  bool expanded) {
    const Span span = seen(row, n);
    if (span.empty()) return;
    const LeftRows left{s, tile_positions};
    float* const out = part_.out + (h * q_.rows + row) * q_.value_stride;
    const auto add = [&](const auto& values, int64_t from, int64_t to, int64_t columns,
                         const float* shrink) {
      if (from >= to) return;
      with_rows<V>(n, [&]<int R>() {
        multiply_columns<V, R>(left, values, from, to, 0, columns, shrink, out, q_.value_stride);
      });
    };
    if (expanded)
      return add(Panels<V>{scratch_.values}, span.begin, span.end, q_.value_stride, carry);
    const int64_t dim = q_.spec->value_dim;
    if constexpr (!coded) {
      add(StoredValues<V, format>{rows_.values, h * kv_.value_head, &ahead_}, span.begin, span.end,
          dim, carry);
    } else {
      alignas(64) float ones[V::rows];
      std::fill(ones, ones + V::rows, 1.0f);
      const int64_t middle = std::clamp(border(), span.begin, span.end);
      const bool both = middle > span.begin;
      add(StoredValues<V, format>{rows_.values, h * kv_.value_head, &ahead_}, span.begin, middle, dim,
          carry);
      add(StoredValues<V, KvFormat::f16>{rows_.values, h * kv_.recent_value_head, &ahead_}, middle,
          span.end, dim, both ? ones : carry);
    }
  }

  const QueryRows& q_;
  const KvRows& kv_;
  const TileRows& rows_;
  const TileRows& next_;
  const Partial& part_;
  Scratch& scratch_;
  Ahead ahead_;
  const uint8_t* groups_[tile_positions / turned_keys];
};

template <class V, KvFormat format>
void run_segment(const QueryRows& q, const KvRows& kv, int64_t begin, int64_t end, int64_t horizon,
                 const Partial& part, Scratch& scratch) {
  const int64_t rows = q.kv_heads * q.rows;
  std::fill(part.max, part.max + rows, -INFINITY);
  std::fill(part.sum, part.sum + rows, 0.0f);
  std::fill(part.out, part.out + rows * q.value_stride, 0.0f);
  TileRows tiles[2];
  tiles[0].locate<format>(kv, begin, end);
  for (int turn = 0; !tiles[turn].there.empty() && tiles[turn].tile < end; turn ^= 1) {
    TileRows& next = tiles[turn ^ 1];
    next.locate<format>(kv, tiles[turn].end(), horizon);
    Tile<V, format>(q, kv, tiles[turn], next, part, scratch).run();
  }
}

template <class V>
void fold(const Partial& all, const Partial& part, int64_t rows, int64_t value_stride) {
  const auto factor = [](float max, float base) {
    alignas(64) float lanes[row_floats];
    V::store(lanes, V::exp(V::set(max - base)));
    return lanes[0];
  };
  for (int64_t r = 0; r < rows; ++r) {
    if (part.sum[r] == 0.0f) continue;  // the row sees nothing of this segment
    const float max = std::max(all.max[r], part.max[r]), base = std::max(max, -FLT_MAX);
    const float a = factor(all.max[r], base), b = factor(part.max[r], base);
    all.max[r] = max;
    all.sum[r] = all.sum[r] * a + part.sum[r] * b;
    float* const out = all.out + r * value_stride;
    const float* const more = part.out + r * value_stride;
    for (int64_t i = 0; i < value_stride; i += V::width)
      V::store(out + i, V::fma(V::load(out + i), V::set(a), V::mul(V::load(more + i), V::set(b))));
  }
}

template <class V>
AttentionKernels attention_kernels(KvFormat format) {
  switch (format) {
    case KvFormat::f32: return {run_segment<V, KvFormat::f32>, fold<V>};
    case KvFormat::f16: return {run_segment<V, KvFormat::f16>, fold<V>};
    case KvFormat::int8: return {run_segment<V, KvFormat::int8>, fold<V>};
    default: return {run_segment<V, KvFormat::int4>, fold<V>};
  }
}

}  // namespace
}  // namespace spike
