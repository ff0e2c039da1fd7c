// The Python face of the kernels: quantisation, tests and benchmarks. No logic of its own: every
// array is C-contiguous, allocated and checked for shape by kernels/__init__.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/cpu.h"
#include "core/error_feedback.h"
#include "core/format.h"
#include "core/linear.h"
#include "core/moe.h"
#include "core/peak.h"
#include "core/quantize.h"
#include "core/stream.h"
#include "core/thread_pool.h"

namespace nb = nanobind;

namespace {

using Bytes = nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

spike::Format format_of(const std::string& name) {
  const auto format = spike::parse_format(name);
  if (!format) throw std::invalid_argument("unknown storage format '" + name + "'");
  return *format;
}

// One pool per thread count, used by one caller at a time; the GIL is released meanwhile.
template <class Body>
auto with_pool(int threads, Body&& body) {
  static std::mutex mutex;
  static std::map<int, std::unique_ptr<spike::ThreadPool>> pools;
  const nb::gil_scoped_release released;
  const std::lock_guard lock(mutex);
  auto& pool = pools[threads];
  if (!pool) pool = std::make_unique<spike::ThreadPool>(threads);
  return body(pool->parallel());
}

const float* data_or_null(const std::optional<ConstFloats>& x) { return x ? x->data() : nullptr; }

// Row, column and value that a format can't store.
using Refused = std::optional<std::tuple<int64_t, int64_t, float>>;

Refused refused(const std::optional<spike::Unrepresentable>& bad) {
  if (!bad) return std::nullopt;
  return std::make_tuple(bad->row, bad->column, bad->value);
}

Refused quantize(ConstFloats x, const std::string& name, Bytes rows,
                 std::optional<ConstFloats> importance, int threads) {
  const spike::Format format = format_of(name);
  const int64_t n = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  return refused(with_pool(threads, [&](const spike::Parallel& parallel) {
    return spike::quantize(parallel, format, x.data(), n, k, data_or_null(importance), rows.data());
  }));
}

Refused quantize_with_feedback(ConstFloats x, ConstFloats factor, const std::string& name,
                               Bytes rows, Floats errors, int threads) {
  const spike::Format format = format_of(name);
  const int64_t n = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  return refused(with_pool(threads, [&](const spike::Parallel& parallel) {
    return spike::quantize_with_feedback(parallel, format, x.data(), factor.data(), n, k,
                                         rows.data(), errors.data());
  }));
}

void dequantize(ConstBytes rows, const std::string& name, Floats x, int threads) {
  const spike::Format format = format_of(name);
  const int64_t n = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  with_pool(threads, [&](const spike::Parallel& parallel) {
    spike::dequantize(parallel, format, rows.data(), n, k, x.data());
  });
}

// A packed matrix as Python passes it: (bytes, format, n, k).
using PackedMatrix = std::tuple<ConstBytes, std::string, int64_t, int64_t>;

spike::Matrix matrix_of(const PackedMatrix& w) {
  const auto& [packed, name, n, k] = w;
  return {format_of(name), packed.data(), n, k};
}

void linear(ConstFloats x, const PackedMatrix& packed, std::optional<ConstFloats> bias,
            std::optional<ConstFloats> residual, Floats y, int threads) {
  const spike::Matrix w = matrix_of(packed);
  const int64_t t = static_cast<int64_t>(x.shape(0));
  with_pool(threads, [&](const spike::Parallel& parallel) {
    spike::linear(parallel, w, x.data(), t, data_or_null(bias), data_or_null(residual), y.data());
  });
}

spike::Activation activation_of(const std::string& name) {
  if (name == "silu") return spike::Activation::silu;
  if (name == "gelu_tanh") return spike::Activation::gelu_tanh;
  if (name == "gelu_erf") return spike::Activation::gelu_erf;
  if (name == "gelu_quick") return spike::Activation::gelu_quick;
  if (name == "relu") return spike::Activation::relu;
  if (name == "relu2") return spike::Activation::relu2;
  throw std::invalid_argument("unknown activation '" + name + "'");
}

void gated_mlp(ConstFloats x, const PackedMatrix& gate, const PackedMatrix& up,
               const PackedMatrix& down, const std::string& activation,
               std::optional<ConstFloats> residual, Floats y, int threads) {
  const spike::Activation act = activation_of(activation);
  const spike::GatedMlpWeights weights{matrix_of(gate), matrix_of(up), matrix_of(down)};
  const int64_t t = static_cast<int64_t>(x.shape(0));
  with_pool(threads, [&](const spike::Parallel& parallel) {
    spike::gated_mlp(parallel, weights, act, x.data(), t, data_or_null(residual), y.data());
  });
}

// gate, up, down: expert 0's matrix, the bytes of all experts; biases: gate, up, down.
void moe(ConstFloats x, ConstFloats weights,
         nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu> ids, const PackedMatrix& gate,
         const PackedMatrix& up, const PackedMatrix& down, const std::string& activation,
         float limit, float alpha, std::optional<ConstFloats> gate_bias,
         std::optional<ConstFloats> up_bias, std::optional<ConstFloats> down_bias, Floats y,
         int threads) {
  const spike::Experts experts{matrix_of(gate), matrix_of(up), matrix_of(down),
                               activation_of(activation), limit, alpha, data_or_null(gate_bias),
                               data_or_null(up_bias), data_or_null(down_bias)};
  const int64_t t = static_cast<int64_t>(x.shape(0)), top = static_cast<int64_t>(ids.shape(1));
  with_pool(threads, [&](const spike::Parallel& parallel) {
    spike::moe(parallel, experts, x.data(), t, weights.data(), ids.data(), top, y.data());
  });
}

void dequantize_rows(const PackedMatrix& packed,
                     nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu> rows, Floats out) {
  const spike::Matrix w = matrix_of(packed);
  const nb::gil_scoped_release released;
  for (size_t i = 0; i < rows.shape(0); ++i)
    spike::dequantize_row(w, rows.data()[i], out.data() + static_cast<int64_t>(i) * w.k);
}

// Exactly `size` bytes: nothing lies behind them that a kernel could read unnoticed.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> cache_lines(size_t size) {
  static constexpr std::align_val_t kLine{64};
  void* data = ::operator new(size, kLine);
  const nb::capsule owner(data, [](void* p) noexcept { ::operator delete(p, kLine); });
  return {data, {size}, owner};
}

// (name, tier, whether this CPU has it)
std::vector<std::tuple<std::string, std::string, bool>> cpu_features() {
  std::vector<std::tuple<std::string, std::string, bool>> all;
  for (const spike::CpuFeature& feature : spike::cpu_features())
    all.emplace_back(feature.name, spike::tier_name(feature.tier), feature.present);
  return all;
}

std::string best_tier(const std::vector<std::string>& names) {
  return spike::tier_name(spike::best_tier([&](const spike::CpuFeature& feature) {
    return std::find(names.begin(), names.end(), feature.name) != names.end();
  }));
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.def(
      "cpu_tier", [] { return spike::tier_name(spike::cpu_tier()); },
      "Instruction-set tier in use: scalar, avx2 or avx512.");
  m.def("cpu_features", &cpu_features);
  m.def("best_tier", &best_tier, nb::arg("features"));
  m.def("cache_lines", &cache_lines, nb::arg("size"));
  m.def(
      "block_elements", [](const std::string& f) { return spike::block_elements(format_of(f)); },
      nb::arg("format"));
  m.def(
      "row_multiple", [](const std::string& f) { return spike::row_multiple(format_of(f)); },
      nb::arg("format"));
  m.def(
      "row_bytes",
      [](const std::string& f, int64_t k) { return spike::row_bytes(format_of(f), k); },
      nb::arg("format"), nb::arg("k"));
  m.def(
      "packed_bytes",
      [](const std::string& f, int64_t n, int64_t k) {
        return spike::packed_bytes(format_of(f), n, k);
      },
      nb::arg("format"), nb::arg("n"), nb::arg("k"));
  m.def(
      "largest_value", [](const std::string& f) { return spike::largest_value(format_of(f)); },
      nb::arg("format"));
  m.def("quantize", &quantize, nb::arg("x").noconvert(), nb::arg("format"),
        nb::arg("rows").noconvert(), nb::arg("importance").none(), nb::arg("threads"));
  m.def("quantize_with_feedback", &quantize_with_feedback, nb::arg("x").noconvert(),
        nb::arg("factor").noconvert(), nb::arg("format"), nb::arg("rows").noconvert(),
        nb::arg("errors").noconvert(), nb::arg("threads"));
  m.def("dequantize", &dequantize, nb::arg("rows").noconvert(), nb::arg("format"),
        nb::arg("x").noconvert(), nb::arg("threads"));
  m.def(
      "pack",
      [](ConstBytes rows, const std::string& f, int64_t n, int64_t k, Bytes packed) {
        const nb::gil_scoped_release released;
        spike::pack(format_of(f), rows.data(), n, k, packed.data());
      },
      nb::arg("rows").noconvert(), nb::arg("format"), nb::arg("n"), nb::arg("k"),
      nb::arg("packed").noconvert());
  m.def(
      "unpack",
      [](ConstBytes packed, const std::string& f, int64_t n, int64_t k, Bytes rows) {
        const nb::gil_scoped_release released;
        spike::unpack(format_of(f), packed.data(), n, k, rows.data());
      },
      nb::arg("packed").noconvert(), nb::arg("format"), nb::arg("n"), nb::arg("k"),
      nb::arg("rows").noconvert());
  m.def("linear", &linear, nb::arg("x").noconvert(), nb::arg("packed"), nb::arg("bias").none(),
        nb::arg("residual").none(), nb::arg("y").noconvert(), nb::arg("threads"));
  m.def("gated_mlp", &gated_mlp, nb::arg("x").noconvert(), nb::arg("gate"), nb::arg("up"),
        nb::arg("down"), nb::arg("activation"), nb::arg("residual").none(),
        nb::arg("y").noconvert(), nb::arg("threads"));
  m.def("moe", &moe, nb::arg("x").noconvert(), nb::arg("weights").noconvert(),
        nb::arg("ids").noconvert(), nb::arg("gate"), nb::arg("up"), nb::arg("down"),
        nb::arg("activation"), nb::arg("limit"), nb::arg("alpha"), nb::arg("gate_bias").none(),
        nb::arg("up_bias").none(), nb::arg("down_bias").none(), nb::arg("y").noconvert(),
        nb::arg("threads"));
  m.def("dequantize_rows", &dequantize_rows, nb::arg("packed"), nb::arg("rows").noconvert(),
        nb::arg("out").noconvert());
  m.def(
      "fma_burst",
      [](int64_t rounds, int threads) {
        return with_pool(threads, [&](const spike::Parallel& parallel) {
          return spike::fma_burst(parallel, rounds);
        });
      },
      nb::arg("rounds"), nb::arg("threads"));
  m.def(
      "stream_read",
      [](ConstBytes data, int threads) {
        return with_pool(threads, [&](const spike::Parallel& parallel) {
          return spike::stream_read(parallel, data.data(), data.nbytes());
        });
      },
      nb::arg("data").noconvert(), nb::arg("threads"));
  m.def(
      "vnni_run",
      [](int64_t rounds, int threads) {
        return with_pool(threads, [&](const spike::Parallel& parallel) {
          return spike::vnni_run(parallel, rounds);
        });
      },
      nb::arg("rounds"), nb::arg("threads"));
}
