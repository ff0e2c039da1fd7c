// Encoding of keys and values, written once against the SIMD interface (see simd_avx512.h). The
// bytes are the same in every tier. Include inside a SPIKE_TARGET region.
#pragma once

namespace spike {
namespace {

constexpr int64_t coded_group = 32;
constexpr float half_max = 65504.0f;

/// 0 where everything added so far is finite, else NaN.
template <class V>
typename V::F add_broken(typename V::F x, typename V::F broken) {
  return V::fma(x, V::zero(), broken);
}

/// 1 / scale as the reader will see it; 0 where the scale vanished in half precision.
inline float inverse(const uint8_t* scale) {
  const float s = load_half(scale);
  return s > 0.0f ? 1.0f / s : 0.0f;
}

/// Stores scale and min of 32 elements in [low, high], each clamped to what a half holds; NaN as the
/// min of a group that is not finite. Returns 1 / scale as the reader will see it, 0 if all codes
/// are 0.
inline float store_range(float low, float high, bool finite, uint8_t* scale, uint8_t* min) {
  store_half(min, finite ? std::clamp(low, -half_max, half_max) : std::nanf(""));
  store_half(scale, finite ? std::min(high / 15.0f - low / 15.0f, half_max) : 0.0f);
  return finite ? inverse(scale) : 0.0f;
}

/// (x - min) * scale within 0..15; 0 for NaN.
template <class V>
typename V::F nibbles(typename V::F x, typename V::F min, typename V::F scale) {
  return V::min(V::max(V::mul(V::sub(x, min), scale), V::zero()), V::set(15.0f));
}

template <class V>
void encode_int8(const float* x, uint8_t* out) {
  auto tops = V::zero(), broken = V::zero();
  for (int64_t i = 0; i < coded_group; i += V::width) {
    const auto v = V::load(x + i);
    tops = V::max(V::max(v, V::sub(V::zero(), v)), tops);
    broken = add_broken<V>(v, broken);
  }
  const bool finite = V::sum(broken) == 0.0f;
  store_half(out, finite ? std::min(V::top(tops) / 127.0f, half_max) : std::nanf(""));
  const auto scale = V::set(finite ? inverse(out) : 0.0f), limit = V::set(127.0f);
  for (int64_t i = 0; i < coded_group; i += V::width) {
    const auto q = V::max(V::min(V::mul(V::load(x + i), scale), limit), V::set(-127.0f));
    V::store_i8(out + 2 + i, finite ? q : V::zero());
  }
}

template <class V>
void encode_int4(const float* x, uint8_t* out) {
  auto highs = V::load(x), lows = highs, broken = V::zero();
  for (int64_t i = 0; i < coded_group; i += V::width) {
    const auto v = V::load(x + i);
    highs = V::max(v, highs), lows = V::min(v, lows);
    broken = add_broken<V>(v, broken);
  }
  const float low = -V::top(V::sub(V::zero(), lows));
  const auto scale =
      V::set(store_range(low, V::top(highs), V::sum(broken) == 0.0f, out, out + 2));
  const auto min = V::set(load_half(out + 2));
  for (int64_t i = 0; i < coded_group / 2; i += V::width)
    V::store_nibbles(out + 4 + i, nibbles<V>(V::load(x + i), min, scale),
                     nibbles<V>(V::load(x + i + coded_group / 2), min, scale));
}

/// Channels [from, from + 32) of a group of keys.
template <class V>
void encode_channels(const uint8_t* const* rows, int64_t from, int64_t dim, uint8_t* out) {
  alignas(64) float low[coded_group], high[coded_group], broken[coded_group], scale[coded_group],
      min[coded_group];
  for (int64_t c = 0; c < coded_group; c += V::width) {
    auto highs = V::load_f16(rows[0] + 2 * (from + c)), lows = highs, bad = V::zero();
    for (int64_t t = 0; t < kv_group_tokens; ++t) {
      const auto v = V::load_f16(rows[t] + 2 * (from + c));
      highs = V::max(v, highs), lows = V::min(v, lows);
      bad = add_broken<V>(v, bad);
    }
    V::store(low + c, lows), V::store(high + c, highs), V::store(broken + c, bad);
  }
  for (int64_t c = 0; c < coded_group; ++c) {
    uint8_t* const header = out + 2 * (from + c);
    scale[c] = store_range(low[c], high[c], broken[c] == 0.0f, header, header + 2 * dim);
    min[c] = load_half(header + 2 * dim);
  }
  for (int64_t t = 0; t < kv_group_tokens; ++t) {
    uint8_t* const row = out + 4 * dim + (t * dim + from) / 2;
    const auto code = [&](int64_t c) {
      return nibbles<V>(V::load_f16(rows[t] + 2 * (from + c)), V::load(min + c),
                        V::load(scale + c));
    };
    for (int64_t c = 0; c < coded_group / 2; c += V::width)
      V::store_nibbles(row + c, code(c), code(c + coded_group / 2));
  }
}

template <class V>
void encode_halves(const float* x, int64_t dim, uint8_t* row) {
  int64_t i = 0;
  for (; i + V::width <= dim; i += V::width) V::store_f16(row + 2 * i, V::load(x + i));
  for (; i < dim; ++i) store_half(row + 2 * i, x[i]);
}

template <class V>
void encode_row(KvFormat format, const float* x, int64_t dim, uint8_t* row) {
  switch (format) {
    case KvFormat::f32: std::memcpy(row, x, static_cast<size_t>(4 * dim)); return;
    case KvFormat::f16: encode_halves<V>(x, dim, row); return;
    case KvFormat::int8:
      for (int64_t i = 0; i < dim; i += coded_group, row += kv_int8_group_bytes)
        encode_int8<V>(x + i, row);
      return;
    case KvFormat::int4:
      for (int64_t i = 0; i < dim; i += coded_group, row += kv_int4_group_bytes)
        encode_int4<V>(x + i, row);
      return;
  }
}

template <class V>
void encode_keys(const uint8_t* const* rows, int64_t dim, uint8_t* out) {
  for (int64_t from = 0; from < dim; from += coded_group) encode_channels<V>(rows, from, dim, out);
}

/// The int4 cache has heads of a multiple of 32 elements.
template <class V>
void encode_recent(const float* x, int64_t dim, uint8_t* row) {
  for (int64_t i = 0; i < dim; i += V::width) {
    const auto v = V::load(x + i);
    const auto kept = V::min(V::max(v, V::set(-half_max)), V::set(half_max));
    V::store_f16(row + 2 * i, V::add(kept, V::mul(v, V::zero())));  // NaN if v is not finite
  }
}

template <class V>
KvEncoders kv_encoders() {
  return {encode_row<V>, encode_keys<V>, encode_recent<V>};
}

}  // namespace
}  // namespace spike
