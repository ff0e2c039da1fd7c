// The Python face of the kernels: quantisation, tests and benchmarks. No logic of its own: every
// array is C-contiguous, allocated and checked for shape by kernels/__init__.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "core/cpu.h"
#include "core/format.h"
#include "core/quantize.h"
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

std::optional<std::tuple<int64_t, int64_t, float>> quantize(ConstFloats x, const std::string& name,
                                                            Bytes rows, int threads) {
  const spike::Format format = format_of(name);
  const int64_t n = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  const auto bad = with_pool(threads, [&](const spike::Parallel& parallel) {
    return spike::quantize(parallel, format, x.data(), n, k, rows.data());
  });
  if (!bad) return std::nullopt;
  return std::make_tuple(bad->row, bad->column, bad->value);
}

void dequantize(ConstBytes rows, const std::string& name, Floats x, int threads) {
  const spike::Format format = format_of(name);
  const int64_t n = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  with_pool(threads, [&](const spike::Parallel& parallel) {
    spike::dequantize(parallel, format, rows.data(), n, k, x.data());
  });
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.def("cpu_tier", [] { return spike::tier_name(spike::cpu_tier()); },
        "Instruction-set tier in use: scalar, avx2 or avx512.");
  m.def("block_elements", [](const std::string& f) { return spike::block_elements(format_of(f)); },
        nb::arg("format"));
  m.def("row_bytes",
        [](const std::string& f, int64_t k) { return spike::row_bytes(format_of(f), k); },
        nb::arg("format"), nb::arg("k"));
  m.def("packed_bytes",
        [](const std::string& f, int64_t n, int64_t k) {
          return spike::packed_bytes(format_of(f), n, k);
        },
        nb::arg("format"), nb::arg("n"), nb::arg("k"));
  m.def("largest_value", [](const std::string& f) { return spike::largest_value(format_of(f)); },
        nb::arg("format"));
  m.def("quantize", &quantize, nb::arg("x").noconvert(), nb::arg("format"),
        nb::arg("rows").noconvert(), nb::arg("threads"));
  m.def("dequantize", &dequantize, nb::arg("rows").noconvert(), nb::arg("format"),
        nb::arg("x").noconvert(), nb::arg("threads"));
  m.def("pack",
        [](ConstBytes rows, const std::string& f, int64_t n, int64_t k, Bytes packed) {
          const nb::gil_scoped_release released;
          spike::pack(format_of(f), rows.data(), n, k, packed.data());
        },
        nb::arg("rows").noconvert(), nb::arg("format"), nb::arg("n"), nb::arg("k"),
        nb::arg("packed").noconvert());
  m.def("unpack",
        [](ConstBytes packed, const std::string& f, int64_t n, int64_t k, Bytes rows) {
          const nb::gil_scoped_release released;
          spike::unpack(format_of(f), packed.data(), n, k, rows.data());
        },
        nb::arg("packed").noconvert(), nb::arg("format"), nb::arg("n"), nb::arg("k"),
        nb::arg("rows").noconvert());
}
