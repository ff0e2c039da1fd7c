// Kernels on single rows, written once against the SIMD interface (see simd_avx512.h).
// Include inside a SPIKE_TARGET region.
#pragma once

namespace spike {
namespace {

/// y = x / sqrt(mean(x^2) + eps) * w. Four running sums, so that additions needn't wait.
template <class V>
void rms_norm_row(const float* x, const float* w, int64_t dim, float eps, float* y) {
  constexpr int64_t W = V::width;
  typename V::F a = V::zero(), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * W <= dim; i += 4 * W) {
    const auto p = V::load(x + i), q = V::load(x + i + W), r = V::load(x + i + 2 * W),
               s = V::load(x + i + 3 * W);
    a = V::fma(p, p, a), b = V::fma(q, q, b), c = V::fma(r, r, c), d = V::fma(s, s, d);
  }
  for (; i + W <= dim; i += W) a = V::fma(V::load(x + i), V::load(x + i), a);
  if (const int64_t rest = dim - i; rest > 0) {
    const auto p = V::load_part(x + i, rest);
    b = V::fma(p, p, b);
  }
  const float squares = V::sum(V::add(V::add(a, b), V::add(c, d)));
  const auto factor = V::set(1.0f / std::sqrt(squares / static_cast<float>(dim) + eps));
  for (i = 0; i + W <= dim; i += W)
    V::store(y + i, V::mul(V::mul(V::load(x + i), factor), V::load(w + i)));
  if (const int64_t rest = dim - i; rest > 0)
    V::store_part(y + i, V::mul(V::mul(V::load_part(x + i, rest), factor), V::load_part(w + i, rest)),
                  rest);
}

/// Rotates element i with element i + width / 2.
template <class V>
void rope_half_row(const float* x, const float* cos, const float* sin, int64_t width, float* y) {
  constexpr int64_t W = V::width;
  const int64_t half = width / 2;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const auto a = V::load(x + i), b = V::load(x + half + i);
    V::store(y + i, V::sub(V::mul(a, V::load(cos + i)), V::mul(b, V::load(sin + i))));
    V::store(y + half + i,
             V::add(V::mul(b, V::load(cos + half + i)), V::mul(a, V::load(sin + half + i))));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

/// Multiply-adds that wait for nothing but each other, in as many chains as keep the units busy.
/// Returns the operations done.
template <class V>
int64_t fma_burst(int64_t rounds, float& sink) {
  constexpr int chains = 12;
  typename V::F sums[chains];
  for (auto& sum : sums) sum = V::set(sink);
  const auto factor = V::set(sink + 0.5f);
  for (int64_t i = 0; i < rounds; ++i)
    for (auto& sum : sums) sum = V::fma(sum, factor, factor);
  for (const auto& sum : sums) sink += V::sum(sum);
  return rounds * chains * 2 * V::width;
}

template <class V>
RowKernels make_row_kernels() {
  return {rms_norm_row<V>, rope_half_row<V>, fma_burst<V>};
}

}  // namespace
}  // namespace spike
