// The packed form of a short last super-block (short_block.h): a tile of 16 rows that ends after
// its last group of 64 k.
#pragma once

#include <cstddef>
#include <cstring>

#include "core/tiles.h"

namespace spike {

/// Copies the first `groups` groups of a tile to where a short one lies, or back. A short tile is a
/// whole one that ends early, but for q4_k, whose arrays are one per kind.
template <class T>
void cut_tile(const T& tile, int groups, uint8_t* to) {
  std::memcpy(to, &tile, offsetof(T, groups) + groups * sizeof(typename T::Group));
}
template <class T>
void whole_tile(const uint8_t* from, int groups, T& tile) {
  std::memcpy(&tile, from, offsetof(T, groups) + groups * sizeof(typename T::Group));
}
template <class Copy>
void for_parts(int groups, Copy&& copy) {
  const size_t numbers = 16 * static_cast<size_t>(groups);
  copy(offsetof(TileQ4K, d), 64);
  copy(offsetof(TileQ4K, scale_low), numbers);
  copy(offsetof(TileQ4K, min_low), numbers);
  copy(offsetof(TileQ4K, high), numbers);
  copy(offsetof(TileQ4K, nibbles), 512 * static_cast<size_t>(groups));
}
inline void cut_tile(const TileQ4K& tile, int groups, uint8_t* to) {
  for_parts(groups, [&](size_t at, size_t bytes) {
    std::memcpy(to, reinterpret_cast<const uint8_t*>(&tile) + at, bytes);
    to += bytes;
  });
}
inline void whole_tile(const uint8_t* from, int groups, TileQ4K& tile) {
  for_parts(groups, [&](size_t at, size_t bytes) {
    std::memcpy(reinterpret_cast<uint8_t*>(&tile) + at, from, bytes);
    from += bytes;
  });
}

}  // namespace spike
