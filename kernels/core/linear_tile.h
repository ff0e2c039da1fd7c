// Dot products of tokens with packed rows, written once over the lanes of a tier (V).
// Included by each tier inside its target region, after tile_sources.h.
//
// For one row and one token the fp32 operations are, per block of 32 k in order of k:
//     part = sum over sub-blocks, in order, of scale * float(integer dot product)   (fused)
//     y = part * token_scale + y                                                    (fused)
//     y = min * (-token_scale * token_sum) + y      (fused; per sub-block, of formats with a min)
// and for f32, f16, bf16: per 256 k, acc = w * x + acc (fused) over k, then y = y + acc.
// Nothing else depends on how tokens and rows are grouped, hence batch invariance.
#pragma once

namespace spike {
namespace {

constexpr int64_t kChunk = 256;           // k that one pass decodes, or one float accumulator sums
constexpr int64_t kPrefetchAhead = 4096;  // bytes; see V::prefetch

/// R row groups x M tokens over tiles of source S.
template <class V, class S, int R, int M>
struct BlockDot {
  using Ints = typename V::Ints;
  using Floats = typename V::Floats;
  using Tile = typename S::Tile;
  static constexpr int kLines = 8 / S::kSubs;
  static constexpr int kAtOnce = V::template kTokensAtOnce<M>;

  /// The first token's blocks from the current k on; the next token's are `stride` blocks further.
  const InputBlock* input;
  int64_t stride;

  /// The integer that token m's dot product starts from: minus the offset of the codes.
  template <int B, int Sub>
  [[gnu::always_inline]] Ints start(int m) const {
    constexpr int kOffset = S::template kOffset<B, Sub>;
    const InputBlock& block = input[m * stride];
    if constexpr (kOffset < 0 || V::template kCentres<S::kLargest>)
      return V::zero_ints();
    else if constexpr (S::kSubs == 2)
      return V::template broadcast_shifted<kOffset>(block.negative_half + Sub);
    else
      return V::template broadcast_shifted<kOffset>(&block.negative_codes);
  }

  /// The codes of token m that meet a line.
  template <int Sub>
  [[gnu::always_inline]] const int8_t* four(int m, int line) const {
    return input[m * stride].codes + 16 * Sub + 4 * line;
  }

  /// sum = a sub-block's integer dot products with tokens [T, T + N), over as many lines at a time
  /// as 16 bits hold.
  template <int B, int Sub, int T, int N>
  [[gnu::always_inline]] void sum_words(const S (&w)[R], int p, Ints (&sum)[R][N]) const {
    constexpr int kMost = V::template kWordLines<S::kLargest>, kRun = kMost < kLines ? kMost : kLines;
#pragma GCC unroll 8
    for (int first = 0; first < kLines; first += kRun) {
      typename V::Words words[R][N];
#pragma GCC unroll 8
      for (int line = first; line < first + kRun; ++line)
        for (int r = 0; r < R; ++r) {
          const auto c = w[r].template codes<B, Sub>(p, line);
          for (int m = 0; m < N; ++m) {
            const auto products = V::word_products(c, four<Sub>(T + m, line));
            words[r][m] = line == first ? products : V::add_words(words[r][m], products);
          }
        }
      for (int r = 0; r < R; ++r)
        for (int m = 0; m < N; ++m)
          sum[r][m] = V::add_pairs(first == 0 ? start<B, Sub>(T + m) : sum[r][m], words[r][m]);
    }
  }

  /// The same, a line at a time.
  template <int B, int Sub, int T, int N>
  [[gnu::always_inline]] void sum_lines(const S (&w)[R], int p, Ints (&sum)[R][N]) const {
    for (int m = 0; m < N; ++m)
      for (int r = 0; r < R; ++r) sum[r][m] = start<B, Sub>(T + m);
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line)
      for (int r = 0; r < R; ++r) {
        const auto c = w[r].template codes<B, Sub>(p, line);
        for (int m = 0; m < N; ++m)
          sum[r][m] = V::template dot<S::kLargest>(sum[r][m], c, four<Sub>(T + m, line));
      }
  }

  template <int B, int Sub, int T, int N>
  [[gnu::always_inline]] void add_sub(const S (&w)[R], int p, Floats (&part)[R][N]) const {
    Ints sum[R][N];
    if constexpr (V::template kWordLines<S::kLargest> > 1)
      sum_words<B, Sub, T>(w, p, sum);
    else
      sum_lines<B, Sub, T>(w, p, sum);
    for (int r = 0; r < R; ++r) {
      const Floats scale = w[r].template scale<B, Sub>(p);
      for (int m = 0; m < N; ++m) {
        const Floats dot = V::to_floats(sum[r][m]);
        if constexpr (Sub == 0)
          part[r][m] = V::mul(dot, scale);
        else
          part[r][m] = V::fma(dot, scale, part[r][m]);
      }
    }
  }

  template <int B, int Sub, int T, int N>
  [[gnu::always_inline]] void subtract_min(const S (&w)[R], int p, Floats (&y)[R][M]) const {
    for (int r = 0; r < R; ++r) {
      const Floats min = w[r].template min<B, Sub>(p);
      for (int m = T; m < T + N; ++m) {
        const InputBlock& block = input[m * stride];
        const float sum = S::kSubs == 1 ? block.negative_sum : block.negative_half_sum[Sub];
        y[r][m] = V::fma(min, V::set(sum), y[r][m]);
      }
    }
  }

  /// y += one block of 32 k of tokens [T, M).
  template <int B, int T = 0>
  [[gnu::always_inline]] void add_tokens(const S (&w)[R], int p, Floats (&y)[R][M]) const {
    constexpr int N = kAtOnce < M - T ? kAtOnce : M - T;
    Floats part[R][N];
    add_sub<B, 0, T>(w, p, part);
    if constexpr (S::kSubs > 1) add_sub<B, 1, T>(w, p, part);
    for (int m = 0; m < N; ++m) {
      const Floats scale = V::set(input[(T + m) * stride].scale);
      for (int r = 0; r < R; ++r) y[r][T + m] = V::fma(part[r][m], scale, y[r][T + m]);
    }
    if constexpr (S::kHasMin) {
      subtract_min<B, 0, T, N>(w, p, y);
      if constexpr (S::kSubs > 1) subtract_min<B, 1, T, N>(w, p, y);
    }
    if constexpr (T + N < M) add_tokens<B, T + N>(w, p, y);
  }

  /// y += the first `periods` periods of tiles [0, count) of R row groups. `ahead`: prefetch what
  /// follows them.
  template <bool ahead>
  [[gnu::always_inline]] void add_tiles(const Tile* const (&tiles)[R], int64_t count, int periods,
                                        Floats (&y)[R][M]) {
    constexpr int64_t kPeriodBytes = sizeof(Tile) / S::kPeriods;
    for (int64_t i = 0; i < count; ++i) {
      S w[R];
      for (int r = 0; r < R; ++r) w[r].open(tiles[r][i]);
      for (int p = 0; p < (S::kPeriods == 1 ? 1 : periods); ++p) {
        if constexpr (ahead)
          for (int r = 0; r < R; ++r) {
            const auto* next = reinterpret_cast<const uint8_t*>(tiles[r] + i) + kPrefetchAhead;
            for (int64_t b = 0; b < kPeriodBytes; b += 64) V::prefetch(next + p * kPeriodBytes + b);
          }
        add_tokens<0>(w, p, y);
        ++input;
        if constexpr (S::kBlocks > 1) {
          add_tokens<1>(w, p, y);
          ++input;
        }
      }
    }
  }
};

/// The short tile that ends a row group of so many blocks of 32 k, if it does.
template <class S>
struct ShortTile {
  using Tile = typename S::Tile;
  static constexpr bool kPossible = S::kPeriods > 1;

  ShortTile() = default;
  ShortTile(const uint8_t* packed, int64_t blocks)
      : periods(kPossible ? static_cast<int>(blocks / S::kBlocks % S::kPeriods) : 0), at(packed) {}

  /// Where a whole tile of it is; read no further than its periods.
  const Tile* tile() {
    if constexpr (std::is_same_v<Tile, TileQ4K>) {
      whole_tile(at, periods, buffer);
      return &buffer;
    } else {
      return reinterpret_cast<const Tile*>(at);
    }
  }

  int periods = 0;
  const uint8_t* at = nullptr;
  std::conditional_t<std::is_same_v<Tile, TileQ4K>, Tile, char> buffer;
};

/// out[m, stride] = dot products of R row groups with M tokens, straight from the packed tiles.
template <class V, class S, int R, int M>
void dot_direct(const uint8_t* packed, int64_t group_bytes, const Input& input, int64_t token,
                float* out, int64_t stride) {
  using Tile = typename S::Tile;
  const int64_t blocks = input.k / 32, whole = blocks / (S::kPeriods * S::kBlocks);
  const Tile* tiles[R];
  ShortTile<S> last[R];
  typename V::Floats y[R][M];
  for (int r = 0; r < R; ++r, packed += group_bytes) {
    tiles[r] = reinterpret_cast<const Tile*>(packed);
    last[r] = {packed + whole * static_cast<int64_t>(sizeof(Tile)), blocks};
    for (int m = 0; m < M; ++m) y[r][m] = V::zero();
  }
  BlockDot<V, S, R, M> dot{input.blocks + token * blocks, blocks};
  const int periods = last[0].periods;
  for (int part = 0; part < (periods > 0 ? 2 : 1); ++part) {
    if (part == 1)
      for (int r = 0; r < R; ++r) tiles[r] = last[r].tile();
    dot.template add_tiles<true>(tiles, part == 0 ? whole : 1, part == 0 ? S::kPeriods : periods,
                                 y);
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) V::store_f32(out + m * stride + 16 * r, y[r][m]);
}

/// out[m, out_stride] += R row groups, M tokens, `periods` periods each of decoded tiles [0, count).
template <class V, class S, int R, int M>
void add_decoded(const typename Decoded<V, S>::Tile* const (&tiles)[R], int64_t count, int periods,
                 const InputBlock* input, int64_t stride, float* out, int64_t out_stride) {
  typename V::Floats y[R][M];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) y[r][m] = V::load_f32(out + m * out_stride + 16 * r);
  BlockDot<V, Decoded<V, S>, R, M>{input, stride}.template add_tiles<false>(tiles, count,
                                                                           periods, y);
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) V::store_f32(out + m * out_stride + 16 * r, y[r][m]);
}

/// The next `bytes` bytes of R row groups, fetched in equal shares while this stretch is computed:
/// all at once would hold up the loads behind them.
template <class V, int R>
struct Ahead {
  Ahead(const uint8_t* packed, int64_t group_bytes, int64_t bytes, int64_t shares)
      : next(packed), stride(group_bytes), left(bytes), share((bytes / shares + 63) / 64 * 64) {}

  void fetch() {
    for (int64_t b = 0; b < share && left > 0; b += 64, next += 64, left -= 64)
      for (int r = 0; r < R; ++r) V::prefetch(next + r * stride);
  }

  const uint8_t* next;
  int64_t stride, left, share;
};

/// add_decoded for any number of tokens: the most that registers allow at a time, then the rest.
template <class V, class S, int R, int M = V::template kTokensPerPass<S::kSubs>>
void add_decoded_tokens(const typename Decoded<V, S>::Tile* const (&tiles)[R], int64_t count,
                        int periods, const InputBlock* input, int64_t stride, int64_t tokens,
                        float* out, int64_t out_stride, Ahead<V, R>& ahead) {
  for (; tokens >= M; tokens -= M, input += M * stride, out += M * out_stride) {
    ahead.fetch();
    add_decoded<V, S, R, M>(tiles, count, periods, input, stride, out, out_stride);
  }
  if constexpr (M > 1)
    add_decoded_tokens<V, S, R, M - 1>(tiles, count, periods, input, stride, tokens, out,
                                       out_stride, ahead);
}

/// Many tokens: each stretch of kChunk k is decoded once, then read for every token, while the next
/// one comes from memory.
template <class V, class S, int R>
void dot_decoded(const uint8_t* packed, int64_t group_bytes, const Input& input, int64_t token,
                 int64_t tokens, float* out, int64_t out_stride) {
  using D = Decoded<V, S>;
  constexpr int64_t kSpan = 32 * S::kPeriods * S::kBlocks, kMostTiles = kChunk / kSpan;
  typename D::Tile decoded[R][kMostTiles];
  const typename D::Tile* tiles[R];
  for (int r = 0; r < R; ++r) tiles[r] = decoded[r];
  for (int64_t i = 0; i < tokens; ++i)
    for (int r = 0; r < R; ++r) V::store_f32(out + i * out_stride + 16 * r, V::zero());
  const int64_t stride = input.k / 32;
  for (int64_t k = 0; k < input.k; k += kChunk) {
    const int64_t left = (input.k - k) / kSpan, count = left < kMostTiles ? left : kMostTiles;
    ShortTile<S> last(nullptr, left > 0 ? 0 : stride);  // a chunk of its own
    for (int r = 0; r < R; ++r) {
      const uint8_t* group = packed + r * group_bytes + k / kSpan * sizeof(typename S::Tile);
      const auto* from = reinterpret_cast<const typename S::Tile*>(group);
      for (int64_t i = 0; i < count; ++i) D::decode(from[i], S::kPeriods, decoded[r][i]);
      if (left > 0) continue;
      last.at = group;
      D::decode(*last.tile(), last.periods, decoded[r][0]);
    }
    Ahead<V, R> ahead(packed + (k + kChunk) / kSpan * sizeof(typename S::Tile), group_bytes,
                      kMostTiles * sizeof(typename S::Tile),
                      (tokens - 1) / V::template kTokensPerPass<S::kSubs> + 1);
    const InputBlock* blocks = input.blocks + token * stride + k / 32;
    add_decoded_tokens<V, S, R>(tiles, left > 0 ? count : 1, left > 0 ? S::kPeriods : last.periods,
                                blocks, stride, tokens, out, out_stride, ahead);
  }
}

/// dot_direct for 1 to M tokens.
template <class V, class S, int R, int M>
void dot_direct_tokens(const uint8_t* packed, int64_t group_bytes, const Input& input,
                       int64_t token, int64_t tokens, float* out, int64_t stride) {
  if (tokens == M)
    return dot_direct<V, S, R, M>(packed, group_bytes, input, token, out, stride);
  if constexpr (M > 1)
    dot_direct_tokens<V, S, R, M - 1>(packed, group_bytes, input, token, tokens, out, stride);
}

template <class V, class S>
void dot_blocks(const Matrix& w, const Input& input, int64_t group, int64_t groups, int64_t token,
                int64_t tokens, float* out) {
  const int64_t group_bytes = static_cast<int64_t>(kTileRows * row_bytes(w.format, w.k));
  const uint8_t* packed = w.data + group * group_bytes;
  if (tokens > V::kMostDirect) {
    if constexpr (V::kPairsDecoded)
      if (groups == 2)
        return dot_decoded<V, S, 2>(packed, group_bytes, input, token, tokens, out, 32);
    for (int64_t g = 0; g < groups; ++g, packed += group_bytes, out += 16)
      dot_decoded<V, S, 1>(packed, group_bytes, input, token, tokens, out, 16 * groups);
    return;
  }
  if constexpr (V::kMostPaired > 1)
    if (groups == 2 && tokens > 1 && tokens <= V::kMostPaired)
      return dot_direct_tokens<V, S, 2, V::kMostPaired>(packed, group_bytes, input, token, tokens,
                                                        out, 32);
  for (int64_t g = 0; g < groups; ++g, packed += group_bytes, out += 16)
    dot_direct_tokens<V, S, 1, V::kMostDirect>(packed, group_bytes, input, token, tokens, out,
                                               16 * groups);
}

// --- f32, f16, bf16: a line is one k -------------------------------------------------------------

template <class V>
struct LinesF32 {
  static constexpr int64_t kBytes = 64;
  static auto load(const uint8_t* p) { return V::load_f32(p); }
};
template <class V>
struct LinesF16 {
  static constexpr int64_t kBytes = 32;
  static auto load(const uint8_t* p) { return V::load_f16(p); }
};
template <class V>
struct LinesBf16 {
  static constexpr int64_t kBytes = 32;
  static auto load(const uint8_t* p) { return V::load_bf16(p); }
};

/// out[m, 16 R] += R row groups, M tokens, k in [first, last).
template <class V, class L, int R, int M>
void add_values(const uint8_t* packed, int64_t group_bytes, const Input& input, int64_t token,
                int64_t first, int64_t last, float* out) {
  typename V::Floats sum[R][M];
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) sum[r][m] = V::zero();
  const float* x = input.x + token * input.k;
  for (int64_t k = first; k < last; ++k)
    for (int r = 0; r < R; ++r) {
      const uint8_t* line = packed + r * group_bytes + k * L::kBytes;
      V::prefetch(line + kPrefetchAhead / R);
      const auto w = L::load(line);
      for (int m = 0; m < M; ++m) sum[r][m] = V::fma(w, V::set(x[m * input.k + k]), sum[r][m]);
    }
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) {
      float* y = out + (m * R + r) * 16;
      V::store_f32(y, V::add(V::load_f32(y), sum[r][m]));
    }
}

/// add_values for any number of tokens: the most that registers allow at a time, then the rest.
template <class V, class L, int R, int M = V::template kTokensPerPass<1>>
void add_values_tokens(const uint8_t* packed, int64_t group_bytes, const Input& input,
                       int64_t token, int64_t tokens, int64_t first, int64_t last, float* out) {
  for (; tokens >= M; tokens -= M, token += M, out += 16 * R * M)
    add_values<V, L, R, M>(packed, group_bytes, input, token, first, last, out);
  if constexpr (M > 1)
    add_values_tokens<V, L, R, M - 1>(packed, group_bytes, input, token, tokens, first, last, out);
}

template <class V, class L, int R>
void dot_values_of(const uint8_t* packed, int64_t group_bytes, const Input& input, int64_t token,
                   int64_t tokens, float* out) {
  for (int64_t i = 0; i < tokens * R; ++i) V::store_f32(out + 16 * i, V::zero());
  for (int64_t first = 0; first < input.k; first += kChunk) {
    const int64_t last = first + kChunk < input.k ? first + kChunk : input.k;
    add_values_tokens<V, L, R>(packed, group_bytes, input, token, tokens, first, last, out);
  }
}

template <class V, class L>
void dot_values(const Matrix& w, const Input& input, int64_t group, int64_t groups, int64_t token,
                int64_t tokens, float* out) {
  const int64_t group_bytes = L::kBytes * w.k;
  const uint8_t* packed = w.data + group * group_bytes;
  switch (groups) {
    case 1: return dot_values_of<V, L, 1>(packed, group_bytes, input, token, tokens, out);
    case 2: return dot_values_of<V, L, 2>(packed, group_bytes, input, token, tokens, out);
    case 3: return dot_values_of<V, L, 3>(packed, group_bytes, input, token, tokens, out);
    case 4: return dot_values_of<V, L, 4>(packed, group_bytes, input, token, tokens, out);
  }
}

template <class V>
void dot_rows(const Matrix& w, const Input& input, int64_t group, int64_t groups, int64_t token,
              int64_t tokens, float* out) {
  switch (w.format) {
    case Format::f32:
      return dot_values<V, LinesF32<V>>(w, input, group, groups, token, tokens, out);
    case Format::f16:
      return dot_values<V, LinesF16<V>>(w, input, group, groups, token, tokens, out);
    case Format::bf16:
      return dot_values<V, LinesBf16<V>>(w, input, group, groups, token, tokens, out);
    case Format::q8_0:
      return dot_blocks<V, SourceQ8_0<V>>(w, input, group, groups, token, tokens, out);
    case Format::q5_0:
      return dot_blocks<V, SourceQ5_0<V>>(w, input, group, groups, token, tokens, out);
    case Format::q5_1:
      return dot_blocks<V, SourceQ5_1<V>>(w, input, group, groups, token, tokens, out);
    case Format::q4_0:
    case Format::int4_sym:
      return dot_blocks<V, SourceQ4_0<V>>(w, input, group, groups, token, tokens, out);
    case Format::q4_1:
      return dot_blocks<V, SourceQ4_1<V>>(w, input, group, groups, token, tokens, out);
    case Format::q2_k:
      return dot_blocks<V, SourceQ2K<V>>(w, input, group, groups, token, tokens, out);
    case Format::q3_k:
      return dot_blocks<V, SourceQ3K<V>>(w, input, group, groups, token, tokens, out);
    case Format::q4_k:
      return dot_blocks<V, SourceQ4K<V>>(w, input, group, groups, token, tokens, out);
    case Format::q5_k:
      return dot_blocks<V, SourceQ5K<V>>(w, input, group, groups, token, tokens, out);
    case Format::q6_k:
      return dot_blocks<V, SourceQ6K<V>>(w, input, group, groups, token, tokens, out);
  }
}

// --- from products to results --------------------------------------------------------------------

/// One token's rows; see LinearKernels::finish.
template <class V, bool kBias, bool kResidual>
void finish_row(const float* products, int64_t rows, const float* bias, const float* residual,
                float* y) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) {
    auto value = V::load_f32(products + r);
    if constexpr (kBias) value = V::add(value, V::load_f32(bias + r));
    if constexpr (kResidual) value = V::add(value, V::load_f32(residual + r));
    V::store_f32(y + r, value);
  }
  for (; r < rows; ++r) {
    float value = products[r];
    if constexpr (kBias) value += bias[r];
    if constexpr (kResidual) value += residual[r];
    y[r] = value;
  }
}

template <class V>
void finish_products(const float* products, int64_t stride, int64_t tokens, int64_t rows,
                     const float* bias, const float* residual, float* y, int64_t n) {
  const auto row = bias == nullptr ? (residual == nullptr ? finish_row<V, false, false>
                                                          : finish_row<V, false, true>)
                                   : (residual == nullptr ? finish_row<V, true, false>
                                                          : finish_row<V, true, true>);
  for (int64_t i = 0; i < tokens; ++i)
    row(products + i * stride, rows, bias, residual == nullptr ? nullptr : residual + i * n,
        y + i * n);
}

}  // namespace
}  // namespace spike
