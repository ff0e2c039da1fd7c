// What happens to activations around the dot products, written over the lanes of a tier (V):
// quantisation of tokens to int8, and the gate of a gated MLP.
// Included by each tier inside its target region.
#pragma once

namespace spike {
namespace {

/// Below this a block of 32 counts as zero, so that 127 / largest stays finite.
constexpr float kSmallestInput = 1e-30f;

template <class V>
void quantize_block(const float* x, InputBlock& block) {
  const auto first = V::load_f32(x), second = V::load_f32(x + 16);
  const float largest = V::largest_magnitude(first, second);
  const bool finite = largest <= 3.4028235e38f;
  const float inverse = finite && largest >= kSmallestInput ? 127 / largest : 0;
  const int32_t sum0 = V::store_codes(block.codes, first, inverse);
  const int32_t sum1 = V::store_codes(block.codes + 16, second, inverse);
  block.scale = !finite ? __builtin_nanf("") : inverse == 0 ? 0 : largest / 127;
  block.negative_sum = -block.scale * static_cast<float>(sum0 + sum1);
  block.negative_codes = -(sum0 + sum1);
  block.negative_half[0] = -sum0;
  block.negative_half[1] = -sum1;
  block.negative_half_sum[0] = -block.scale * static_cast<float>(sum0);
  block.negative_half_sum[1] = -block.scale * static_cast<float>(sum1);
}

template <class V>
void quantize_tokens(const float* x, int64_t stride, int64_t tokens, int64_t blocks,
                     InputBlock* out, int64_t out_stride) {
  for (int64_t i = 0; i < tokens; ++i)
    for (int64_t b = 0; b < blocks; ++b)
      quantize_block<V>(x + i * stride + 32 * b, out[i * out_stride + b]);
}

/// e^x to about 2 ulp for -87 <= x <= 88; x is clamped to that range, NaN stays NaN.
template <class V>
typename V::Floats exponential(typename V::Floats x) {
  using F = typename V::Floats;
  x = V::max(V::set(-87.0f), V::min(V::set(88.0f), x));
  const F magic = V::set(12582912.f);  // adding 1.5 * 2^23 rounds to an integer
  const F shifted = V::fma(x, V::set(1.44269504f), magic);
  const F n = V::add(shifted, V::set(-12582912.f));
  F r = V::fma(n, V::set(-0.693359375f), x);  // ln 2 in two parts
  r = V::fma(n, V::set(2.12194440e-4f), r);
  constexpr float kTaylor[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f};
  F p = V::set(1.f / 5040);
  for (const float c : kTaylor) p = V::fma(p, r, V::set(c));
  return V::mul(p, V::power_of_two(n));
}

/// x / (1 + e^-u): silu for u = x, the tanh form of gelu for the u below.
template <class V>
typename V::Floats swish(typename V::Floats x, typename V::Floats u) {
  const auto decay = exponential<V>(V::mul(u, V::set(-1.f)));
  return V::div(x, V::add(V::set(1.f), decay));
}

template <class V, Activation act>
typename V::Floats activate(typename V::Floats x) {
  if constexpr (act == Activation::silu)
    return swish<V>(x, x);
  else if constexpr (act == Activation::gelu_tanh) {
    // 2 sqrt(2 / pi) (x + 0.044715 x^3), as gelu(x) = x sigmoid(2 z) for the tanh form's z
    const auto cubic = V::fma(V::mul(x, x), V::set(0.044715f), V::set(1.f));
    return swish<V>(x, V::mul(V::mul(x, cubic), V::set(1.5957691216f)));
  } else if constexpr (act == Activation::gelu_quick)
    return swish<V>(x, V::mul(x, V::set(1.702f)));
  else if constexpr (act == Activation::relu)
    return V::max(V::set(0.f), x);
  else {
    const auto positive = V::max(V::set(0.f), x);
    return V::mul(positive, positive);
  }
}

template <class V, Activation act>
void gate_lanes(float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; i += 16)
    V::store_f32(gate + i, V::mul(activate<V, act>(V::load_f32(gate + i)), V::load_f32(up + i)));
}

template <class V>
void gate_values(Activation act, float* gate, const float* up, int64_t count) {
  switch (act) {
    case Activation::silu: return gate_lanes<V, Activation::silu>(gate, up, count);
    case Activation::gelu_tanh: return gate_lanes<V, Activation::gelu_tanh>(gate, up, count);
    case Activation::gelu_quick: return gate_lanes<V, Activation::gelu_quick>(gate, up, count);
    case Activation::relu: return gate_lanes<V, Activation::relu>(gate, up, count);
    case Activation::relu2: return gate_lanes<V, Activation::relu2>(gate, up, count);
    case Activation::gelu_erf:
      for (int64_t i = 0; i < count; ++i)
        gate[i] = 0.5f * gate[i] * (1 + __builtin_erff(gate[i] * 0.70710678f)) * up[i];
  }
}

}  // namespace
}  // namespace spike
