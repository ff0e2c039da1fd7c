#include "core/moe.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/linear_input.h"
#include "core/linear_kernels.h"

namespace spike {
namespace {

// Elements from which copying and adding rows is shared out.
constexpr int64_t kParallelElements = 32 << 10;

/// Sorted rows [first, first + count) belong to one expert.
struct Segment {
  int64_t expert, first, count;
};

/// The pairs (token, slot), pair = token * top + slot, in order of their expert.
struct Order {
  std::vector<Segment> segments;
  std::vector<int64_t> pair_of;  ///< [rows] the pair of a sorted row
  std::vector<int64_t> row_of;   ///< [rows] the sorted row of a pair

  /// By comparison, not by counting: experts may be many and pairs few.
  void sort(const int64_t* ids, int64_t rows) {
    pair_of.resize(static_cast<size_t>(rows));
    row_of.resize(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) pair_of[i] = i;
    std::sort(pair_of.begin(), pair_of.end(),
              [&](int64_t a, int64_t b) { return std::pair(ids[a], a) < std::pair(ids[b], b); });
    segments.clear();
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t expert = ids[pair_of[row]];
      row_of[pair_of[row]] = row;
      if (segments.empty() || segments.back().expert != expert)
        segments.push_back({expert, row, 0});
      ++segments.back().count;
    }
  }
};

Matrix of_expert(Matrix w, int64_t expert) {
  w.data += static_cast<size_t>(expert) * packed_bytes(w.format, w.n, w.k);
  return w;
}

/// Runs body(first, last) over shares of [0, rows), in parallel if there is enough to do.
template <class Body>
void share(const Parallel& parallel, int64_t rows, int64_t elements, Body&& body) {
  const int64_t wide = std::min<int64_t>(rows, parallel.threads * 2);
  const int64_t tasks = elements < kParallelElements ? 1 : wide;
  parallel(tasks, [&](int64_t task) { body(rows * task / tasks, rows * (task + 1) / tasks); });
}

/// Calls body(segment, piece) for every piece of every chosen expert's output; `w` cuts them.
template <class Body>
void for_experts(const Parallel& parallel, const Matrix& w, const Order& order, Body&& body) {
  static thread_local std::vector<std::pair<int64_t, Pieces>> kept;
  auto& work = kept;  // tasks run on other threads, which have a vector of their own
  work.clear();
  int64_t tasks = 0;
  for (const Segment& segment : order.segments) {
    work.emplace_back(tasks, Pieces(w, segment.count, parallel.threads));
    tasks += work.back().second.tasks();
  }
  parallel(tasks, [&](int64_t task) {
    const auto after = std::partition_point(work.begin(), work.end(),
                                            [&](const auto& part) { return part.first <= task; });
    const auto& [first, pieces] = *std::prev(after);
    const Segment& segment = order.segments[std::prev(after) - work.begin()];
    pieces.for_task(task - first, [&](const Piece& piece) { body(segment, piece); });
  });
}

/// The piece among all sorted rows.
Piece within(const Segment& segment, Piece piece) {
  piece.token += segment.first;
  return piece;
}

/// A bias of stacked experts: expert's own, or null.
const float* bias_of(const float* biases, int64_t expert, int64_t n) {
  return biases == nullptr ? nullptr : biases + expert * n;
}

/// gates = act(gates) * ups, clamped if the experts say so.
void gate(const Experts& experts, float* gates, float* ups, int64_t count) {
  const LinearKernels& kernels = linear_kernels();
  if (experts.limit == 0.0f) return kernels.gate(experts.activation, gates, ups, count);
  const float limit = experts.limit, alpha = experts.alpha;
  for (int64_t i = 0; i < count; ++i) {
    gates[i] = alpha * (gates[i] > limit ? limit : gates[i]);  // NaN stays visible
    ups[i] = (ups[i] > limit ? limit : ups[i] < -limit ? -limit : ups[i]) + 1.0f;
  }
  kernels.gate(experts.activation, gates, ups, count);
  for (int64_t i = 0; i < count; ++i) gates[i] /= alpha;
}

bool is_float(Format format) { return block_elements(format) == 1; }

/// The input of every sorted row; or, if `shared`, of the one token that all rows are.
Input sorted_input(const Parallel& parallel, const Experts& experts, const Order& order,
                   const float* x, int64_t t, int64_t top, bool shared) {
  static thread_local Scratch code_scratch, sorted_codes, sorted_floats;
  const Matrix &gate = experts.gate, &up = experts.up;
  // One quantisation serves both matrices; a float format reads only x and needs none.
  const Format format = is_float(gate.format) ? up.format : gate.format;
  const Input input = prepare_input(parallel, format, x, t, gate.k, code_scratch);
  if (shared) return input;
  const int64_t rows = t * top, k = gate.k;
  Input sorted{k, nullptr, nullptr};
  float* floats = nullptr;
  if (is_float(gate.format) || is_float(up.format))
    sorted.x = floats = reinterpret_cast<float*>(
        sorted_floats.reserve(static_cast<size_t>(rows * k) * sizeof(float)));
  if (input.blocks != nullptr)
    sorted.blocks = reinterpret_cast<InputBlock*>(
        sorted_codes.reserve(static_cast<size_t>(rows * (k / 32)) * sizeof(InputBlock)));
  share(parallel, rows, rows * k, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t token = order.pair_of[row] / top;
      if (floats != nullptr) std::copy_n(x + token * k, k, floats + row * k);
      if (sorted.blocks != nullptr)
        std::copy_n(input.blocks + token * (k / 32), k / 32, sorted.blocks + row * (k / 32));
    }
  });
  return sorted;
}

/// hidden[rows, m] = gated product of each sorted row's expert.
void gate_up(const Parallel& parallel, const Experts& experts, const Order& order,
             const Input& input, bool shared, const Hidden& hidden) {
  const Matrix &gates = experts.gate, &ups = experts.up;
  const int64_t m = gates.n;
  // Both matrices are cut alike: by the smaller step if their formats have different ones.
  const bool gate_cuts = row_groups_per_step(gates.format) <= row_groups_per_step(ups.format);
  for_experts(parallel, gate_cuts ? gates : ups, order, [&](const Segment& s, const Piece& p) {
    alignas(64) float g[kCallFloats], u[kCallFloats];
    const LinearKernels& kernels = linear_kernels();
    const int64_t token = (shared ? 0 : s.first) + p.token;
    kernels.dot(of_expert(gates, s.expert), input, p.group, p.groups, token, p.tokens, g);
    kernels.dot(of_expert(ups, s.expert), input, p.group, p.groups, token, p.tokens, u);
    add_bias(p, m, bias_of(experts.gate_bias, s.expert, m), g);
    add_bias(p, m, bias_of(experts.up_bias, s.expert, m), u);
    gate(experts, g, u, p.tokens * p.groups * kTileRows);
    hidden.store(within(s, p), g);
  });
}

/// out[rows, n] = down(hidden) of each sorted row's expert.
void down(const Parallel& parallel, const Experts& experts, const Order& order,
          const Input& input, float* out) {
  const Matrix& w = experts.down;
  for_experts(parallel, w, order, [&](const Segment& s, const Piece& p) {
    alignas(64) float products[kCallFloats];
    linear_kernels().dot(of_expert(w, s.expert), input, p.group, p.groups, s.first + p.token,
                         p.tokens, products);
    write_piece(within(s, p), products, w.n, bias_of(experts.down_bias, s.expert, w.n), nullptr,
                out);
  });
}

}  // namespace

void moe(const Parallel& parallel, const Experts& experts, const float* x, int64_t t,
         const float* weights, const int64_t* ids, int64_t top, float* y) {
  if (t == 0) return;
  static thread_local Scratch hidden_scratch, out_scratch;
  static thread_local Order kept;
  Order& order = kept;  // tasks run on other threads, which have one of their own
  const int64_t rows = t * top, m = experts.gate.n, n = experts.down.n;
  order.sort(ids, rows);
  // Every expert of a single token reads it where it is, unless it was chosen twice.
  const bool shared = t == 1 && static_cast<int64_t>(order.segments.size()) == rows;
  const Input input = sorted_input(parallel, experts, order, x, t, top, shared);
  const Hidden hidden(experts.down.format, rows, m, hidden_scratch);
  gate_up(parallel, experts, order, input, shared, hidden);
  float* out = reinterpret_cast<float*>(
      out_scratch.reserve(static_cast<size_t>(rows * n) * sizeof(float)));
  down(parallel, experts, order, hidden.input(), out);
  share(parallel, t, rows * n, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      float* to = y + token * n;
      std::fill_n(to, n, 0.0f);
      for (int64_t pair = token * top; pair < (token + 1) * top; ++pair) {
        const float weight = weights[pair];
        const float* from = out + order.row_of[pair] * n;
        for (int64_t i = 0; i < n; ++i) to[i] += weight * from[i];
      }
    }
  });
}

}  // namespace spike
