// How the dot-product kernel reads each block format: a packed tile as lines of unsigned codes.
// Included by each tier inside its target region; V is the tier's lines_*.h.
//
// A tile is kPeriods x kBlocks blocks of 32 k; a block is kSubs sub-blocks (one weight scale each)
// of 32 / kSubs k, 4 k to a line. For block `B` of period `p`, sub-block `S` (compile-time B and S
// pick the bits):
//     weight[r] = scale<B, S>(p)[r] * (codes<B, S>(p, line)[r] - 2^kOffset<B, S>) - min<B, S>(p)[r]
#pragma once

namespace spike {
namespace {

constexpr int kNoOffset = -1;  // nothing is subtracted from the codes

template <class V>
struct SourceQ8_0 {
  using Tile = TileQ8_0;
  static constexpr int kPeriods = 1, kBlocks = 1, kSubs = 1;
  static constexpr bool kHasMin = false;
  static constexpr int kLargest = 255;  ///< of the codes, before a tier folds shifts into them
  template <int B, int S>
  static constexpr int kOffset = 7;

  void open(const Tile& t) {
    tile = &t;
    d = V::load_f16(t.d);
  }
  template <int B, int S>
  auto codes(int, int line) const {
    return V::load(tile->lines[line]);
  }
  template <int B, int S>
  auto scale(int) const {
    return d;
  }

  const Tile* tile = nullptr;
  typename V::Floats d;
};

/// The formats of nibbles: kOffset or an added constant, perhaps a fifth bit.
template <class V, class PackedTile, int kCodeOffset>
struct SourceNibbles {
  using Tile = PackedTile;
  static constexpr int kPeriods = 1, kBlocks = 1, kSubs = 1;
  static constexpr bool kHasMin = kCodeOffset == kNoOffset;
  static constexpr int kLargest = requires(Tile& t) { t.high; } ? 31 : 15;
  template <int B, int S>
  static constexpr int kOffset = kCodeOffset;

  void open(const Tile& t) {
    tile = &t;
    d = V::load_f16(t.d);
    if constexpr (kHasMin) minus_m = V::mul(V::load_f16(t.m), V::set(-1.f));
  }
  template <int B, int S>
  auto codes(int, int line) const {
    const auto nibbles = V::load(tile->nibbles[line % 4]);
    const auto low = line < 4 ? V::mask(nibbles, 0x0f) : V::template shift_right<4>(nibbles, 0x0f);
    if constexpr (requires { tile->high; })
      return V::template add_where<16>(low, tile->high[line]);
    else
      return low;
  }
  template <int B, int S>
  auto scale(int) const {
    return d;
  }
  template <int B, int S>
  auto min(int) const {
    return minus_m;
  }

  const Tile* tile = nullptr;
  typename V::Floats d, minus_m;
};
template <class V>
using SourceQ5_0 = SourceNibbles<V, TileQ5_0, 4>;
template <class V>
using SourceQ5_1 = SourceNibbles<V, TileQ5_1, kNoOffset>;
template <class V>
using SourceQ4_0 = SourceNibbles<V, TileQ4_0, 3>;
template <class V>
using SourceQ4_1 = SourceNibbles<V, TileQ4_1, kNoOffset>;

/// Two bits of q2_k and q3_k: where the tier allows it, 4^q times the code of sub-block q.
template <class V, int q>
auto pair_codes(typename V::Codes pairs) {
  if constexpr (q == 0 || V::kFoldShifts)
    return V::mask(pairs, 3 << (2 * q));
  else
    return V::template shift_right<2 * q>(pairs, 3);
}

template <class V>
struct SourceQ2K {
  using Tile = TileQ2K;
  static constexpr int kPeriods = 4, kBlocks = 2, kSubs = 2;
  static constexpr bool kHasMin = true;
  static constexpr int kLargest = 3;
  template <int B, int S>
  static constexpr int kOffset = kNoOffset;

  void open(const Tile& t) {
    tile = &t;
    d = V::load_f16(t.d);
    dmin = V::load_f16(t.dmin);
  }
  template <int B, int S>
  auto codes(int p, int line) const {
    return pair_codes<V, 2 * B + S>(V::load(tile->groups[p].pairs[line]));
  }
  template <int B, int S>
  auto scale(int p) const {
    constexpr int q = 2 * B + S;
    const auto scaled = V::mul(d, V::four_bits(tile->groups[p].scales[q], 0));
    if constexpr (q == 0 || !V::kFoldShifts)
      return scaled;
    else
      return V::mul(scaled, V::set(1.f / (1 << (2 * q))));
  }
  template <int B, int S>
  auto min(int p) const {
    return V::mul(dmin, V::four_bits(tile->groups[p].scales[2 * B + S], 1));
  }

  const Tile* tile = nullptr;
  typename V::Floats d, dmin;
};

template <class V>
struct SourceQ3K {
  using Tile = TileQ3K;
  static constexpr int kPeriods = 4, kBlocks = 2, kSubs = 2;
  static constexpr bool kHasMin = false;
  static constexpr int kLargest = 7;
  /// Bits by which the codes of sub-block q are shifted; 7 << 6 would not fit a byte.
  template <int q>
  static constexpr int kShift = V::kFoldShifts && q < 3 ? 2 * q : 0;
  template <int B, int S>
  static constexpr int kOffset = 2 + kShift<2 * B + S>;

  void open(const Tile& t) {
    tile = &t;
    d = V::load_f16(t.d);
  }
  template <int B, int S>
  auto codes(int p, int line) const {
    constexpr int q = 2 * B + S;
    const auto& group = tile->groups[p];
    const auto pairs = V::load(group.pairs[line]);
    if constexpr (q == 3)
      return V::template add_where<4>(V::template shift_right<6>(pairs, 3), group.high[q][line]);
    else
      return V::template add_where<4 << kShift<q>>(pair_codes<V, q>(pairs), group.high[q][line]);
  }
  template <int B, int S>
  auto scale(int p) const {
    constexpr int q = 2 * B + S;
    const auto& group = tile->groups[p];
    const auto stored = V::six_bits(group.scale_low[B], S, group.scale_high, 2 * q);
    const auto scaled = V::mul(d, V::add(stored, V::set(-32.f)));
    if constexpr (kShift<q> == 0)
      return scaled;
    else
      return V::mul(scaled, V::set(1.f / (1 << kShift<q>)));
  }

  const Tile* tile = nullptr;
  typename V::Floats d;
};

template <class V>
struct SourceQ4K {
  using Tile = TileQ4K;
  static constexpr int kPeriods = 4, kBlocks = 2, kSubs = 1;
  static constexpr bool kHasMin = true;
  static constexpr int kLargest = 15;
  static constexpr float kHighUnit = V::kFoldShifts ? 1.f / 16 : 1.f;
  template <int B, int S>
  static constexpr int kOffset = kNoOffset;

  void open(const Tile& t) {
    tile = &t;
    d = V::load_f16(t.d);
    dmin = V::load_f16(t.dmin);
  }
  template <int B, int S>
  auto codes(int p, int line) const {
    const auto nibbles = V::load(tile->nibbles[p][line]);
    if constexpr (B == 0)
      return V::mask(nibbles, 0x0f);
    else if constexpr (V::kFoldShifts)
      return V::mask(nibbles, 0xf0);
    else
      return V::template shift_right<4>(nibbles, 0x0f);
  }
  template <int B, int S>
  auto scale(int p) const {
    const auto scaled = V::mul(d, V::six_bits(tile->scale_low[p], B, tile->high[p], 2 * B));
    if constexpr (B == 0)
      return scaled;
    else
      return V::mul(scaled, V::set(kHighUnit));
  }
  template <int B, int S>
  auto min(int p) const {
    return V::mul(dmin, V::six_bits(tile->min_low[p], B, tile->high[p], 4 + 2 * B));
  }

  const Tile* tile = nullptr;
  typename V::Floats d, dmin;
};

template <class V>
struct SourceQ5K {
  using Tile = TileQ5K;
  static constexpr int kPeriods = 4, kBlocks = 2, kSubs = 1;
  static constexpr bool kHasMin = true;
  static constexpr int kLargest = 31;
  template <int B, int S>
  static constexpr int kOffset = kNoOffset;

  void open(const Tile& t) {
    tile = &t;
    d = V::load_f16(t.d);
    dmin = V::load_f16(t.dmin);
  }
  template <int B, int S>
  auto codes(int p, int line) const {
    const auto nibbles = V::load(tile->groups[p].nibbles[line]);
    const auto low = B == 0 ? V::mask(nibbles, 0x0f) : V::template shift_right<4>(nibbles, 0x0f);
    return V::template add_where<16>(low, tile->groups[p].high[B][line]);
  }
  template <int B, int S>
  auto scale(int p) const {
    const auto& group = tile->groups[p];
    return V::mul(d, V::six_bits(group.scale_low, B, group.scale_high, 2 * B));
  }
  template <int B, int S>
  auto min(int p) const {
    const auto& group = tile->groups[p];
    return V::mul(dmin, V::six_bits(group.min_low, B, group.scale_high, 4 + 2 * B));
  }

  const Tile* tile = nullptr;
  typename V::Floats d, dmin;
};

template <class V>
struct SourceQ6K {
  using Tile = TileQ6K;
  static constexpr int kPeriods = 4, kBlocks = 2, kSubs = 2;
  static constexpr bool kHasMin = false;
  static constexpr int kLargest = 63;
  static constexpr float kOddUnit = V::kFoldShifts ? 1.f / 4 : 1.f;
  template <int B, int S>
  static constexpr int kOffset = S == 1 && V::kFoldShifts ? 7 : 5;

  void open(const Tile& t) {
    tile = &t;
    d = V::load_f16(t.d);
  }
  template <int B, int S>
  auto codes(int p, int line) const {
    const auto nibbles = V::load(tile->groups[p].nibbles[B][line]);
    const auto pairs = V::load(tile->groups[p].pairs[line]);
    if constexpr (S == 0) {
      const auto low = V::mask(nibbles, 0x0f);
      if constexpr (B == 0)
        return V::merge(low, V::mask(pairs, 0x30));
      else
        return V::merge(low, V::template shift_right<2>(pairs, 0x30));
    } else if constexpr (V::kFoldShifts) {  // four times the code
      const auto high = V::mask(nibbles, 0xf0);
      if constexpr (B == 0)
        return V::merge(high, V::mask(pairs, 0x0c));
      else
        return V::merge(high, V::template shift_left<2>(pairs, 0x0c));
    } else {
      const auto high = V::template shift_right<2>(nibbles, 0x3c);
      if constexpr (B == 0)
        return V::merge(high, V::template shift_right<2>(pairs, 0x03));
      else
        return V::merge(high, V::mask(pairs, 0x03));
    }
  }
  template <int B, int S>
  auto scale(int p) const {
    const auto scaled = V::mul(d, V::load_i8(tile->groups[p].scales[2 * B + S]));
    if constexpr (S == 0)
      return scaled;
    else
      return V::mul(scaled, V::set(kOddUnit));
  }

  const Tile* tile = nullptr;
  typename V::Floats d;
};

/// A tile of source T, decoded once to be read for many tokens. Same interface as T.
template <class V, class T>
struct Decoded {
  static constexpr int kPeriods = T::kPeriods, kBlocks = T::kBlocks, kSubs = T::kSubs;
  static constexpr bool kHasMin = T::kHasMin;
  static constexpr int kLargest = T::kLargest;
  static constexpr int kLines = 8 / kSubs;  // per sub-block
  template <int B, int S>
  static constexpr int kOffset = T::template kOffset<B, S>;

  struct Tile {
    alignas(64) uint8_t lines[kPeriods][kBlocks][kSubs][kLines][64];
    alignas(64) float scales[kPeriods][kBlocks][kSubs][16];
    alignas(64) float mins[kPeriods][kBlocks][kSubs][kHasMin ? 16 : 1];
  };

  void open(const Tile& t) { tile = &t; }
  template <int B, int S>
  auto codes(int p, int line) const {
    return V::load(tile->lines[p][B][S][line]);
  }
  template <int B, int S>
  auto scale(int p) const {
    return V::load_f32(tile->scales[p][B][S]);
  }
  template <int B, int S>
  auto min(int p) const {
    return V::load_f32(tile->mins[p][B][S]);
  }

  template <int B>
  static void decode_block(const T& from, int p, Tile& to) {
    decode_sub<B, 0>(from, p, to);
    if constexpr (kSubs > 1) decode_sub<B, 1>(from, p, to);
  }
  template <int B, int S>
  static void decode_sub(const T& from, int p, Tile& to) {
    for (int line = 0; line < kLines; ++line)
      V::store(to.lines[p][B][S][line], from.template codes<B, S>(p, line));
    V::store_f32(to.scales[p][B][S], from.template scale<B, S>(p));
    if constexpr (kHasMin) V::store_f32(to.mins[p][B][S], from.template min<B, S>(p));
  }
  static void decode(const typename T::Tile& packed, int periods, Tile& to) {
    T from;
    from.open(packed);
    for (int p = 0; p < periods; ++p) {
      decode_block<0>(from, p, to);
      if constexpr (kBlocks > 1) decode_block<1>(from, p, to);
    }
  }

  const Tile* tile = nullptr;
};

}  // namespace
}  // namespace spike
