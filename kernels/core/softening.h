// From logits to weights. Include inside a SPIKE_TARGET region, after attention_kernel.h and a simd_*.h.
#pragma once

namespace spike {
namespace {

/// softcap * tanh(x / softcap) in place.
template <class V>
void cap_row(float* s, int64_t begin, int64_t end, float softcap) {
  const auto twice = V::set(2.0f / softcap), one = V::set(1.0f);
  for (int64_t j = begin; j < end; j += V::width) {
    const auto e = V::exp(V::mul(V::load(s + j), twice));
    const auto tanh = V::sub(one, V::div(V::set(2.0f), V::add(e, one)));
    V::store(s + j, V::mul(tanh, V::set(softcap)));
  }
}

/// ALiBi (Press et al. 2022): a logit falls by slope for every position that the key lies back.
inline void bias_row(float* s, int64_t begin, int64_t end, float slope, int64_t distance) {
  for (int64_t j = begin; j < end; ++j)
    s[j] += slope * static_cast<float>(static_cast<int32_t>(distance + j));
}

/// Positions of a tile, relative to its begin.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;

  bool empty() const { return begin >= end; }
  Span widened(int64_t to) const {
    return empty() ? Span{} : Span{begin / to * to, (end + to - 1) / to * to};
  }
};

/// Turns logits [rows, tile_positions] into weights relative to each row's new maximum; updates max
/// and sum. carry = the factors by which what was accumulated so far shrinks.
template <class V>
class Softening {
 public:
  Softening(const QueryRows& q, int64_t tile, const float* slopes) : q_(q), tile_(tile), slopes_(slopes) {}

  /// Masks row r over `span` and what its weights are made with; returns its largest logit.
  float prepare(int64_t r, const Span& span, float* s) const {
    const int64_t low = std::clamp(q_.low(r) - tile_, span.begin, span.end);
    const int64_t high = std::clamp(q_.high(r) - tile_, low, span.end);
    if (q_.spec->softcap > 0.0f) cap_row<V>(s, span.begin, span.end, q_.spec->softcap);
    if (slopes_ != nullptr)
      bias_row(s, span.begin, span.end, slopes_[r % q_.group], tile_ + 1 - q_.high(r));
    const Span whole = run(span);
    std::fill(s + whole.begin, s + low, -INFINITY);
    std::fill(s + high, s + whole.end, -INFINITY);
    auto top = V::set(-INFINITY);
    for (int64_t j = span.begin; j < span.end; j += V::width) top = V::max(V::load(s + j), top);
    return V::top(top);
  }

  /// carry[r] = e^(max[r] - top[r]), max = top = the larger one, for a register of rows.
  static void shrink(float* max, float* top, float* carry) {
    const auto old = V::load(max), now = V::max(V::load(top), old);
    V::store(carry, V::exp(V::sub(old, base(now))));
    V::store(max, now);
    V::store(top, now);
  }

  /// s = e^(s - top) over `span`, as pairs if lanes carry such; returns the sum.
  static float weigh(const Span& span, float top, float* s) {
    const auto low = base(V::set(top));
    auto total = V::zero();
    const Span whole = run(span);
    for (int64_t j = whole.begin; j < whole.end; j += V::terms * V::width) {
      const auto first = V::weight(V::sub(V::load(s + j), low));
      if constexpr (V::terms == 2) {
        const auto second = V::weight(V::sub(V::load(s + j + V::width), low));
        const auto both = V::neighbours(first, second);
        V::store(s + j / 2, both);
        total = V::dot(both, V::ones(), total);  // the sum of what they were rounded to
      } else {
        V::store(s + j, first);
        total = V::add(total, first);
      }
    }
    return V::sum(total);
  }

 private:
  /// Positions whose weights are made together.
  static Span run(const Span& span) { return span.widened(V::terms * row_floats); }

  /// -infinity minus -infinity would be NaN.
  static typename V::F base(typename V::F top) { return V::max(V::set(-FLT_MAX), top); }

  const QueryRows& q_;
  int64_t tile_;
  const float* slopes_;
};

}  // namespace
}  // namespace spike
