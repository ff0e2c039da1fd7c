#include "core/quantize.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/block_search.h"
#include "core/blocks.h"
#include "core/half.h"

namespace spike {
namespace {

constexpr int64_t kRowsPerTask = 4;
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

template <class Block>
void quantize_row(const float* x, int64_t k, uint8_t* row) {
  constexpr int64_t kElements = sizeof(Block) >= sizeof(BlockQ4K) ? 256 : 32;
  for (int64_t i = 0; i < k; i += kElements, row += sizeof(Block)) {
    Block block;
    quantize_block(x + i, block);
    std::memcpy(row, &block, sizeof block);
  }
}

template <uint16_t (*convert)(float)>
void convert_row(const float* x, int64_t k, uint8_t* row) {
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t h = convert(x[i]);
    std::memcpy(row + 2 * i, &h, 2);
  }
}

void quantize_row(Format format, const float* x, int64_t k, uint8_t* row) {
  switch (format) {
    case Format::f32: std::memcpy(row, x, static_cast<size_t>(k) * 4); return;
    case Format::f16: return convert_row<f32_to_f16>(x, k, row);
    case Format::bf16: return convert_row<f32_to_bf16>(x, k, row);
    case Format::q8_0: return quantize_row<BlockQ8_0>(x, k, row);
    case Format::q5_0: return quantize_row<BlockQ5_0>(x, k, row);
    case Format::q4_k: return quantize_row<BlockQ4K>(x, k, row);
    case Format::q6_k: return quantize_row<BlockQ6K>(x, k, row);
  }
}

void dequantize_block(const BlockQ8_0& b, float* x) {
  const float d = f16_to_f32(b.d);
  for (int i = 0; i < 32; ++i) x[i] = d * b.codes[i];
}

void dequantize_block(const BlockQ5_0& b, float* x) {
  const float d = f16_to_f32(b.d);
  for (int i = 0; i < 32; ++i) {
    const int low = (b.nibbles[i % 16] >> (4 * (i / 16))) & 15,
              high = (b.high[i / 8] >> (i % 8)) & 1;
    x[i] = d * static_cast<float>((low | (high << 4)) - 16);
  }
}

void dequantize_block(const BlockQ4K& b, float* x) {
  for (int s = 0; s < 8; ++s) {
    const float d = f16_to_f32(b.d) * q4k_scale(b, s), m = f16_to_f32(b.dmin) * q4k_min(b, s);
    for (int i = 0; i < 32; ++i)
      x[32 * s + i] = d * ((b.nibbles[32 * (s / 2) + i] >> (4 * (s % 2))) & 15) - m;
  }
}

void dequantize_block(const BlockQ6K& b, float* x) {
  for (int i = 0; i < 256; ++i)
    x[i] = f16_to_f32(b.d) * b.scales[i / 16] * static_cast<float>(q6k_code(b, i) - 32);
}

template <class Block>
void dequantize_row(const uint8_t* row, int64_t k, float* x) {
  constexpr int64_t kElements = sizeof(Block) >= sizeof(BlockQ4K) ? 256 : 32;
  for (int64_t i = 0; i < k; i += kElements, row += sizeof(Block)) {
    Block block;
    std::memcpy(&block, row, sizeof block);
    dequantize_block(block, x + i);
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
    case Format::q8_0: return dequantize_row<BlockQ8_0>(row, k, x);
    case Format::q5_0: return dequantize_row<BlockQ5_0>(row, k, x);
    case Format::q4_k: return dequantize_row<BlockQ4K>(row, k, x);
    case Format::q6_k: return dequantize_row<BlockQ6K>(row, k, x);
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
    case Format::q4_k: return kLargestHalf * 62;    // dmin = min / 63; the fit may exceed the data
    case Format::q6_k: return kLargestHalf * 2048;  // d about largest / 4096, and room for the fit
  }
  return 0;
}

std::optional<Unrepresentable> quantize(const Parallel& parallel, Format format, const float* x,
                                        int64_t n, int64_t k, uint8_t* rows) {
  const size_t stride = row_bytes(format, k);
  const float limit = largest_value(format);
  std::atomic<int64_t> first_bad{n};
  for_rows(parallel, n, [&](int64_t row) {
    if (find_bad(x + row * k, k, limit) < 0) {
      quantize_row(format, x + row * k, k, rows + static_cast<size_t>(row) * stride);
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
