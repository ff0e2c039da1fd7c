#include "core/route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace spike {
namespace {

constexpr int64_t kParallelElements = 16 << 10;  // logits from which tokens are shared out

bool before(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

void softmax(float* x, int64_t count) {
  const float largest = *std::max_element(x, x + count);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i] - largest);
  for (int64_t i = 0; i < count; ++i) x[i] /= sum;
}

/// The places of the `top` largest values, in descending order.
void largest(const std::vector<float>& values, int64_t top, std::vector<int64_t>& order) {
  order.resize(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + top, order.end(), [&](int64_t a, int64_t b) {
    return before(values[a], values[b]) || (!before(values[b], values[a]) && a < b);
  });
}

/// One token at a time; the vectors keep their memory.
struct Router {
  const Routing& routing;
  std::vector<float> scores, choice, totals, members;
  std::vector<int64_t> order;

  void read(const float* logits, int64_t experts) {
    scores.assign(logits, logits + experts);
    if (routing.scores == Scores::softmax) softmax(scores.data(), experts);
    if (routing.scores == Scores::sigmoid)
      for (float& s : scores) s = 1.0f / (1.0f + std::exp(-s));
  }

  /// Experts outside of the best groups get -inf.
  void keep_best_groups() {
    const int64_t each = static_cast<int64_t>(choice.size()) / routing.groups;
    totals.clear();
    for (int64_t g = 0; g < routing.groups; ++g) {
      members.assign(choice.begin() + g * each, choice.begin() + (g + 1) * each);
      const auto end = members.begin() + routing.per_group;
      std::partial_sort(members.begin(), end, members.end(), before);
      totals.push_back(std::accumulate(members.begin(), end, 0.0f));
    }
    largest(totals, routing.best_groups, order);
    std::vector<bool> kept(totals.size());
    for (int64_t i = 0; i < routing.best_groups; ++i) kept[order[i]] = true;
    for (size_t i = 0; i < choice.size(); ++i)
      if (!kept[i / each]) choice[i] = -std::numeric_limits<float>::infinity();
  }

  void choose(const float* correction, float* weights, int64_t* ids) {
    choice = scores;
    if (correction != nullptr)
      for (size_t i = 0; i < choice.size(); ++i) choice[i] += correction[i];
    if (routing.groups > 1) keep_best_groups();
    largest(choice, routing.top, order);
    for (int64_t j = 0; j < routing.top; ++j) {
      ids[j] = order[j];
      weights[j] = scores[order[j]];
    }
  }

  void finish(float* weights) const {
    if (routing.softmax_chosen) softmax(weights, routing.top);
    if (routing.normalise) {
      float sum = std::accumulate(weights, weights + routing.top, 0.0f) + routing.eps;
      if (sum < routing.floor) sum = routing.floor;
      for (int64_t j = 0; j < routing.top; ++j) weights[j] /= sum;
    }
    for (int64_t j = 0; j < routing.top; ++j) weights[j] *= routing.scale;
  }
};

}  // namespace

void route(const Parallel& parallel, const Routing& routing, const float* logits, int64_t t,
           int64_t experts, const float* correction, float* weights, int64_t* ids) {
  const int64_t wide = std::min<int64_t>(t, parallel.threads * 2);
  const int64_t tasks = t * experts < kParallelElements ? std::min<int64_t>(t, 1) : wide;
  parallel(tasks, [&](int64_t task) {
    Router router{routing, {}, {}, {}, {}, {}};
    for (int64_t i = t * task / tasks; i < t * (task + 1) / tasks; ++i) {
      router.read(logits + i * experts, experts);
      router.choose(correction, weights + i * routing.top, ids + i * routing.top);
      router.finish(weights + i * routing.top);
    }
  });
}

}  // namespace spike
