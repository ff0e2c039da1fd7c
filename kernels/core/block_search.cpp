// Scale searches of the block formats: the mathematics of llama.cpp's quantize_row_*_ref, written
// with the sub-blocks of a super-block as vector lanes. Each lane performs the reference's fp32
// operations in the reference's order, so the bytes agree (compiled with -ffp-contract=off).
#include "core/block_search.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/half.h"

// The searches, compiled for each width of vector and chosen at load; the lanes' results are equal.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SPIKE_EVERY_TIER __attribute__((flatten, target_clones("avx512f", "avx2", "default")))
#else
#define SPIKE_EVERY_TIER
#endif

namespace spike {
namespace {

// Blocks whose largest magnitude (or range) is below this become zero: their fp16 scale would be
// zero anyway, and 1 / scale would overflow.
constexpr float kTiny = 1e-30f;
// Below this a group of q6_k counts as zero, as in the reference.
constexpr float kTinyGroup = 1e-15f;

template <int N>
struct Lanes {
  typedef float Float __attribute__((vector_size(N * sizeof(float))));
};

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
float clamp(float v, float low, float high) {
  return std::max(low, std::min(high, v));
}

template <class T>
T magnitude(T v) {
  return v < 0 ? -v : v;
}

}  // namespace

void quantize_block(const float* x, BlockQ8_0& b) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[i]));
  if (largest < kTiny) largest = 0;
  const float d = largest / 127;
  const float inverse = d != 0 ? 1 / d : 0;
  b.d = f32_to_f16(d);
  for (int i = 0; i < 32; ++i) b.codes[i] = static_cast<int8_t>(std::round(x[i] * inverse));
}

void quantize_block(const float* x, BlockQ5_0& b) {
  float largest = 0, extreme = 0;  // the extreme value maps to code 0, that is -16
  for (int i = 0; i < 32; ++i)
    if (std::fabs(x[i]) > largest) {
      largest = std::fabs(x[i]);
      extreme = x[i];
    }
  if (largest < kTiny) extreme = 0;
  const float d = extreme / -16;  // minus zero for an empty block, as the reference writes
  const float inverse = d != 0 ? 1 / d : 0;
  b.d = f32_to_f16(d);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i)
    codes[i] = static_cast<uint8_t>(std::min(31, static_cast<int>(x[i] * inverse + 16.5f)));
  std::memset(b.high, 0, sizeof b.high);
  for (int i = 0; i < 32; ++i) b.high[i / 8] |= static_cast<uint8_t>((codes[i] >> 4) << (i % 8));
  for (int i = 0; i < 16; ++i)
    b.nibbles[i] = static_cast<uint8_t>((codes[i] & 15) | ((codes[i + 16] & 15) << 4));
}

namespace {

using Eight = Lanes<8>::Float;

/// Eight sub-blocks of 32 values, one per lane: x is about scale * code - min, 0 <= code <= 15.
struct AffineFit {
  Eight scale, min;
  Eight codes[32];
};

// Weighted least squares for scale and offset over 21 candidate steps around range / 15; keeps the
// candidate of least weighted squared error, starting from the plain min/max grid. As in the
// reference, an accepted offset is the lower end of the range for the candidates after it.
void fit_affine(const Eight x[32], AffineFit& fit) {
  Eight sum_squares{};
  for (int i = 0; i < 32; ++i) sum_squares += x[i] * x[i];
  Eight mean_magnitude;
  for (int lane = 0; lane < 8; ++lane) mean_magnitude[lane] = std::sqrt(sum_squares[lane] / 32);

  Eight weight[32], low = x[0], high = x[0];
  for (int i = 0; i < 32; ++i) weight[i] = mean_magnitude + magnitude(x[i]);
  Eight sum_w = weight[0], sum_x = weight[0] * x[0];
  for (int i = 1; i < 32; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    sum_w += weight[i];
    sum_x += weight[i] * x[i];
  }
  low = low > 0 ? Eight{} : low;  // the stored min is unsigned: zero is always in range
  const auto usable = high - low > kTiny;

  const Eight inverse = 15 / (high - low);
  Eight scale = 1 / inverse, best{};
  fit.min = -low;  // what a constant sub-block keeps
  for (int i = 0; i < 32; ++i) {
    fit.codes[i] = clamp<Eight>(nearest<Eight>(inverse * (x[i] - low)), 0, 15);
    const Eight error = scale * fit.codes[i] + low - x[i];
    best += weight[i] * (error * error);
  }
  Eight codes[32];
  for (int step = 0; step <= 20; ++step) {
    const Eight inverse = (-1.f + 0.1f * static_cast<float>(step) + 15) / (high - low);
    Eight sum_l{}, sum_l2{}, sum_xl{};
    for (int i = 0; i < 32; ++i) {
      codes[i] = clamp<Eight>(nearest<Eight>(inverse * (x[i] - low)), 0, 15);
      const Eight wl = weight[i] * codes[i];
      sum_l += wl;
      sum_l2 += wl * codes[i];
      sum_xl += wl * x[i];
    }
    const Eight determinant = sum_w * sum_l2 - sum_l * sum_l;
    Eight new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    Eight new_offset = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
    const auto positive = new_offset > 0;
    new_scale = positive ? sum_xl / sum_l2 : new_scale;
    new_offset = positive ? Eight{} : new_offset;
    Eight sum_error{};
    for (int i = 0; i < 32; ++i) {
      const Eight error = new_scale * codes[i] + new_offset - x[i];
      sum_error += weight[i] * (error * error);
    }
    const auto better = (determinant > 0) & (sum_error < best);
    for (int i = 0; i < 32; ++i) fit.codes[i] = better ? codes[i] : fit.codes[i];
    best = better ? sum_error : best;
    scale = better ? new_scale : scale;
    low = better ? new_offset : low;
  }
  fit.scale = usable ? scale : Eight{};
  fit.min = usable ? -low : fit.min;
  for (int i = 0; i < 32; ++i) fit.codes[i] = usable ? fit.codes[i] : Eight{};
}

float largest_lane(const Eight& v) {
  float largest = 0;
  for (int lane = 0; lane < 8; ++lane) largest = std::max(largest, v[lane]);
  return largest;
}

}  // namespace

SPIKE_EVERY_TIER void quantize_block(const float* x, BlockQ4K& b) {
  Eight columns[32];
  for (int s = 0; s < 8; ++s)
    for (int i = 0; i < 32; ++i) columns[i][s] = x[32 * s + i];
  AffineFit fit;
  fit_affine(columns, fit);

  const float max_scale = largest_lane(fit.scale), max_min = largest_lane(fit.min);
  const float inverse_scale = max_scale > 0 ? 63 / max_scale : 0;
  const float inverse_min = max_min > 0 ? 63 / max_min : 0;
  uint8_t scale[8], min[8];
  for (int s = 0; s < 8; ++s) {
    scale[s] = static_cast<uint8_t>(clamp(nearest(inverse_scale * fit.scale[s]), 0, 63));
    min[s] = static_cast<uint8_t>(clamp(nearest(inverse_min * fit.min[s]), 0, 63));
  }
  set_q4k_scales(b, scale, min);
  b.d = f32_to_f16(max_scale / 63);
  b.dmin = f32_to_f16(max_min / 63);

  uint8_t codes[256];  // again, on the grid that the rounded scales really give
  for (int s = 0; s < 8; ++s) {
    const float d = f16_to_f32(b.d) * scale[s], m = f16_to_f32(b.dmin) * min[s];
    for (int i = 0; i < 32; ++i) {
      const float code = d != 0 ? clamp(nearest((columns[i][s] + m) / d), 0, 15) : fit.codes[i][s];
      codes[32 * s + i] = static_cast<uint8_t>(code);
    }
  }
  for (int p = 0; p < 4; ++p)
    for (int i = 0; i < 32; ++i)
      b.nibbles[32 * p + i] =
          static_cast<uint8_t>(codes[64 * p + i] | (codes[64 * p + 32 + i] << 4));
}

namespace {

using Sixteen = Lanes<16>::Float;

// Sixteen groups of 16 values, one per lane: x is about scale * (code - 32), |scale| of either
// sign. Squared-value weighted least squares over 19 candidate steps around largest / 32.
void fit_symmetric(const Sixteen x[16], Sixteen& scale, Sixteen codes[16]) {
  Sixteen largest{}, extreme{};
  for (int i = 0; i < 16; ++i) {
    const auto larger = magnitude(x[i]) > largest;
    largest = larger ? magnitude(x[i]) : largest;
    extreme = larger ? x[i] : extreme;
  }
  const auto usable = largest >= kTinyGroup;

  Sixteen best{};
  scale = Sixteen{};
  for (int step = -10; step <= 9; ++step) {  // -10 stands for the plain grid, tried first
    if (step == 0) continue;
    const float steps = step == -10 ? 32.f : 32 + 0.1f * static_cast<float>(step);
    const Sixteen inverse = -steps / extreme;
    Sixteen sum_xl{}, sum_l2{}, trial[16];
    for (int i = 0; i < 16; ++i) {
      trial[i] = clamp<Sixteen>(nearest<Sixteen>(inverse * x[i]), -32, 31);
      const Sixteen weight = x[i] * x[i];
      sum_xl += weight * x[i] * trial[i];
      sum_l2 += weight * trial[i] * trial[i];
    }
    const auto better =
        step == -10 ? sum_l2 != 0 : (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2);
    scale = better ? sum_xl / sum_l2 : scale;
    best = better ? scale * sum_xl : best;
    for (int i = 0; i < 16; ++i) codes[i] = (step == -10) | better ? trial[i] + 32 : codes[i];
  }
  scale = usable ? scale : Sixteen{};
  for (int i = 0; i < 16; ++i) codes[i] = usable ? codes[i] : Sixteen{};
}

}  // namespace

SPIKE_EVERY_TIER void quantize_block(const float* x, BlockQ6K& b) {
  Sixteen columns[16], scale, codes[16];
  for (int s = 0; s < 16; ++s)
    for (int i = 0; i < 16; ++i) columns[i][s] = x[16 * s + i];
  fit_symmetric(columns, scale, codes);

  std::memset(&b, 0, sizeof b);
  float extreme = 0;
  for (int s = 0; s < 16; ++s)
    if (std::fabs(scale[s]) > std::fabs(extreme)) extreme = scale[s];
  if (std::fabs(extreme) < kTinyGroup) return;

  const float inverse = -128 / extreme;
  b.d = f32_to_f16(1 / inverse);
  for (int s = 0; s < 16; ++s) {
    b.scales[s] = static_cast<int8_t>(clamp(nearest(inverse * scale[s]), -128, 127));
    const float d = f16_to_f32(b.d) * b.scales[s];
    for (int i = 0; i < 16; ++i) {
      const float code = d != 0 ? clamp(nearest(columns[i][s] / d), -32, 31) + 32 : codes[i][s];
      add_q6k_code(b, 16 * s + i, static_cast<uint8_t>(code));
    }
  }
}

}  // namespace spike
