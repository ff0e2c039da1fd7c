// The inner part of attention, written once against the SIMD interface (see simd_avx512.h).
//
// Every result depends only on its own query row and on absolute positions: tiles and segments
// start at fixed positions, a masked position contributes exactly nothing. So a row has the same
// bits in a prompt as in a decode step. Include inside a SPIKE_TARGET region.
#pragma once

namespace spike {
namespace {

/// Lanes [c * width, ...) of a stored row, as floats.
template <class V, KvFormat format>
typename V::F load_chunk(const uint8_t* row, int64_t c) {
  const int64_t at = c * V::width, in_group = at % 32;
  if constexpr (format == KvFormat::f32) {
    return V::load(reinterpret_cast<const float*>(row) + at);
  } else if constexpr (format == KvFormat::f16) {
    return V::load_f16(row + 2 * at);
  } else if constexpr (format == KvFormat::int8) {
    const uint8_t* group = row + at / 32 * kv_int8_group_bytes;
    return V::mul(V::spread_f16(group), V::load_i8(group + 2 + in_group));
  } else {
    const uint8_t* group = row + at / 32 * kv_int4_group_bytes;
    const auto q = in_group < 16 ? V::load_low(group + 4 + in_group)
                                 : V::load_high(group + 4 + in_group - 16);
    return V::fma(V::spread_f16(group), q, V::spread_f16(group + 2));
  }
}

/// The last n < width elements of a row (f32 and f16 only: grouped rows have no such rest).
template <class V, KvFormat format>
typename V::F load_rest(const uint8_t* row, int64_t c, int64_t n) {
  if constexpr (format == KvFormat::f32)
    return V::load_part(reinterpret_cast<const float*>(row) + c * V::width, n);
  else if constexpr (format == KvFormat::f16)
    return V::load_f16_part(row + 2 * c * V::width, n);
  else
    return V::zero();
}

/// Keys or values of one format, found by address.
template <class V, KvFormat format>
struct CachedRows {
  const uint8_t* const* at;

  typename V::F chunk(int64_t j, int64_t c) const { return load_chunk<V, format>(at[j], c); }
  typename V::F rest(int64_t j, int64_t c, int64_t n) const {
    return load_rest<V, format>(at[j], c, n);
  }
};

/// Coded keys of one group of tokens: rows of nibbles, and what their channels share.
template <class V>
struct CodedKeys {
  const uint8_t* const* at;
  const uint8_t* scales;
  const uint8_t* mins;

  typename V::F chunk(int64_t j, int64_t c) const {
    const int64_t lane = c * V::width, in_group = lane % 32;
    const uint8_t* codes = at[j] + lane / 32 * 16;
    const auto q = in_group < 16 ? V::load_low(codes + in_group) : V::load_high(codes + in_group - 16);
    return V::fma(V::load_f16(scales + 2 * lane), q, V::load_f16(mins + 2 * lane));
  }
  typename V::F rest(int64_t, int64_t, int64_t) const { return V::zero(); }
};

/// Rows that are needed soon: touched while others are worked on, as no hardware prefetcher follows
/// a block table.
struct Ahead {
  const uint8_t* const* rows = nullptr;
  int64_t count = 0;
  int64_t bytes = 0;

  /// Inlined by force: GCC 12 takes a function that only prefetches for one without effect, and
  /// drops calls to it.
  [[gnu::always_inline]] void touch(int64_t begin, int64_t end) const {
    for (int64_t j = begin; j < std::min(end, count); ++j) {
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(rows[j] + b);
      __builtin_prefetch(rows[j] + bytes - 1);
    }
  }
};

/// s[r][j] = q[r] . keys[j] for R rows and `count` keys (a multiple of 4).
template <class V, int R, class Keys>
void scores(const float* q, int64_t q_stride, Keys keys, int64_t count, int64_t dim, float* s,
            Ahead ahead) {
  using F = typename V::F;
  const int64_t chunks = dim / V::width, rest = dim % V::width;
  for (int64_t j = 0; j < count; j += 4) {
    ahead.touch(j, j + 4);
    F acc[R][4];
    for (auto& row : acc)
      for (F& a : row) a = V::zero();
    for (int64_t c = 0; c < chunks; ++c) {
      F key[4];
      for (int i = 0; i < 4; ++i) key[i] = keys.chunk(j + i, c);
      for (int r = 0; r < R; ++r) {
        const F query = V::load(q + r * q_stride + c * V::width);
        for (int i = 0; i < 4; ++i) acc[r][i] = V::fma(query, key[i], acc[r][i]);
      }
    }
    if (rest != 0) {
      for (int i = 0; i < 4; ++i) {
        const F key = keys.rest(j + i, chunks, rest);
        for (int r = 0; r < R; ++r)
          acc[r][i] = V::fma(V::load(q + r * q_stride + chunks * V::width), key, acc[r][i]);
      }
    }
    for (int r = 0; r < R; ++r)
      V::sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], s + r * score_stride + j);
  }
}

template <class V, class Keys>
void all_scores(const QueryRows& q, Keys keys, int64_t count, int64_t dim, float* s,
                Ahead ahead = {}) {
  for (int64_t r = 0; r < q.rows; r += 4, ahead = {}) {
    const float* from = q.q + r * q.key_stride;
    float* to = s + r * score_stride;
    switch (std::min<int64_t>(q.rows - r, 4)) {
      case 1: scores<V, 1>(from, q.key_stride, keys, count, dim, to, ahead); break;
      case 2: scores<V, 2>(from, q.key_stride, keys, count, dim, to, ahead); break;
      case 3: scores<V, 3>(from, q.key_stride, keys, count, dim, to, ahead); break;
      default: scores<V, 4>(from, q.key_stride, keys, count, dim, to, ahead); break;
    }
  }
}

template <class V, KvFormat format>
struct Tile {
  using F = typename V::F;

  /// o[r] = o[r] * carry[r] + sum_j p[r][j] values[j] for R rows, C chunks from chunk c on.
  template <int R, int C>
  static void weigh(const float* p, const uint8_t* const* values, int64_t count, int64_t c,
                    const float* carry, float* o, int64_t o_stride, const Ahead& ahead) {
    F acc[R][C];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i)
        acc[r][i] = V::mul(V::load(o + r * o_stride + (c + i) * V::width), V::set(carry[r]));
    for (int64_t j = 0; j < count; ++j) {
      ahead.touch(j, j + 1);
      F value[C];
      for (int i = 0; i < C; ++i) value[i] = load_chunk<V, format>(values[j], c + i);
      for (int r = 0; r < R; ++r) {
        const F weight = V::set(p[r * score_stride + j]);
        for (int i = 0; i < C; ++i) acc[r][i] = V::fma(weight, value[i], acc[r][i]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) V::store(o + r * o_stride + (c + i) * V::width, acc[r][i]);
  }

  /// The same for the last `rest` elements of one row.
  static void weigh_rest(const float* p, const uint8_t* const* values, int64_t count, int64_t c,
                         int64_t rest, float carry, float* o) {
    F acc = V::mul(V::load(o + c * V::width), V::set(carry));
    for (int64_t j = 0; j < count; ++j)
      acc = V::fma(V::set(p[j]), load_rest<V, format>(values[j], c, rest), acc);
    V::store(o + c * V::width, acc);
  }

  template <int R>
  static void weigh_rows(const float* p, const uint8_t* const* values, int64_t count, int64_t dim,
                         const float* carry, float* o, int64_t o_stride, Ahead ahead) {
    const int64_t chunks = dim / V::width, rest = dim % V::width;
    int64_t c = 0;
    for (; c + 4 <= chunks; c += 4, ahead = {})
      weigh<R, 4>(p, values, count, c, carry, o, o_stride, ahead);
    for (; c < chunks; ++c, ahead = {})
      weigh<R, 1>(p, values, count, c, carry, o, o_stride, ahead);
    if (rest == 0) return;
    for (int r = 0; r < R; ++r)
      weigh_rest(p + r * score_stride, values, count, c, rest, carry[r], o + r * o_stride);
  }

  static void all_weigh(const float* p, int64_t rows, const uint8_t* const* values, int64_t count,
                        int64_t dim, const float* carry, float* o, int64_t o_stride,
                        Ahead ahead = {}) {
    for (int64_t r = 0; r < rows; r += 4, ahead = {}) {
      const float* from = p + r * score_stride;
      float* to = o + r * o_stride;
      switch (std::min<int64_t>(rows - r, 4)) {
        case 1: weigh_rows<1>(from, values, count, dim, carry + r, to, o_stride, ahead); break;
        case 2: weigh_rows<2>(from, values, count, dim, carry + r, to, o_stride, ahead); break;
        case 3: weigh_rows<3>(from, values, count, dim, carry + r, to, o_stride, ahead); break;
        default: weigh_rows<4>(from, values, count, dim, carry + r, to, o_stride, ahead); break;
      }
    }
  }
};

/// Copies keys or values to fp32 scratch, so that many query rows share one conversion; puts the
/// copies' addresses in place of theirs.
template <class V, class Rows>
void expand(Rows rows, const uint8_t** at, int64_t count, int64_t dim, float* out,
            int64_t stride) {
  const int64_t chunks = dim / V::width, rest = dim % V::width;
  for (int64_t j = 0; j < count; ++j, out += stride) {
    for (int64_t c = 0; c < chunks; ++c) V::store(out + c * V::width, rows.chunk(j, c));
    if (rest != 0) V::store(out + chunks * V::width, rows.rest(j, chunks, rest));
    at[j] = reinterpret_cast<const uint8_t*>(out);
  }
}

/// softcap * tanh(x / softcap) in place over one row of a tile.
template <class V>
void cap_row(float* s, float softcap) {
  const auto twice = V::set(2.0f / softcap), one = V::set(1.0f);
  for (int64_t j = 0; j < tile_positions; j += V::width) {
    const auto e = V::exp(V::mul(V::load(s + j), twice));
    const auto tanh = V::sub(one, V::div(V::set(2.0f), V::add(e, one)));
    V::store(s + j, V::mul(tanh, V::set(softcap)));
  }
}

/// ALiBi (Press et al. 2022): a logit falls by slope for every position that the key lies back.
inline void bias_row(float* s, float slope, int64_t distance) {
  for (int64_t j = 0; j < tile_positions; ++j)
    s[j] += slope * static_cast<float>(static_cast<int32_t>(distance + j));
}

/// Turns one row of logits into weights relative to the row's new maximum; updates max and sum.
/// Returns the factor by which what was accumulated so far shrinks.
template <class V>
float soft_row(float* s, float& max, float& sum) {
  auto top = V::load(s);
  for (int64_t j = V::width; j < tile_positions; j += V::width) top = V::max(V::load(s + j), top);
  const float new_max = std::max(max, V::top(top));
  const float base = new_max == -INFINITY ? 0.0f : new_max;
  auto total = V::zero();
  for (int64_t j = 0; j < tile_positions; j += V::width) {
    const auto p = V::exp(V::sub(V::load(s + j), V::set(base)));
    V::store(s + j, p);
    total = V::add(total, p);
  }
  const float carry = max == new_max ? 1.0f : std::exp(max - base);
  sum = sum * carry + V::sum(total);
  max = new_max;
  return carry;
}

/// Masks and normalises the logits of positions [tile, tile + tile_positions) of every row.
template <class V>
void soften(const QueryRows& q, int64_t tile, float* s, float* carry, const Partial& part) {
  for (int64_t r = 0; r < q.rows; ++r, s += score_stride) {
    const int64_t low = std::clamp<int64_t>(q.low(r) - tile, 0, tile_positions);
    const int64_t high = std::clamp<int64_t>(q.high(r) - tile, 0, tile_positions);
    carry[r] = 1.0f;
    if (low >= high) {
      std::fill(s, s + tile_positions, 0.0f);
      continue;
    }
    if (q.spec->softcap > 0.0f) cap_row<V>(s, q.spec->softcap);
    if (q.slopes != nullptr) bias_row(s, q.slopes[r % q.group], tile + 1 - q.high(r));
    std::fill(s, s + low, -INFINITY);
    std::fill(s + high, s + tile_positions, -INFINITY);
    carry[r] = soft_row<V>(s, part.max[r], part.sum[r]);
  }
}

/// Addresses of the rows of one tile's positions [begin, begin + count).
struct TileRows {
  int64_t begin = 0;
  int64_t count = 0;
  const uint8_t* keys[tile_positions];
  const uint8_t* values[tile_positions];

  /// The tile that holds `at`, up to `end`; empty if that is reached.
  template <KvFormat format>
  void locate(const KvRows& kv, int64_t at, int64_t end) {
    begin = at;
    count = std::max<int64_t>(0, std::min(end, (at / tile_positions + 1) * tile_positions) - at);
    if constexpr (format == KvFormat::int4)
      kv.locate_coded(begin, count, keys, values);
    else
      kv.locate(begin, count, keys, values);
  }

  int64_t tile() const { return begin / tile_positions * tile_positions; }

  /// Keys are read in fours: the last one again, masked afterwards. Returns the count to read.
  int64_t pad() {
    const int64_t padded = (count + 3) / 4 * 4;
    std::fill(keys + count, keys + padded, keys[count - 1]);
    return padded;
  }
};

/// One tile whose rows lie in scratch.
template <class V>
void run_expanded(const QueryRows& q, const TileRows& rows, int64_t padded, const Partial& part,
                  Scratch& scratch) {
  // sum4 writes whole fours, so up to 3 logits may land past the tile: scores are that much wider.
  float* s = scratch.scores + (rows.begin - rows.tile());
  all_scores<V>(q, CachedRows<V, KvFormat::f32>{rows.keys}, padded, q.key_stride, s);
  soften<V>(q, rows.tile(), scratch.scores, scratch.carry, part);
  Tile<V, KvFormat::f32>::all_weigh(s, q.rows, rows.values, rows.count, q.value_stride,
                                    scratch.carry, part.out, q.value_stride);
}

/// One tile; `next` is the one after it.
template <class V, KvFormat format>
void run_tile(const QueryRows& q, TileRows& rows, const TileRows& next, const Partial& part,
              Scratch& scratch) {
  const int64_t count = rows.count, padded = rows.pad();
  const CachedRows<V, format> keys{rows.keys}, values{rows.values};
  if (format != KvFormat::f32 && q.rows >= rows_worth_expanding) {
    expand<V>(keys, rows.keys, padded, q.spec->key_dim, scratch.keys, q.key_stride);
    expand<V>(values, rows.values, count, q.spec->value_dim, scratch.values, q.value_stride);
    run_expanded<V>(q, rows, padded, part, scratch);
    return;
  }
  const auto row_bytes = [](int64_t dim) {
    return static_cast<int64_t>(kv_row_bytes(format, dim));
  };
  const Ahead these{rows.values, count, row_bytes(q.spec->value_dim)};
  const Ahead those{next.keys, next.count, row_bytes(q.spec->key_dim)};
  float* s = scratch.scores + (rows.begin - rows.tile());
  all_scores<V>(q, keys, padded, q.spec->key_dim, s, these);
  soften<V>(q, rows.tile(), scratch.scores, scratch.carry, part);
  Tile<V, format>::all_weigh(s, q.rows, rows.values, count, q.spec->value_dim, scratch.carry,
                             part.out, q.value_stride, those);
}

/// Calls use(keys, first, count) for each group of coded keys in a tile, then for its f16 keys;
/// `keys` may be read up to a multiple of 4.
template <class V, class Use>
void each_run(const TileRows& rows, const KvRows& kv, Use use) {
  const int64_t end = rows.begin + rows.count;
  const uint8_t* at[tile_positions];
  for (int64_t from = rows.begin, to; from < end; from = to) {
    const int64_t border = (from / kv_group_tokens + 1) * kv_group_tokens;
    to = std::min(end, from < kv.recent ? border : end);
    const int64_t first = from - rows.begin, count = to - from;
    std::copy_n(rows.keys + first, count, at);
    std::fill(at + count, at + (count + 3) / 4 * 4, at[count - 1]);
    if (from >= kv.recent) {
      use(CachedRows<V, KvFormat::f16>{at}, first, count);
      continue;
    }
    const uint8_t* header = at[0] - from % kv_group_tokens * kv.code_bytes - kv.header_bytes;
    use(CodedKeys<V>{at, header, header + kv.header_bytes / 2}, first, count);
  }
}

/// One tile of the int4 cache: coded up to the queries' own group of tokens, f16 from there.
template <class V>
void run_coded_tile(const QueryRows& q, const KvRows& kv, TileRows& rows, const TileRows& next,
                    const Partial& part, Scratch& scratch) {
  const int64_t key_dim = q.spec->key_dim, value_dim = q.spec->value_dim;
  const int64_t old = std::clamp<int64_t>(kv.recent - rows.begin, 0, rows.count);
  const int64_t young = rows.count - old;
  const CachedRows<V, KvFormat::int4> old_values{rows.values};
  const CachedRows<V, KvFormat::f16> young_values{rows.values + old};
  if (q.rows >= rows_worth_expanding) {
    const auto copy = [&](const auto& keys, int64_t first, int64_t count) {
      expand<V>(keys, rows.keys + first, count, key_dim, scratch.keys + first * q.key_stride,
                q.key_stride);
    };
    each_run<V>(rows, kv, copy);
    expand<V>(old_values, rows.values, old, value_dim, scratch.values, q.value_stride);
    expand<V>(young_values, rows.values + old, young, value_dim,
              scratch.values + old * q.value_stride, q.value_stride);
    run_expanded<V>(q, rows, rows.pad(), part, scratch);
    return;
  }
  float* s = scratch.scores + (rows.begin - rows.tile());
  const int64_t value_bytes = static_cast<int64_t>(kv_row_bytes(KvFormat::int4, value_dim));
  const auto score = [&](const auto& keys, int64_t first, int64_t count) {
    const Ahead these{rows.values + first, std::min(count, old - first), value_bytes};
    all_scores<V>(q, keys, (count + 3) / 4 * 4, key_dim, s + first, these);
  };
  each_run<V>(rows, kv, score);
  soften<V>(q, rows.tile(), scratch.scores, scratch.carry, part);
  if (old > 0) {
    const Ahead those{next.keys, next.count, kv.code_bytes};
    Tile<V, KvFormat::int4>::all_weigh(s, q.rows, rows.values, old, value_dim, scratch.carry,
                                       part.out, q.value_stride, those);
    std::fill(scratch.carry, scratch.carry + q.rows, 1.0f);  // has been taken into account
  }
  if (young == 0) return;
  Tile<V, KvFormat::f16>::all_weigh(s + old, q.rows, rows.values + old, young, value_dim,
                                    scratch.carry, part.out, q.value_stride);
}

template <class V, KvFormat format>
void run_segment(const QueryRows& q, const KvRows& kv, int64_t begin, int64_t end,
                 const Partial& part, Scratch& scratch) {
  std::fill(part.max, part.max + q.rows, -INFINITY);
  std::fill(part.sum, part.sum + q.rows, 0.0f);
  std::fill(part.out, part.out + q.rows * q.value_stride, 0.0f);
  TileRows tiles[2];
  tiles[0].locate<format>(kv, begin, end);
  for (int turn = 0; tiles[turn].count > 0; turn ^= 1) {
    tiles[turn ^ 1].locate<format>(kv, tiles[turn].begin + tiles[turn].count, end);
    if constexpr (format == KvFormat::int4)
      run_coded_tile<V>(q, kv, tiles[turn], tiles[turn ^ 1], part, scratch);
    else
      run_tile<V, format>(q, tiles[turn], tiles[turn ^ 1], part, scratch);
  }
}

template <class V>
SegmentKernel segment_kernel(KvFormat format) {
  switch (format) {
    case KvFormat::f32: return run_segment<V, KvFormat::f32>;
    case KvFormat::f16: return run_segment<V, KvFormat::f16>;
    case KvFormat::int8: return run_segment<V, KvFormat::int8>;
    default: return run_segment<V, KvFormat::int4>;
  }
}

}  // namespace
}  // namespace spike
