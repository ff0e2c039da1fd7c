// Keys of one tile as columns: what a row of queries is multiplied with, whatever their format.
// Include inside a SPIKE_TARGET region, after attention_kernel.h and a simd_*.h.
#pragma once

namespace spike {
namespace {

/// Bytes of 32 elements of a row.
template <KvFormat format>
constexpr int64_t group_bytes = format == KvFormat::f32    ? 128
                                : format == KvFormat::f16  ? 64
                                : format == KvFormat::int8 ? kv_int8_group_bytes
                                                           : kv_int4_group_bytes;

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

/// Element i of a row in f32 or f16; others are read in whole groups.
template <KvFormat format>
float load_one(const uint8_t* row, int64_t i) {
  float x = 0.0f;
  if constexpr (format == KvFormat::f32)
    std::memcpy(&x, row + 4 * i, sizeof x);
  else if constexpr (format == KvFormat::f16)
    x = load_half(row + 2 * i);
  return x;
}

/// Elements that turn_keys works on before it ticks.
template <KvFormat format>
constexpr int64_t turn_elements = format == KvFormat::f32 ? 4 : format == KvFormat::f16 ? 8 : 32;

/// out[i][j] = element i of key j, for `turned_keys` keys of `dim` elements; int4 keys are of one
/// group, whose scales and mins begin at `header`. Calls tick() now and then. Not inlined: GCC would
/// keep the addresses in vector registers.
template <class V, KvFormat format, class Tick>
[[gnu::noinline]] void turn_keys(const uint8_t* const* rows, const uint8_t* header, int64_t dim, float* out,
               const Tick& tick) {
  int64_t i = 0;
  if constexpr (V::width == 1 && format == KvFormat::int8) {
    for (; i < dim; ++i)
      for (int64_t j = 0; j < turned_keys; ++j)
        out[i * tile_positions + j] = load_chunk<V, format>(rows[j], i);
  } else if constexpr (V::width == 1 && format == KvFormat::int4) {
    for (; i < dim; ++i)
      for (int64_t j = 0; j < turned_keys; ++j) {
        const uint8_t* code = rows[j] + i / 32 * 16 + i % 16;
        const float q = i % 32 < 16 ? V::load_low(code) : V::load_high(code);
        const float scale = load_half(header + 2 * i), min = load_half(header + 2 * (dim + i));
        out[i * tile_positions + j] = V::fma(scale, q, min);
      }
  } else if constexpr (V::width > 1 && format == KvFormat::f16) {
    for (; i + 8 <= dim; i += 8, tick())
      V::turn_f16(rows, 2 * i, out + i * tile_positions, tile_positions);
  } else if constexpr (V::width > 1 && format == KvFormat::f32) {
    for (; i + 4 <= dim; i += 4, tick())
      V::turn_f32(rows, 4 * i, out + i * tile_positions, tile_positions);
  } else if constexpr (V::width > 1 && format == KvFormat::int8) {
    for (int64_t at = 0; i < dim; i += 32, at += kv_int8_group_bytes, tick())
      V::turn_i8(rows, at, out + i * tile_positions, tile_positions);
  } else if constexpr (V::width > 1) {
    for (; i < dim; i += 32, tick())
      V::turn_i4(rows, i / 2, header + 2 * i, header + 2 * (dim + i), out + i * tile_positions,
                 tile_positions);
  }
  for (; i < dim; ++i)
    for (int64_t j = 0; j < turned_keys; ++j)
      out[i * tile_positions + j] = load_one<format>(rows[j], i);
}

}  // namespace
}  // namespace spike
