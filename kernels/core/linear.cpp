#include "core/linear.h"

#include <algorithm>

#include "core/cpu.h"
#include "core/linear_input.h"
#include "core/linear_kernels.h"

namespace spike {
namespace {

/// y[t, n] piece = products + bias + residual, in that order.
void write_piece(const Piece& piece, const float* products, int64_t n, const float* bias,
                 const float* residual, float* y) {
  const int64_t stride = piece.groups * kTileRows, row = piece.group * kTileRows;
  const int64_t rows = std::min(stride, n - row);
  for (int64_t i = 0; i < piece.tokens; ++i, products += stride) {
    const int64_t at = (piece.token + i) * n + row;
    for (int64_t r = 0; r < rows; ++r) {
      float value = products[r];
      if (bias != nullptr) value += bias[row + r];
      if (residual != nullptr) value += residual[at + r];
      y[at + r] = value;
    }
  }
}

/// y = w x over input that is already prepared.
void linear_prepared(const Parallel& parallel, const Matrix& w, const Input& input, int64_t t,
                     const float* bias, const float* residual, float* y) {
  const Pieces pieces(w, t, parallel.threads);
  parallel(pieces.tasks(), [&](int64_t task) {
    alignas(64) float products[kCallFloats];
    pieces.for_task(task, [&](const Piece& piece) {
      linear_kernels().dot(w, input, piece.group, piece.groups, piece.token, piece.tokens,
                           products);
      write_piece(piece, products, w.n, bias, residual, y);
    });
  });
}

/// middle[t, m] = act(gate x) * (up x).
void gate_up(const Parallel& parallel, const Matrix& gate, const Matrix& up, Activation act,
             const Input& input, int64_t t, float* middle) {
  // Both matrices are cut alike: by the smaller step if their formats have different ones.
  const bool gate_cuts = row_groups_per_step(gate.format) <= row_groups_per_step(up.format);
  const Pieces pieces(gate_cuts ? gate : up, t, parallel.threads);
  parallel(pieces.tasks(), [&](int64_t task) {
    alignas(64) float gates[kCallFloats], ups[kCallFloats];
    pieces.for_task(task, [&](const Piece& p) {
      const LinearKernels& kernels = linear_kernels();
      kernels.dot(gate, input, p.group, p.groups, p.token, p.tokens, gates);
      kernels.dot(up, input, p.group, p.groups, p.token, p.tokens, ups);
      kernels.gate(act, gates, ups, p.tokens * p.groups * kTileRows);
      write_piece(p, gates, gate.n, nullptr, nullptr, middle);
    });
  });
}

}  // namespace

const LinearKernels& linear_kernels() {
#if defined(__x86_64__)
  if (cpu_tier() == CpuTier::avx512) return kLinearAvx512;
  if (cpu_tier() == CpuTier::avx2) return kLinearAvx2;
#endif
  return kLinearScalar;
}

void linear(const Parallel& parallel, const Matrix& w, const float* x, int64_t t, const float* bias,
            const float* residual, float* y) {
  if (t == 0) return;
  static thread_local Scratch scratch;
  const Input input = prepare_input(parallel, w.format, x, t, w.k, scratch);
  linear_prepared(parallel, w, input, t, bias, residual, y);
}

void gated_mlp(const Parallel& parallel, const Matrix& gate, const Matrix& up, const Matrix& down,
               Activation act, const float* x, int64_t t, const float* residual, float* y) {
  if (t == 0) return;
  static thread_local Scratch input_scratch, middle_scratch, codes_scratch;
  // One quantisation serves both matrices; a float format reads only x and needs none.
  const Format format = block_elements(gate.format) > 1 ? gate.format : up.format;
  const Input input = prepare_input(parallel, format, x, t, gate.k, input_scratch);
  const size_t bytes = static_cast<size_t>(t * gate.n) * sizeof(float);
  float* middle = reinterpret_cast<float*>(middle_scratch.reserve(bytes));
  gate_up(parallel, gate, up, act, input, t, middle);
  const Input down_input = prepare_input(parallel, down.format, middle, t, down.k, codes_scratch);
  linear_prepared(parallel, down, down_input, t, nullptr, residual, y);
}

}  // namespace spike
