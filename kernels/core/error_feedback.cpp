// Error feedback, in the terms of feedback_tile.h: q_j is best chosen as the grid's value nearest
// to w_j + carried_j / R_jj, where carried_j are the terms of y_j with i < j. One task quantises
// kLanes rows, one per lane.
#include "core/error_feedback.h"

#include <vector>

#include "core/feedback_refine.h"
#include "core/feedback_tile.h"
#include "core/short_block.h"

namespace spike {
namespace {

constexpr int kSweeps = 2;

/// The part of R that belongs to one sub-block.
struct Corner {
  int size;
  float r[kLongestSub][kLongestSub];
  float inverse[kLongestSub];  ///< 1 / r[j][j]
  float weight[kLongestSub];   ///< r[j][j]^2: what the squared error of column j counts

  Corner(const Factor& factor, int64_t begin, int size) : size(size) {
    for (int i = 0; i < size; ++i)
      for (int j = 0; j < size; ++j) r[i][j] = factor.row(begin + i)[begin + j];
    for (int j = 0; j < size; ++j) {
      inverse[j] = 1 / r[j][j];
      weight[j] = r[j][j] * r[j][j];
    }
  }
};

/// One sub-block of each row: its weights, and what the errors before it ask of it.
struct SubBlock {
  const GridShape& shape;
  const Corner& corner;
  const Rows* w;
  const Rows* carried;
};

/// Rounds onto a grid with feedback inside of the sub-block; returns the sum of y_j^2.
Rows round_with_feedback(const SubBlock& sub, Affine grid, Rows* codes, Rows* error, Rows* y) {
  const int size = sub.corner.size;
  Rows cost{};
  for (int j = 0; j < size; ++j) y[j] = sub.carried[j];
  const Rows inverse = inverse_or_zero(grid.scale);
  for (int j = 0; j < size; ++j) {
    const Rows wanted = sub.w[j] + y[j] * sub.corner.inverse[j];
    codes[j] = code_of(sub.shape, wanted, inverse, grid.min);
    error[j] = sub.w[j] - (grid.scale * codes[j] - grid.min);
    y[j] += error[j] * sub.corner.r[j][j];
    cost += y[j] * y[j];
    for (int l = j + 1; l < size; ++l) y[l] += error[j] * sub.corner.r[j][l];
  }
  return cost;
}

/// The best of several grids for a sub-block, lane by lane.
struct Choice {
  Affine grid{};    ///< as given to `consider`
  Rows cost{};
  bool any = false;

  /// `tag` is what is kept, `actual` the scale and min it stands for.
  void consider(const SubBlock& sub, Affine tag, Affine actual) {
    Rows codes[kLongestSub], error[kLongestSub], y[kLongestSub];
    const Rows left = round_with_feedback(sub, actual, codes, error, y);
    const auto better = any ? left < cost : left == left;
    cost = better ? left : cost;
    grid.scale = better ? tag.scale : grid.scale;
    grid.min = better ? tag.min : grid.min;
    any = true;
  }
};

/// Stored scale and min of sub-block s of a super-block: those that leave the least error among the
/// first guess and the neighbours of what suits the sub-block now.
void choose_stored(const SubBlock& sub, LaneGrid& grid, int s) {
  const GridShape& shape = sub.shape;
  Choice choice;
  const auto consider = [&](Rows scale, Rows min) {
    choice.consider(sub, {scale, min}, {grid.d * scale, grid.dmin * min});
  };
  consider(grid.scale[s], grid.min[s]);
  Rows x[kLongestSub];
  for (int i = 0; i < shape.sub; ++i) x[i] = sub.w[i] + sub.carried[i] * sub.corner.inverse[i];
  const Affine near = round_sub(shape, grid, fit_sub(shape, x, sub.corner.weight));
  const int reach = shape.has_min ? 1 : 0;
  for (int a = -1; a <= 1; ++a)
    for (int b = -reach; b <= reach; ++b)
      consider(clamp<Rows>(near.scale + static_cast<float>(a), shape.least, shape.most),
               clamp<Rows>(near.min + static_cast<float>(b), 0, shape.most));
  grid.scale[s] = choice.grid.scale;
  grid.min[s] = choice.grid.min;
}

/// d of a block of 32 values: of the fitted one's neighbours the one that leaves the least error.
void choose_own(const SubBlock& sub, LaneGrid& grid) {
  constexpr float kFactors[] = {1, 0.88f, 0.92f, 0.95f, 0.975f, 1.025f, 1.05f, 1.09f};
  Choice choice;
  for (const float factor : kFactors) {
    Affine candidate{grid.d * factor, grid.dmin};
    round_to_half(candidate.scale);
    choice.consider(sub, candidate, candidate);
  }
  grid.d = choice.grid.scale;
}

/// Quantises the block that begins at column `begin`; the last one of a row may be short.
SPIKE_EVERY_TIER void feed_block(FeedbackTile& tile, int64_t begin) {
  GridShape shape = tile.shape;
  shape.elements = static_cast<int>(std::min<int64_t>(shape.elements, tile.factor.k - begin));
  Rows carried[kLongestBlock], x[kLongestBlock];
  float weight[kLongestBlock];
  for (int i = 0; i < shape.elements; ++i) carried[i] = Rows{};
  carry(tile.factor, tile.error.get(), 0, begin, begin, shape.elements, carried);
  for (int i = 0; i < shape.elements; ++i) {
    const float r = tile.factor.row(begin + i)[begin + i];
    x[i] = tile.w[static_cast<size_t>(begin + i)] + carried[i] * (1 / r);
    weight[i] = r * r;
  }
  LaneGrid& grid = tile.grids[static_cast<size_t>(begin / tile.shape.elements)];
  fit_grid(shape, x, weight, grid);
  for (int s = 0; s < shape.subs(); ++s) {
    const int offset = shape.sub * s, done = offset + shape.sub;
    const int64_t at = begin + offset;
    const Corner corner(tile.factor, at, shape.sub);
    const SubBlock sub{shape, corner, tile.w.get() + at, carried + offset};
    if (shape.is_super())
      choose_stored(sub, grid, s);
    else
      choose_own(sub, grid);
    const Affine chosen{grid.d * grid.scale[s], grid.dmin * grid.min[s]};
    round_with_feedback(sub, chosen, tile.codes.get() + at, tile.error.get() + at,
                        tile.y.get() + at);
    carry(tile.factor, tile.error.get(), at, at + shape.sub, begin + done, shape.elements - done,
          carried + done);
  }
}

/// Sum of y_j^2 for errors that are known already.
SPIKE_EVERY_TIER void add_cost(const Factor& factor, const Rows* error, Rows& cost) {
  constexpr int kColumns = 32;
  for (int64_t begin = 0; begin < factor.k; begin += kColumns) {
    Rows y[kColumns]{};
    carry(factor, error, 0, begin, begin, kColumns, y);
    for (int j = 0; j < kColumns; ++j) {
      for (int i = 0; i <= j; ++i) y[j] += error[begin + i] * factor.row(begin + i)[begin + j];
      cost += y[j] * y[j];
    }
  }
}

/// values[i][r] = x[r, i] for up to kLanes rows; zeros for the rest.
void load_rows(const float* x, int64_t rows, int64_t k, Rows* values) {
  for (int64_t i = 0; i < k; ++i) {
    values[i] = Rows{};
    for (int64_t r = 0; r < rows; ++r) values[i][r] = x[r * k + i];
  }
}

/// The bytes of up to kLanes rows.
template <class B>
void write_rows(const FeedbackTile& tile, int64_t count, uint8_t* rows, size_t stride) {
  for (int64_t begin = 0; begin < tile.factor.k; begin += B::kElements) {
    const auto number = static_cast<size_t>(begin / B::kElements);
    for (int r = 0; r < count; ++r) {
      const B block = block_of<B>(tile.grids[number], tile.codes.get() + begin, r);
      uint8_t* to = rows + static_cast<size_t>(r) * stride + number * sizeof(B);
      if constexpr (ShortTraits<B>::kShort)
        if (begin + B::kElements > tile.factor.k) {
          shorten(block, static_cast<int>(tile.factor.k - begin) / 64, to);
          continue;
        }
      std::memcpy(to, &block, sizeof(B));
    }
  }
}

/// What all rows need of H.
struct Curvature {
  GridShape shape;
  std::vector<float> importance;  ///< its diagonal
  std::vector<float> corners;     ///< [k / sub][sub][sub]: between the columns of each sub-block

  const float* corner(int64_t at) const { return corners.data() + at * shape.sub; }
};

Curvature curvature_of(const Parallel& parallel, const Factor& factor, const GridShape& shape) {
  const auto k = static_cast<size_t>(factor.k), sub = static_cast<size_t>(shape.sub);
  Curvature all{shape, std::vector<float>(k), std::vector<float>(k * sub)};
  parallel(factor.k / shape.sub, [&](int64_t task) {
    const int64_t at = task * shape.sub;
    float* h = all.corners.data() + at * shape.sub;
    curvature_of(factor, at, shape.sub, h);
    for (int i = 0; i < shape.sub; ++i)
      all.importance[static_cast<size_t>(at + i)] = h[i * shape.sub + i];
  });
  return all;
}

/// Up to kLanes rows, quantised in three ways, of which the best is kept.
class TileTask {
 public:
  TileTask(const Factor& factor, const Curvature& curvature, Format format, const float* x,
           int64_t count)
      : factor_(factor), curvature_(curvature), format_(format), x_(x), count_(count),
        stride_(row_bytes(format, factor.k)), tile_(factor, curvature.shape),
        values_(size(count * factor.k)) {
    load_rows(x, count, factor.k, tile_.w.get());
  }

  /// Replaces plainly quantised rows by better ones; tells the errors.
  void run(uint8_t* rows, float* errors) {
    std::vector<uint8_t> trial(size(count_) * stride_);
    const Rows plain = cost_of(rows);
    quantize(Parallel{}, format_, x_, count_, factor_.k, curvature_.importance.data(),
             trial.data());
    const Rows weighted = cost_of(trial.data());
    for (int r = 0; r < count_; ++r)
      if (weighted[r] < plain[r]) copy_row(trial.data(), r, rows);
    feed();
    const Rows fed = tile_.cost();
    with_block(format_, [&]<class B>(B) { write_rows<B>(tile_, count_, trial.data(), stride_); });
    for (int r = 0; r < count_; ++r) {
      errors[3 * r] = plain[r];
      errors[3 * r + 1] = weighted[r];
      errors[3 * r + 2] = fed[r];
      if (fed[r] < std::min(plain[r], weighted[r])) copy_row(trial.data(), r, rows);
    }
  }

 private:
  void feed() {
    const GridShape& shape = curvature_.shape;
    for (int64_t begin = 0; begin < factor_.k; begin += shape.elements) feed_block(tile_, begin);
    for (int sweep = 0; sweep < kSweeps; ++sweep)
      for (int64_t at = 0; at < factor_.k; at += shape.sub)
        refine_sub_block(tile_, curvature_.corner(at), at);
  }

  static size_t size(int64_t n) { return static_cast<size_t>(n); }

  Rows cost_of(const uint8_t* rows) {
    dequantize(Parallel{}, format_, rows, count_, factor_.k, values_.data());
    load_rows(values_.data(), count_, factor_.k, tile_.error.get());
    for (size_t i = 0; i < size(factor_.k); ++i) tile_.error[i] = tile_.w[i] - tile_.error[i];
    Rows cost{};
    add_cost(factor_, tile_.error.get(), cost);
    return cost;
  }

  void copy_row(const uint8_t* from, int row, uint8_t* to) const {
    std::memcpy(to + size(row) * stride_, from + size(row) * stride_, stride_);
  }

  const Factor& factor_;
  const Curvature& curvature_;
  Format format_;
  const float* x_;
  int64_t count_;
  size_t stride_;
  FeedbackTile tile_;
  std::vector<float> values_;
};

}  // namespace

std::optional<Unrepresentable> quantize_with_feedback(const Parallel& parallel, Format format,
                                                      const float* x, const float* factor,
                                                      int64_t n, int64_t k, uint8_t* rows,
                                                      float* errors) {
  if (auto bad = quantize(parallel, format, x, n, k, nullptr, rows)) return bad;
  const Factor r{factor, k};
  GridShape shape{};
  with_block(format, [&]<class B>(B) { shape = kShape<B>; });
  const Curvature curvature = curvature_of(parallel, r, shape);
  const size_t stride = row_bytes(format, k);
  parallel((n + kLanes - 1) / kLanes, [&](int64_t task) {
    const int64_t first = task * kLanes;
    TileTask tile(r, curvature, format, x + first * k, std::min<int64_t>(kLanes, n - first));
    tile.run(rows + static_cast<size_t>(first) * stride, errors + 3 * first);
  });
  return std::nullopt;
}

}  // namespace spike
