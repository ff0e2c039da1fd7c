#include "core/linear.h"

#include <algorithm>

#include "core/cpu.h"
#include "core/linear_input.h"
#include "core/linear_kernels.h"

namespace spike {
namespace {

/// One piece of y[t, n] = w x + bias + residual.
void linear_piece(const Matrix& w, const Input& input, const Piece& piece, const float* bias,
                  const float* residual, float* y) {
  alignas(64) float products[kCallFloats];
  linear_kernels().dot(w, input, piece.group, piece.groups, piece.token, piece.tokens, products);
  write_piece(piece, products, w.n, bias, residual, y);
}

/// y = w x over input that is already prepared.
void linear_prepared(const Parallel& parallel, const Matrix& w, const Input& input, int64_t t,
                     const float* bias, const float* residual, float* y) {
  const Pieces pieces(w, t, parallel.threads);
  parallel(pieces.tasks(), [&](int64_t task) {
    pieces.for_task(
        task, [&](const Piece& piece) { linear_piece(w, input, piece, bias, residual, y); });
  });
}

/// hidden[t, m] = act(gate x) * (up x).
void gate_up(const Parallel& parallel, const GatedMlpWeights& weights, Activation act,
             const Input& input, int64_t t, const Hidden& hidden) {
  const Matrix &gate = weights.gate, &up = weights.up;
  // Both matrices are cut alike: by the smaller step if their formats have different ones.
  const bool gate_cuts = row_groups_per_step(gate.format) <= row_groups_per_step(up.format);
  const Pieces pieces(gate_cuts ? gate : up, t, parallel.threads);
  parallel(pieces.tasks(), [&](int64_t task) {
    alignas(64) float gates[kCallFloats], ups[kCallFloats];
    pieces.for_task(task, [&](const Piece& p) {
      const LinearKernels& kernels = linear_kernels();
      kernels.dot(gate, input, p.group, p.groups, p.token, p.tokens, gates);
      kernels.dot(up, input, p.group, p.groups, p.token, p.tokens, ups);
      add_bias(p, gate.n, weights.gate_bias, gates);
      add_bias(p, up.n, weights.up_bias, ups);
      kernels.gate(act, gates, ups, p.tokens * p.groups * kTileRows);
      hidden.store(p, gates);
    });
  });
}

/// Tokens whose hidden values are kept at a time: few, to stay in a cache and take little memory.
constexpr int64_t kMlpTokens = 2 * kTokensPerCall;

/// gated_mlp of at most kMlpTokens tokens.
void some_gated_mlp(const Parallel& parallel, const GatedMlpWeights& weights, Activation act,
                    const float* x, int64_t t, const float* residual, float* y) {
  const Matrix &gate = weights.gate, &up = weights.up, &down = weights.down;
  static thread_local Scratch input_scratch, hidden_scratch;
  // One quantisation serves both matrices; a float format reads only x and needs none.
  const Format format = block_elements(gate.format) > 1 ? gate.format : up.format;
  const Input input = prepare_input(parallel, format, x, t, gate.k, input_scratch);
  const Hidden hidden(down.format, t, gate.n, hidden_scratch);
  gate_up(parallel, weights, act, input, t, hidden);
  linear_prepared(parallel, down, hidden.input(), t, weights.down_bias, residual, y);
}

}  // namespace

const LinearKernels& linear_kernels() {
#if defined(__x86_64__)
  if (cpu_tier() >= CpuTier::avx512) return kLinearAvx512;
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

void linear_qkv(const Parallel& parallel, const QkvWeights& weights, const float* x, int64_t t,
                float* const y[3]) {
  if (t == 0) return;
  static thread_local Scratch scratch;
  const Matrix* w = weights.w;
  const Matrix* blocks = std::find_if(
      w, w + 2, [](const Matrix& one) { return block_elements(one.format) > 1; });
  const Input input = prepare_input(parallel, blocks->format, x, t, w[0].k, scratch);
  const Pieces pieces[3] = {
      {w[0], t, parallel.threads}, {w[1], t, parallel.threads}, {w[2], t, parallel.threads}};
  const int64_t first[3] = {0, pieces[0].tasks(), pieces[0].tasks() + pieces[1].tasks()};
  parallel(first[2] + pieces[2].tasks(), [&](int64_t task) {
    const int which = task >= first[2] ? 2 : task >= first[1] ? 1 : 0;
    pieces[which].for_task(task - first[which], [&](const Piece& piece) {
      linear_piece(w[which], input, piece, weights.bias[which], nullptr, y[which]);
    });
  });
}

void gated_mlp(const Parallel& parallel, const GatedMlpWeights& weights, Activation act,
               const float* x, int64_t t, const float* residual, float* y) {
  const int64_t k = weights.gate.k, n = weights.down.n;
  for (int64_t token = 0; token < t; token += kMlpTokens) {
    const float* added = residual == nullptr ? nullptr : residual + token * n;
    some_gated_mlp(parallel, weights, act, x + token * k, std::min(kMlpTokens, t - token), added,
                   y + token * n);
  }
}

}  // namespace spike
