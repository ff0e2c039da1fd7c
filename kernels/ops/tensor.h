// Tensors as links see them, and the exception for what is wrong with one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>

#include "ops/ort_api.h"

namespace spike::ops {

/// A problem with a model or its inputs; the message becomes the session's error.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A view of somebody's memory.
struct Tensor {
  static constexpr size_t max_rank = 8;
  const void* data = nullptr;
  OrtElementType type = ORT_ANY;
  size_t rank = 0;
  int64_t dims[max_rank] = {};

  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
  std::span<const int64_t> shape() const { return {dims, rank}; }
  int64_t elements() const;
  /// Product of all dims but the last `dropped`; fails if there are fewer than those.
  int64_t rows(size_t dropped, const char* name) const;
  /// Fails unless the dims are these (-1: any).
  void require(std::initializer_list<int64_t> wanted, const char* name) const;
  std::string shape_text() const;
};

/// "[2, ?]": negative dims are unknown.
std::string dims_text(std::span<const int64_t> dims);
/// Bytes of an element; fails for a type that no op has.
size_t element_bytes(OrtElementType type);
/// "f32", or "type 11".
std::string type_text(OrtElementType type);

}  // namespace spike::ops
