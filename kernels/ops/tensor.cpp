#include "ops/tensor.h"

#include <algorithm>

namespace spike::ops {

int64_t Tensor::elements() const {
  int64_t product = 1;
  for (int64_t d : shape()) product *= d;
  return product;
}

int64_t Tensor::rows(size_t dropped, const char* name) const {
  if (rank < dropped)
    throw Failure(std::string(name) + " has shape " + shape_text() + ", too few dims");
  int64_t product = 1;
  for (size_t i = 0; i + dropped < rank; ++i) product *= dims[i];
  return product;
}

void Tensor::require(std::initializer_list<int64_t> wanted, const char* name) const {
  const std::span<const int64_t> want(wanted.begin(), wanted.size());
  const bool same = std::equal(want.begin(), want.end(), dims, dims + rank,
                               [](int64_t w, int64_t d) { return w < 0 || w == d; });
  if (!same)
    throw Failure(std::string(name) + " has shape " + shape_text() + ", expected " +
                  dims_text(want));
}

std::string Tensor::shape_text() const { return dims_text(shape()); }

std::string dims_text(std::span<const int64_t> dims) {
  std::string text = "[";
  for (int64_t d : dims) text += (text.size() > 1 ? ", " : "") + (d < 0 ? "?" : std::to_string(d));
  return text + "]";
}

size_t element_bytes(OrtElementType type) {
  switch (type) {
    case ORT_U8: return 1;
    case ORT_F32:
    case ORT_I32: return 4;
    case ORT_I64: return 8;
    default: throw Failure("no op has tensors of " + type_text(type));
  }
}

std::string type_text(OrtElementType type) {
  switch (type) {
    case ORT_U8: return "u8";
    case ORT_F32: return "f32";
    case ORT_I32: return "i32";
    case ORT_I64: return "i64";
    default: return "type " + std::to_string(static_cast<int>(type));
  }
}

}  // namespace spike::ops
