// Searches for the scale (and min) of a group of values: the mathematics of llama.cpp's make_qkx2,
// make_qkx3, make_qx, make_q3 and make_qp_quants. T is a vector with a group per lane, or a float.
#pragma once

#include "core/lanes.h"

namespace spike {
namespace {

// Groups whose range is below this become zero: their fp16 scale would be zero anyway, and
// 1 / scale would overflow.
constexpr float kTiny = 1e-30f;
// Below this a group of a format without min counts as zero, as in the reference.
constexpr float kTinyGroup = 1e-15f;

/// A group of L values: x is about scale * code - min, 0 <= code <= kMax.
template <int L, class T>
struct AffineFit {
  T scale, min;
  T codes[L];
};

/// Candidates of fit_affine: range / (kMax + first + i * step), i = 0..last; and whether the error
/// is weighed as it is or squared.
struct AffineSteps {
  float first, step;
  int last;
  bool absolute;
};

// Weighted least squares for scale and offset over candidate steps around range / kMax; keeps the
// candidate of least weighted error (squared, or absolute), starting from the plain min/max grid.
// As in the reference, an accepted offset is the lower end of the range for later candidates.
template <int kMax, int L, class T>
void fit_affine(const T (&x)[L], const T (&weight)[L], AffineSteps steps, AffineFit<L, T>& fit) {
  constexpr float kTop = kMax;
  T low = x[0], high = x[0], sum_w = weight[0], sum_x = weight[0] * x[0];
  for (int i = 1; i < L; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    sum_w += weight[i];
    sum_x += weight[i] * x[i];
  }
  low = low > 0 ? T{} : low;  // the stored min is unsigned: zero is always in range
  const auto usable = high - low > kTiny;

  const T inverse = kTop / (high - low);
  T scale = 1 / inverse, best{};
  fit.min = -low;  // what a constant group keeps
  for (int i = 0; i < L; ++i) {
    fit.codes[i] = clamp<T>(nearest<T>(inverse * (x[i] - low)), 0, kTop);
    const T error = scale * fit.codes[i] + low - x[i];
    best += weight[i] * (steps.absolute ? magnitude<T>(error) : error * error);
  }
  T codes[L];
  for (int step = 0; step <= steps.last; ++step) {
    const float top = steps.first + steps.step * static_cast<float>(step) + kTop;
    const T inverse = top / (high - low);
    T sum_l{}, sum_l2{}, sum_xl{};
    for (int i = 0; i < L; ++i) {
      codes[i] = clamp<T>(nearest<T>(inverse * (x[i] - low)), 0, kTop);
      const T wl = weight[i] * codes[i];
      sum_l += wl;
      sum_l2 += wl * codes[i];
      sum_xl += wl * x[i];
    }
    const T determinant = sum_w * sum_l2 - sum_l * sum_l;
    T new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    T new_offset = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
    const auto positive = new_offset > 0;
    new_scale = positive ? sum_xl / sum_l2 : new_scale;
    new_offset = positive ? T{} : new_offset;
    T sum_error{};
    for (int i = 0; i < L; ++i) {
      const T error = new_scale * codes[i] + new_offset - x[i];
      sum_error += weight[i] * (steps.absolute ? magnitude<T>(error) : error * error);
    }
    const auto better = (determinant > 0) & (sum_error < best);
    for (int i = 0; i < L; ++i) fit.codes[i] = better ? codes[i] : fit.codes[i];
    best = better ? sum_error : best;
    scale = better ? new_scale : scale;
    low = better ? new_offset : low;
  }
  fit.scale = usable ? scale : T{};
  fit.min = usable ? -low : fit.min;
  for (int i = 0; i < L; ++i) fit.codes[i] = usable ? fit.codes[i] : T{};
}

/// A group of L values: x is about scale * code, -kHalf <= code < kHalf, scale of either sign.
template <int L, class T>
struct SymmetricFit {
  T scale;
  T codes[L];
};

/// The value of largest magnitude, the first of equals.
template <int L, class T>
T extreme_of(const T (&x)[L]) {
  T largest{}, extreme{};
  for (int i = 0; i < L; ++i) {
    const auto larger = magnitude<T>(x[i]) > largest;
    largest = larger ? magnitude<T>(x[i]) : largest;
    extreme = larger ? x[i] : extreme;
  }
  return extreme;
}

/// A group that counts as zero: scale 0, and the codes that the reference leaves there.
template <int kHalf, int L, class T>
void empty_if_tiny(T extreme, SymmetricFit<L, T>& fit) {
  const auto usable = magnitude<T>(extreme) >= kTinyGroup;
  fit.scale = usable ? fit.scale : T{};
  for (int i = 0; i < L; ++i) fit.codes[i] = usable ? fit.codes[i] : T{} - static_cast<float>(kHalf);
}

// Weighted least squares for the scale over 19 candidate steps around largest / kHalf.
template <int kHalf, int L, class T>
void fit_symmetric(const T (&x)[L], const T (&weight)[L], SymmetricFit<L, T>& fit) {
  const T extreme = extreme_of(x);
  T best{};
  fit.scale = T{};
  for (int step = -10; step <= 9; ++step) {  // -10 stands for the plain grid, tried first
    if (step == 0) continue;
    const float steps = step == -10 ? float{kHalf} : kHalf + 0.1f * static_cast<float>(step);
    const T inverse = -steps / extreme;
    T sum_xl{}, sum_l2{}, trial[L];
    for (int i = 0; i < L; ++i) {
      trial[i] = clamp<T>(nearest<T>(inverse * x[i]), -kHalf, kHalf - 1);
      sum_xl += weight[i] * x[i] * trial[i];
      sum_l2 += weight[i] * trial[i] * trial[i];
    }
    const auto better =
        step == -10 ? sum_l2 != 0 : (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2);
    fit.scale = better ? sum_xl / sum_l2 : fit.scale;
    best = better ? fit.scale * sum_xl : best;
    for (int i = 0; i < L; ++i)
      fit.codes[i] = (step == -10) | better ? trial[i] : fit.codes[i];
  }
  empty_if_tiny<kHalf>(extreme, fit);
}

// Weighted least squares for a scale above zero: codes -kHalf .. kHalf - 1, candidate steps around
// the smallest one that reaches both ends of the group; zero for a group of zeros.
template <int kHalf, int L, class T>
T fit_positive(const T (&x)[L], const T (&weight)[L]) {
  T low{}, high{};
  for (int i = 0; i < L; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  const T from_low = -low / static_cast<float>(kHalf), from_high = high / (kHalf - 1.f);
  const T span = from_low > from_high ? from_low : from_high;
  T scale = span, best{};
  for (int step = 0; step < 20; ++step) {  // 1, 0.97, ... 0.43
    const T inverse = 1 / (span * (1 - 0.03f * static_cast<float>(step)));
    T sum_xl{}, sum_l2{};
    for (int i = 0; i < L; ++i) {
      const T code = clamp<T>(nearest<T>(inverse * x[i]), -kHalf, kHalf - 1);
      sum_xl += weight[i] * x[i] * code;
      sum_l2 += weight[i] * code * code;
    }
    // The error is sum w x^2 - sum_xl^2 / sum_l2, and each x * code is at least zero.
    const auto better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2);
    scale = better ? sum_xl / sum_l2 : scale;
    best = better ? sum_xl * sum_xl / sum_l2 : best;
  }
  return span > kTiny ? scale : T{};
}

// From the plain grid, moves one code at a time as long as the least squares weighted by x^2
// improve, for at most five rounds.
template <int kHalf, int L, class T>
void fit_by_descent(const T (&x)[L], SymmetricFit<L, T>& fit) {
  const T extreme = extreme_of(x);
  const T inverse = -static_cast<float>(kHalf) / extreme;
  T sum_xl{}, sum_l2{};
  for (int i = 0; i < L; ++i) {
    fit.codes[i] = clamp<T>(nearest<T>(inverse * x[i]), -kHalf, kHalf - 1);
    const T weight = x[i] * x[i];
    sum_xl += weight * x[i] * fit.codes[i];
    sum_l2 += weight * fit.codes[i] * fit.codes[i];
  }
  for (int round = 0; round < 5; ++round)  // a group without change stays without
    for (int i = 0; i < L; ++i) {
      const T weight = x[i] * x[i], code = fit.codes[i];
      T xl = sum_xl - weight * x[i] * code, l2 = sum_l2 - weight * code * code;
      const T moved = clamp<T>(nearest<T>(x[i] * l2 / xl), -kHalf, kHalf - 1);
      const auto movable = (xl > 0) & (moved != code);
      xl += weight * x[i] * moved;
      l2 += weight * moved * moved;
      const auto better = movable & (l2 > 0) & (xl * xl * sum_l2 > sum_xl * sum_xl * l2);
      fit.codes[i] = better ? moved : code;
      sum_xl = better ? xl : sum_xl;
      sum_l2 = better ? l2 : sum_l2;
    }
  fit.scale = sum_l2 > 0 ? sum_xl / sum_l2 : T{};
  empty_if_tiny<kHalf>(extreme, fit);
}

/// x [n] is about the result times codes, 0 <= code <= kMax, for x >= 0: the scales or mins of a
/// super-block, weighted. Eight steps around largest / kMax, then one code at a time.
template <int kMax, int n>
[[gnu::noinline]] float fit_unsigned(const float (&x)[n], const float (&weight)[n], uint8_t (&codes)[n]) {
  float largest = 0;
  for (int i = 0; i < n; ++i) largest = std::max(largest, x[i]);
  std::fill_n(codes, n, uint8_t{0});
  if (largest < kTinyGroup) return 0;
  float inverse = kMax / largest, best = 0;
  for (int step = -5; step <= 4; ++step) {  // -5 stands for the plain grid, tried first
    if (step == 0) continue;
    const float trial = step == -5 ? inverse : (0.1f * static_cast<float>(step) + kMax) / largest;
    const float scale = 1 / trial;
    float error = 0;
    for (int i = 0; i < n; ++i) {
      const float difference = x[i] - scale * clamp(nearest(trial * x[i]), 0, kMax);
      error += weight[i] * difference * difference;
    }
    if (step != -5 && !(error < best)) continue;
    best = error;
    inverse = trial;
  }
  float sum_xl = 0, sum_l2 = 0;
  for (int i = 0; i < n; ++i) {
    const float code = clamp(nearest(inverse * x[i]), 0, kMax);
    codes[i] = static_cast<uint8_t>(code);
    sum_xl += weight[i] * x[i] * code;
    sum_l2 += weight[i] * code * code;
  }
  for (int round = 0; round < 5; ++round)
    for (int i = 0; i < n; ++i) {
      const float code = codes[i];
      float xl = sum_xl - weight[i] * x[i] * code, l2 = sum_l2 - weight[i] * code * code;
      if (!(xl > 0 && l2 > 0)) continue;
      const float moved = clamp(nearest(x[i] * l2 / xl), 0, kMax);
      if (moved == code) continue;
      xl += weight[i] * x[i] * moved;
      l2 += weight[i] * moved * moved;
      if (!(xl * xl * sum_l2 > sum_xl * sum_xl * l2)) continue;
      codes[i] = static_cast<uint8_t>(moved);
      sum_xl = xl;
      sum_l2 = l2;
    }
  return sum_l2 > 0 ? sum_xl / sum_l2 : 0;
}

}  // namespace
}  // namespace spike
