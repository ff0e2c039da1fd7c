#include "core/quantize.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/block_search.h"
#include "core/error_weights.h"
#include "core/half.h"
#include "core/short_block.h"

namespace spike {
namespace {

constexpr int64_t kRowsPerTask = 4;
constexpr int kSpan = 256;  // elements that search_blocks takes at a time
constexpr float kLargestHalf = 65504;

template <class Body>
void for_rows(const Parallel& parallel, int64_t n, Body&& body) {
  const int64_t tasks = (n + kRowsPerTask - 1) / kRowsPerTask;
  parallel(tasks, [&](int64_t task) {
    const int64_t end = std::min(n, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) body(row);
  });
}

/// Column of the first value a row cannot store, or -1. The comparison is false for NaN.
int64_t find_bad(const float* x, int64_t k, float limit) {
  bool bad = false;
  for (int64_t i = 0; i < k; ++i) bad |= !(std::fabs(x[i]) <= limit);
  if (!bad) return -1;
  int64_t i = 0;
  while (std::fabs(x[i]) <= limit) ++i;
  return i;
}

template <class B>
void quantize_blocks(const float* x, int64_t k, const float* importance, uint8_t* row) {
  const float variance =
      importance != nullptr && B::kElements == 32 ? mean_square(x, k) : 0;
  for (int64_t i = 0; i < k; i += kSpan) {
    const int elements = static_cast<int>(std::min<int64_t>(kSpan, k - i));
    float weight[kSpan];
    if (importance != nullptr)
      weigh_errors<B>(x + i, importance + i, elements, variance, weight);
    B blocks[kSpan / B::kElements];
    search_blocks(x + i, importance != nullptr ? weight : nullptr, elements, blocks);
    uint8_t* to = row + (i / B::kElements) * sizeof(B);
    if constexpr (ShortTraits<B>::kShort)
      if (elements < kSpan) return shorten(blocks[0], elements / 64, to);
    std::memcpy(to, blocks, static_cast<size_t>(elements / B::kElements) * sizeof(B));
  }
}

template <uint16_t (*convert)(float)>
void convert_row(const float* x, int64_t k, uint8_t* row) {
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t h = convert(x[i]);
    std::memcpy(row + 2 * i, &h, 2);
  }
}

void quantize_row(Format format, const float* x, int64_t k, const float* importance,
                  uint8_t* row) {
  switch (format) {
    case Format::f32: std::memcpy(row, x, static_cast<size_t>(k) * 4); return;
    case Format::f16: return convert_row<f32_to_f16>(x, k, row);
    case Format::bf16: return convert_row<f32_to_bf16>(x, k, row);
    default:
      with_block(format, [&]<class B>(B) { quantize_blocks<B>(x, k, importance, row); });
  }
}

template <class B>
void dequantize_blocks(const uint8_t* row, int64_t k, float* x) {
  int64_t i = 0;
  for (; i + B::kElements <= k; i += B::kElements, row += sizeof(B)) {
    B block;
    std::memcpy(&block, row, sizeof block);
    dequantize_block(block, x + i);
  }
  if constexpr (ShortTraits<B>::kShort)
    if (i < k) {
      B block;
      lengthen(row, static_cast<int>((k - i) / 64), block);
      float values[B::kElements];
      dequantize_block(block, values);
      std::copy_n(values, k - i, x + i);
    }
}

template <float (*convert)(uint16_t)>
void widen_row(const uint8_t* row, int64_t k, float* x) {
  for (int64_t i = 0; i < k; ++i) {
    uint16_t h;
    std::memcpy(&h, row + 2 * i, 2);
    x[i] = convert(h);
  }
}

void dequantize_row(Format format, const uint8_t* row, int64_t k, float* x) {
  switch (format) {
    case Format::f32: std::memcpy(x, row, static_cast<size_t>(k) * 4); return;
    case Format::f16: return widen_row<f16_to_f32>(row, k, x);
    case Format::bf16: return widen_row<bf16_to_f32>(row, k, x);
    default: with_block(format, [&]<class B>(B) { dequantize_blocks<B>(row, k, x); });
  }
}

}  // namespace

float largest_value(Format format) {
  switch (format) {
    case Format::f32: return FLT_MAX;
    case Format::bf16: return 0x1.fep127f;  // larger ones would round to infinity
    case Format::f16: return kLargestHalf;
    case Format::q8_0: return kLargestHalf * 127;   // d = largest / 127
    case Format::q5_0: return kLargestHalf * 16;    // d = largest / 16
    case Format::q5_1:
    case Format::q4_1: return kLargestHalf;         // m = the smallest value
    case Format::q4_0: return kLargestHalf * 8;     // d = largest / 8
    case Format::int4_sym: return kLargestHalf * 7;
    case Format::q2_k: return kLargestHalf * 14;    // dmin = min / 15; the fit may exceed the data
    case Format::q3_k: return kLargestHalf * 64;    // d about largest / 128, and room for the fit
    case Format::q5_k:
    case Format::q4_k: return kLargestHalf * 62;    // dmin = min / 63; the fit may exceed the data
    case Format::q6_k: return kLargestHalf * 2048;  // d about largest / 4096, and room for the fit
  }
  return 0;
}

std::optional<Unrepresentable> quantize(const Parallel& parallel, Format format, const float* x,
                                        int64_t n, int64_t k, const float* importance,
                                        uint8_t* rows) {
  const size_t stride = row_bytes(format, k);
  const float limit = largest_value(format);
  std::atomic<int64_t> first_bad{n};
  for_rows(parallel, n, [&](int64_t row) {
    if (find_bad(x + row * k, k, limit) < 0) {
      quantize_row(format, x + row * k, k, importance, rows + static_cast<size_t>(row) * stride);
      return;
    }
    int64_t seen = first_bad.load();
    while (row < seen && !first_bad.compare_exchange_weak(seen, row)) {
    }
  });
  const int64_t row = first_bad.load();
  if (row == n) return std::nullopt;
  const int64_t column = find_bad(x + row * k, k, limit);
  return Unrepresentable{row, column, x[row * k + column]};
}

void dequantize(const Parallel& parallel, Format format, const uint8_t* rows, int64_t n, int64_t k,
                float* x) {
  const size_t stride = row_bytes(format, k);
  for_rows(parallel, n, [&](int64_t row) {
    dequantize_row(format, rows + static_cast<size_t>(row) * stride, k, x + row * k);
  });
}

}  // namespace spike
