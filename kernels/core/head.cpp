#include "core/head.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/linear_input.h"
#include "core/linear_kernels.h"

namespace spike {
namespace {

constexpr int64_t kLine = 16;         // logits looked at together
constexpr int64_t kChunk = 16 << 10;  // logits of a row that are worth a task

struct Best {
  float logit = -std::numeric_limits<float>::infinity();
  int32_t id = 0;

  /// Takes a logit with a higher id than all before it.
  void take(float value, int64_t at) {
    if (value > logit || (std::isnan(value) && !std::isnan(logit)))
      logit = value, id = static_cast<int32_t>(at);
  }
};

/// Takes logits `first`, `first + 1`, ...; nearly all lines hold nothing better.
void take_row(const float* logits, int64_t count, int64_t first, Best& best) {
  int64_t i = 0;
  for (; i + kLine <= count; i += kLine) {
    int better = 0;
    for (int64_t j = 0; j < kLine; ++j) better |= !(logits[i + j] <= best.logit);
    if (better != 0)
      for (int64_t j = 0; j < kLine; ++j) best.take(logits[i + j], first + i + j);
  }
  for (; i < count; ++i) best.take(logits[i], first + i);
}

/// What the tasks found, each for the ids of its own part of the rows.
class Found {
 public:
  Found(int64_t tasks, int64_t t)
      : tasks_(tasks), stride_((t + 7) / 8 * 8 + 8), best_(static_cast<size_t>(tasks * stride_)) {}

  Best* of_task(int64_t task) { return best_.data() + task * stride_; }

  /// Tasks are in order of their ids, so that the first of equal logits stays.
  void write(int64_t t, const HeadOutput& output) {
    for (int64_t i = 0; i < t; ++i) {
      Best best;
      for (int64_t task = 0; task < tasks_; ++task)
        best.take(of_task(task)[i].logit, of_task(task)[i].id);
      output.ids[i] = best.id;
      output.best[i] = best.logit;
    }
  }

 private:
  int64_t tasks_, stride_;  // a cache line lies between the tasks
  std::vector<Best> best_;
};

}  // namespace

void head(const Parallel& parallel, const Matrix& w, const float* x, int64_t t, const float* bias,
          const HeadOutput& output) {
  if (t == 0) return;
  static thread_local Scratch scratch;
  const Input input = prepare_input(parallel, w.format, x, t, w.k, scratch);
  const Pieces pieces(w, t, parallel.threads);
  Found found(pieces.tasks(), t);
  parallel(pieces.tasks(), [&](int64_t task) {
    alignas(64) float products[kCallFloats];
    pieces.for_task(task, [&](const Piece& piece) {
      linear_kernels().dot(w, input, piece.group, piece.groups, piece.token, piece.tokens, products);
      add_bias(piece, w.n, bias, products);
      const int64_t stride = piece.groups * kTileRows, row = piece.group * kTileRows;
      const int64_t rows = std::min(stride, w.n - row);
      for (int64_t i = 0; i < piece.tokens; ++i) {
        const float* logits = products + i * stride;
        const int64_t token = piece.token + i, place = output.places[token];
        if (place >= 0) std::copy_n(logits, rows, output.logits + place * w.n + row);
        take_row(logits, rows, row, found.of_task(task)[token]);
      }
    });
  });
  found.write(t, output);
}

void choose(const Parallel& parallel, const float* x, int64_t t, int64_t n,
            const HeadOutput& output) {
  if (t == 0) return;
  const int64_t tasks = std::clamp<int64_t>(t * n / kChunk, 1, 4 * parallel.threads);
  Found found(tasks, t);
  parallel(tasks, [&](int64_t task) {
    const int64_t first = n * task / tasks, last = n * (task + 1) / tasks;
    for (int64_t i = 0; i < t; ++i) {
      const float* logits = x + i * n + first;
      const int64_t place = output.places[i];
      if (place >= 0) std::copy_n(logits, last - first, output.logits + place * n + first);
      take_row(logits, last - first, first, found.of_task(task)[i]);
    }
  });
  found.write(t, output);
}

}  // namespace spike
