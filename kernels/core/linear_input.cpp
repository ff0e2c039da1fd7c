#include "core/linear_input.h"

#include <algorithm>

namespace spike {
namespace {

// A task below this many bytes of weights (or their equivalent in arithmetic) is not worth a
// thread.
constexpr int64_t kTaskBytes = 32 << 10;
constexpr int64_t kTasksPerThread = 4;
// Elements of x from which quantising it is shared out.
constexpr int64_t kParallelElements = 32 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::byte* Scratch::reserve(size_t bytes) {
  if (bytes + 64 > size_) {
    memory_.reset();  // before the new one, to keep the peak low
    size_ = bytes + 64;
    memory_ = std::make_unique_for_overwrite<std::byte[]>(size_);
  }
  const auto address = reinterpret_cast<uintptr_t>(memory_.get());
  return memory_.get() + (64 - address % 64) % 64;
}

Input prepare_input(const Parallel& parallel, Format format, const float* x, int64_t t, int64_t k,
                    Scratch& scratch) {
  Input input;
  input.k = k;
  input.x = x;
  if (block_elements(format) == 1) return input;

  const size_t bytes = static_cast<size_t>(t * (k / 32)) * sizeof(InputBlock);
  input.blocks = reinterpret_cast<InputBlock*>(scratch.reserve(bytes));
  const int64_t tasks = t * k < kParallelElements ? 1 : std::min<int64_t>(t, parallel.threads * 2);
  parallel(tasks, [&](int64_t task) {
    const int64_t first = t * task / tasks, last = t * (task + 1) / tasks, blocks = k / 32;
    linear_kernels().quantize(x + first * k, k, last - first, blocks, input.blocks + first * blocks,
                              blocks);
  });
  return input;
}

void add_bias(const Piece& piece, int64_t n, const float* bias, float* products) {
  if (bias == nullptr) return;
  const int64_t stride = piece.groups * kTileRows, row = piece.group * kTileRows;
  linear_kernels().finish(products, stride, piece.tokens, std::min(stride, n - row), bias + row,
                          nullptr, products, stride);
}

void write_piece(const Piece& piece, const float* products, int64_t n, const float* bias,
                 const float* residual, float* y) {
  const int64_t stride = piece.groups * kTileRows, row = piece.group * kTileRows;
  const int64_t at = piece.token * n + row;
  linear_kernels().finish(products, stride, piece.tokens, std::min(stride, n - row),
                          bias == nullptr ? nullptr : bias + row,
                          residual == nullptr ? nullptr : residual + at, y + at, n);
}

Hidden::Hidden(Format format, int64_t t, int64_t m, Scratch& scratch) {
  input_.k = m;
  const size_t values = static_cast<size_t>(t * m);
  if (block_elements(format) == 1)
    input_.x = values_ = reinterpret_cast<float*>(scratch.reserve(values * sizeof(float)));
  else
    input_.blocks =
        reinterpret_cast<InputBlock*>(scratch.reserve(values / 32 * sizeof(InputBlock)));
}

void Hidden::store(const Piece& piece, const float* values) const {
  if (values_ != nullptr) return write_piece(piece, values, input_.k, nullptr, nullptr, values_);
  const int64_t blocks = input_.k / 32;
  linear_kernels().quantize(values, piece.groups * kTileRows, piece.tokens, piece.groups / 2,
                            input_.blocks + piece.token * blocks + piece.group / 2, blocks);
}

Pieces::Pieces(const Matrix& w, int64_t t, int threads)
    : step_(row_groups_per_step(w.format)),
      groups_(ceil_div(w.n, kTileRows)),
      steps_(ceil_div(groups_, step_)),
      tokens_(t),
      token_blocks_(ceil_div(t, kTokensPerCall)),
      block_tokens_(ceil_div(t, token_blocks_)) {
  const int64_t bytes = static_cast<int64_t>(packed_bytes(w.format, w.n, w.k));
  const int64_t work = bytes * std::max<int64_t>(1, t / 4) / kTaskBytes;
  const int64_t most = threads <= 1 ? 1 : std::min(count(), threads * kTasksPerThread);
  tasks_ = std::clamp<int64_t>(work, 1, most);
  if (tasks_ > threads) tasks_ -= tasks_ % threads;  // equal shares
}

Piece Pieces::piece(int64_t index) const {
  const int64_t group = index % steps_ * step_, token = index / steps_ * block_tokens_;
  return {group, std::min(step_, groups_ - group), token, std::min(block_tokens_, tokens_ - token)};
}

}  // namespace spike
