// The products of attention: query rows by keys, weights by values.
//
// Lanes that carry two terms (V::terms, see simd_avx512_bf16.h) hold a pair of neighbours each: of
// channels in a product with keys, of positions in one with values. What is not there is zero.
// Include inside a SPIKE_TARGET region, after attention_kernel.h and a simd_*.h.
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

/// The right side of a product in scratch: row k, column c in panels of tile_positions.
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
    if constexpr (V::terms == 2)
      return V::pair(position(2 * k, c), position(2 * k + 1, c));
    else
      return position(k, c);
  }
  typename V::F position(int64_t j, int64_t c) const {
    return load_chunk<V, format>(rows[j] + offset, (whole ? 0 : chunk) + c);
  }
  [[gnu::always_inline]] void tick(int64_t k) const {
    if (k % (4 / V::terms) == 0) ahead->tick();
  }
};

/// Turned keys in place: channels 2i and 2i + 1 as the pairs of row i.
template <class V>
void pair_channels(float* keys, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 2)
    for (int64_t j = 0; j < turned_keys; j += V::width) {
      const float* from = keys + i * tile_positions + j;
      const auto second = i + 1 < dim ? V::load(from + tile_positions) : V::zero();
      V::store(keys + i / 2 * tile_positions + j, V::pair(V::load(from), second));
    }
}

/// Rows of queries in place: elements 2i and 2i + 1 as pair i.
template <class V>
void pair_queries(float* q, int64_t rows, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r, q += stride)
    for (int64_t i = 0; i < stride; i += 2 * V::width) {
      const auto second = i + V::width < stride ? V::load(q + i + V::width) : V::zero();
      V::store(q + i / 2, V::neighbours(V::load(q + i), second));
    }
}

/// The left side of a product.
struct LeftRows {
  const float* at;
  int64_t stride;
};

/// out[r][c] = carry[r] * out[r][c] + sum over k in [from, to) of left[r][k] right[k][c], in the
/// order of k; R rows, C registers of columns. Without carry the sum begins with zero. A k is what a
/// lane carries.
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
      for (int c = 0; c < C; ++c) acc[r][c] = V::dot(x, column[c], acc[r][c]);
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
  constexpr int lanes = V::stored_keys / V::terms;
  for (int64_t i = 0; i < dim; i += V::stored_keys) {
    F columns[lanes][registers];
    V::columns_f16(keys, 2 * i, columns);
    for (int e = 0; e < lanes; ++e) {
      if (V::terms * e % 8 == 0) tick();
      for (int r = 0; r < R; ++r) {
        const F query = V::set(left.at[r * left.stride + i / V::terms + e]);
        for (int c = 0; c < registers; ++c) acc[r][c] = V::dot(query, columns[e][c], acc[r][c]);
      }
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

}  // namespace
}  // namespace spike
