#include "ops/op.h"

#include <algorithm>
#include <charconv>

namespace spike::ops {
namespace {

/// An attribute's value; false if there is no such attribute or it is no T.
template <class T>
bool read_attribute(const LinkText& link, const char* name, T& value) {
  const auto found = link.attributes.find(std::string_view(name));
  if (found == link.attributes.end()) return false;
  const std::string& text = found->second;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  return fault == std::errc() && end == text.data() + text.size();
}

}  // namespace

std::string Info::text(const char* name) const {
  std::string found = text(name, "");
  if (found.empty()) throw Failure(std::string("attribute '") + name + "' is missing");
  return found;
}

std::string Info::text(const char* name, const char* otherwise) const {
  const auto found = link_.attributes.find(std::string_view(name));
  return found == link_.attributes.end() ? otherwise : found->second;
}

int64_t Info::integer(const char* name) const {
  int64_t value = 0;
  if (read_attribute(link_, name, value)) return value;
  throw Failure(std::string("attribute '") + name + "' is missing or no integer");
}

int64_t Info::integer(const char* name, int64_t otherwise) const {
  int64_t value = 0;
  return read_attribute(link_, name, value) ? value : otherwise;
}

float Info::number(const char* name) const {
  float value = 0.0f;
  if (read_attribute(link_, name, value)) return value;
  throw Failure(std::string("attribute '") + name + "' is missing or no float");
}

float Info::number(const char* name, float otherwise) const {
  float value = 0.0f;
  return read_attribute(link_, name, value) ? value : otherwise;
}

Matrix Info::weight(size_t input, const std::string& format, int64_t n, int64_t k,
                    int64_t stacked) const {
  const std::string name = "weight at input " + std::to_string(input) + ": ";
  const auto parsed = parse_format(format);
  if (!parsed) throw Failure("unknown format '" + format + "'");
  if (stacked <= 0 || n <= 0 || k <= 0 || k % row_multiple(*parsed) != 0)
    throw Failure(name + "a " + format + " matrix can't be [" + std::to_string(n) + ", " +
                  std::to_string(k) + "]");
  const Tensor tensor = input < constants_.size() ? constants_[input] : Tensor();
  if (tensor.data == nullptr) throw Failure(name + "must be a constant initialiser");
  const size_t wanted = static_cast<size_t>(stacked) * packed_bytes(*parsed, n, k);
  if (tensor.type != ORT_U8 || static_cast<size_t>(tensor.elements()) != wanted)
    throw Failure(name + "has " + std::to_string(tensor.elements()) + " bytes, a packed " + format +
                  " matrix [" + std::to_string(n) + ", " + std::to_string(k) + "] has " +
                  std::to_string(wanted));
  if (reinterpret_cast<uintptr_t>(tensor.data) % 64 != 0)
    throw Failure(name + "isn't aligned to 64 bytes: align its offset in the weights file");
  return {*parsed, tensor.as<uint8_t>(), n, k};
}

const Tensor& Context::input(size_t index) const {
  if (!given(index)) throw Failure("input " + std::to_string(index) + " is missing");
  return *inputs_[index];
}

const float* Context::optional(size_t index, std::span<const int64_t> wanted,
                               const char* name) const {
  if (!given(index)) return nullptr;
  const Tensor& tensor = *inputs_[index];
  if (!std::ranges::equal(tensor.shape(), wanted))
    throw Failure(std::string(name) + " has shape " + tensor.shape_text() + ", expected " +
                  dims_text(wanted));
  return tensor.as<float>();
}

void* Context::output(size_t index, std::span<const int64_t> dims) const {
  return results_.open(outputs_[index], dims, declaration_.outputs[index]);
}

float* Context::output_like(size_t index, const Tensor& like, int64_t last) const {
  int64_t dims[Tensor::max_rank];
  std::copy_n(like.dims, like.rank, dims);
  dims[like.rank - 1] = last;
  return static_cast<float*>(output(index, {dims, like.rank}));
}

}  // namespace spike::ops
