// ONNX Runtime's values, attributes and errors, as C++ wants them.
#pragma once

#include <string>

#include "ops/ort_api.h"
#include "ops/tensor.h"

namespace spike::ops {

/// Throws the status' message, if it is an error.
void check(const OrtApi& api, OrtStatus* status);

/// A value's view; of null an empty one.
Tensor read_value(const OrtApi& api, const OrtValue* value);

std::string node_name(const OrtApi& api, const OrtKernelInfo* info);
/// Fails if there is no such attribute.
std::string string_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name);
/// An input that is a constant initialiser; of any other one an empty view.
Tensor constant_input(const OrtApi& api, const OrtKernelInfo* info, size_t index);

/// OrtStatus with the message of the exception in flight, behind the place where it happened.
OrtStatus* failure_status(const OrtApi& api, const std::string& place) noexcept;

}  // namespace spike::ops
