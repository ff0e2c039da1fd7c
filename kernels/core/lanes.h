// Vectors of floats for the scale searches: one lane per sub-block, so that each lane performs a
// reference's fp32 operations in the reference's order. The functions work on a plain float too.
#pragma once

#include <algorithm>
#include <cmath>

// A search is compiled for each width of vector and chosen at load; the lanes' results are equal.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SPIKE_EVERY_TIER __attribute__((flatten, target_clones("avx512f", "avx2", "default")))
#else
#define SPIKE_EVERY_TIER
#endif

namespace spike {
namespace {

/// Eight lanes: what AVX2 has. Wider vectors would be taken apart lane by lane there.
constexpr int kLanes = 8;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

// Nearest integer, ties to even, by the float unit's own rounding. Beyond 2^22 the result is not an
// integer but stays on its side of any code range, so a clamp repairs it.
template <class T>
T nearest(T v) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23
  return (v + kRound) - kRound;
}

template <class T>
T clamp(T v, float low, float high) {
  v = v < low ? T{} + low : v;
  return v > high ? T{} + high : v;
}
template <>
[[maybe_unused]] float clamp(float v, float low, float high) {
  return std::max(low, std::min(high, v));
}

template <class T>
T magnitude(T v) {
  return v < 0 ? -v : v;
}

/// columns[i][s] = x[L * s + i]: sub-block s of L values in lane s, zeros beyond `elements`.
template <int L>
[[gnu::noinline]] void load_columns(const float* x, int elements, Lanes (&columns)[L]) {
  for (int s = 0; s < kLanes; ++s)
    for (int i = 0; i < L; ++i) columns[i][s] = L * s + i < elements ? x[L * s + i] : 0;
}

template <int L, class T>
T sum_of(const T (&v)[L]) {
  T sum{};
  for (int i = 0; i < L; ++i) sum += v[i];
  return sum;
}

}  // namespace
}  // namespace spike
