// How the dot-product kernel reads each block format: a packed tile as lines of unsigned codes.
// Included by each tier inside its target region; V is the tier's lines_*.h.
//
// A tile is kPeriods x kBlocks blocks of 32 k; a block is kSubs sub-blocks (one weight scale each)
// of 32 / kSubs k, 4 k to a line. For block `B` of period `p`, sub-block `S` (compile-time B and S
// pick the bits):
//     weight[r] = scale<B, S>(p)[r] * (codes<B, S>(p, line)[r] - 2^kOffset<S>) - min<B>(p)[r]
#pragma once

namespace spike {
namespace {

constexpr int kNoOffset = -1;

template <class V>
struct SourceQ8_0 {
  using Tile = TileQ8_0;
  static constexpr int kPeriods = 1, kBlocks = 1, kSubs = 1;
  static constexpr bool kHasMin = false, kWide = true;
  template <int S>
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

template <class V>
struct SourceQ5_0 {
  using Tile = TileQ5_0;
  static constexpr int kPeriods = 1, kBlocks = 1, kSubs = 1;
  static constexpr bool kHasMin = false, kWide = false;
  template <int S>
  static constexpr int kOffset = 4;

  void open(const Tile& t) {
    tile = &t;
    d = V::load_f16(t.d);
  }
  template <int B, int S>
  auto codes(int, int line) const {
    const auto nibbles = V::load(tile->nibbles[line % 4]);
    const auto low = line < 4 ? V::mask(nibbles, 0x0f) : V::template shift_right<4>(nibbles, 0x0f);
    return V::add_sixteen(low, tile->high[line]);
  }
  template <int B, int S>
  auto scale(int) const {
    return d;
  }

  const Tile* tile = nullptr;
  typename V::Floats d;
};

template <class V>
struct SourceQ4K {
  using Tile = TileQ4K;
  static constexpr int kPeriods = 4, kBlocks = 2, kSubs = 1;
  static constexpr bool kHasMin = true, kWide = false;
  static constexpr float kHighUnit = V::kFoldShifts ? 1.f / 16 : 1.f;
  template <int S>
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
  template <int B>
  auto min(int p) const {
    return V::mul(dmin, V::six_bits(tile->min_low[p], B, tile->high[p], 4 + 2 * B));
  }

  const Tile* tile = nullptr;
  typename V::Floats d, dmin;
};

template <class V>
struct SourceQ6K {
  using Tile = TileQ6K;
  static constexpr int kPeriods = 4, kBlocks = 2, kSubs = 2;
  static constexpr bool kHasMin = false, kWide = false;
  static constexpr float kOddUnit = V::kFoldShifts ? 1.f / 4 : 1.f;
  template <int S>
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
  static constexpr bool kHasMin = T::kHasMin, kWide = T::kWide;
  static constexpr int kLines = 8 / kSubs;  // per sub-block
  template <int S>
  static constexpr int kOffset = T::template kOffset<S>;

  struct Tile {
    alignas(64) uint8_t lines[kPeriods][kBlocks][kSubs][kLines][64];
    alignas(64) float scales[kPeriods][kBlocks][kSubs][16];
    alignas(64) float mins[kPeriods][kBlocks][kHasMin ? 16 : 1];
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
  template <int B>
  auto min(int p) const {
    return V::load_f32(tile->mins[p][B]);
  }

  template <int B>
  static void decode_block(const T& from, int p, Tile& to) {
    decode_sub<B, 0>(from, p, to);
    if constexpr (kSubs > 1) decode_sub<B, 1>(from, p, to);
    if constexpr (kHasMin) V::store_f32(to.mins[p][B], from.template min<B>(p));
  }
  template <int B, int S>
  static void decode_sub(const T& from, int p, Tile& to) {
    for (int line = 0; line < kLines; ++line)
      V::store(to.lines[p][B][S][line], from.template codes<B, S>(p, line));
    V::store_f32(to.scales[p][B][S], from.template scale<B, S>(p));
  }
  static void decode(const typename T::Tile& packed, Tile& to) {
    T from;
    from.open(packed);
    for (int p = 0; p < kPeriods; ++p) {
      decode_block<0>(from, p, to);
      if constexpr (kBlocks > 1) decode_block<1>(from, p, to);
    }
  }

  const Tile* tile = nullptr;
};

}  // namespace
}  // namespace spike
