// Tokens made ready for the dot-product kernels, and the splitting of the work over threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/linear_kernels.h"
#include "core/parallel.h"

namespace spike {

/// Memory that grows and is kept from call to call; one per thread and purpose.
class Scratch {
 public:
  /// At least `bytes` bytes, 64-byte aligned; what was there before is lost.
  std::byte* reserve(size_t bytes);

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t size_ = 0;
};

/// x[t, k] for products with weights of the given format: quantised for block formats, in scratch.
Input prepare_input(const Parallel& parallel, Format format, const float* x, int64_t t, int64_t k,
                    Scratch& scratch);

/// Most tokens of one call of LinearKernels::dot, and so rows of a caller's buffer.
inline constexpr int64_t kTokensPerCall = 64;
/// Floats that a buffer for one call needs: kTokensPerCall x 16 rows x most row groups per step.
inline constexpr int64_t kCallFloats = kTokensPerCall * kTileRows * 4;

/// Part of an output [t, n]: `groups` row groups from `group` on, `tokens` tokens from `token` on.
struct Piece {
  int64_t group, groups, token, tokens;
};

/// Output [t, n] of weights w, cut into pieces for calls of `dot`, dealt to `tasks` tasks.
class Pieces {
 public:
  Pieces(const Matrix& w, int64_t t, int threads);
  int64_t tasks() const { return tasks_; }

  /// Calls body(piece) for every piece of one task: row groups inside, token blocks outside, so that
  /// the tokens of a block stay in L2 while the weights stream by.
  template <class Body>
  void for_task(int64_t task, Body&& body) const {
    for (int64_t i = count() * task / tasks_; i < count() * (task + 1) / tasks_; ++i)
      body(piece(i));
  }

 private:
  int64_t count() const { return steps_ * token_blocks_; }
  Piece piece(int64_t index) const;

  int64_t step_, groups_, steps_, tokens_, token_blocks_, block_tokens_, tasks_;
};

/// products[tokens, 16 * groups] += bias of the piece's rows; nothing if it is null.
void add_bias(const Piece& piece, int64_t n, const float* bias, float* products);

/// Piece of y[t, n] = products + bias + residual, in that order; bias [n], residual [t, n]: null or
/// given.
void write_piece(const Piece& piece, const float* products, int64_t n, const float* bias,
                 const float* residual, float* y);

/// Hidden values [t, m] of an MLP on their way into a product with weights of `format`: kept as that
/// product reads them, so that block formats never see them as floats in memory.
class Hidden {
 public:
  Hidden(Format format, int64_t t, int64_t m, Scratch& scratch);

  /// Takes a piece, values[tokens, 16 * groups]; for block formats `groups` is even.
  void store(const Piece& piece, const float* values) const;
  const Input& input() const { return input_; }

 private:
  Input input_;
  float* values_ = nullptr;
};

}  // namespace spike
