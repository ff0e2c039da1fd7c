// The inner part of attention, written once against the SIMD interface (see simd_avx512.h).
//
// Every result depends only on its own query row and on absolute positions: tiles and segments
// start at fixed positions, a logit is summed channel by channel and an output position by
// position, and a masked position contributes exactly nothing. So a row has the same bits in a
// prompt as in a decode step. Include inside a SPIKE_TARGET region.
#pragma once

#include "core/attention_product.h"
#include "core/softening.h"

namespace spike {
namespace {

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
    // Where one of a pair is not there, its weight is zero, and its value another one again.
    if (there.begin % 2 != 0) values[there.begin - 1] = values[there.begin];
    if (there.end % 2 != 0) values[there.end] = values[there.end - 1];
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
           q_.spec->key_dim % V::stored_keys == 0;
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
      // The clamped keys of a run with a border at its begin belong to it: runs are groups.
      if (coded && recent) {
        turn_keys<V, KvFormat::f16>(at, nullptr, dim, out, tick);
      } else {
        const int64_t from = std::max(j, rows_.there.begin);
        const uint8_t* header = rows_.keys[from] + offset - (from - j) * kv_.code_bytes;
        turn_keys<V, format>(at, header - kv_.header_bytes, dim, out, tick);
      }
      if constexpr (V::terms == 2) pair_channels<V>(out, dim);
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
    for (int64_t j = begin / V::terms * V::terms; j < end; j += V::terms) {
      if (j % 4 == 0) ahead_.tick();
      float* const to = scratch_.values + j / V::terms * tile_positions;
      for (int64_t i = 0; i < q_.value_stride; i += V::width) {
        auto columns = value_columns<stored>(rows_.values[j] + offset, i);
        if constexpr (V::terms == 2)
          columns = V::pair(columns, value_columns<stored>(rows_.values[j + 1] + offset, i));
        const int64_t panel = i / tile_positions * tile_positions * tile_positions;
        V::store(to + panel + i % tile_positions, columns);
      }
    }
  }

  /// Columns [i, i + width) of a stored value, zero behind the last one.
  template <KvFormat stored>
  typename V::F value_columns(const uint8_t* row, int64_t i) const {
    const int64_t dim = q_.spec->value_dim;
    if (i + V::width <= dim) return load_chunk<V, stored>(row, i / V::width);
    alignas(64) float columns[V::width] = {};
    for (int64_t e = 0; i + e < dim; ++e) columns[e] = load_one<stored>(row, i + e);
    return V::load(columns);
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
          multiply_columns<V, R>(left, Panels<V>{scratch_.keys}, 0, lanes(q_.spec->key_dim),
                                 span.begin, span.end, nullptr, s, tile_positions);
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
      const float more = softening.weigh(span, top[r], scratch_.scores + r * tile_positions);
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

  /// Lanes that so many terms of a sum take.
  static constexpr int64_t lanes(int64_t terms) { return (terms + V::terms - 1) / V::terms; }

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
        multiply_columns<V, R>(left, values, from / V::terms, lanes(to), 0, columns, shrink, out,
                               q_.value_stride);
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

template <class V, KvFormat format>
AttentionKernels kernels_for() {
  if constexpr (V::terms == 2)
    return {pair_queries<V>, run_segment<V, format>, fold<V>};
  else
    return {nullptr, run_segment<V, format>, fold<V>};
}

template <class V>
AttentionKernels attention_kernels(KvFormat format) {
  switch (format) {
    case KvFormat::f32: return kernels_for<V, KvFormat::f32>();
    case KvFormat::f16: return kernels_for<V, KvFormat::f16>();
    case KvFormat::int8: return kernels_for<V, KvFormat::int8>();
    default: return kernels_for<V, KvFormat::int4>();
  }
}

}  // namespace
}  // namespace spike
