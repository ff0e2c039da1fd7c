#include "ops/ort_values.h"

#include <memory>
#include <new>

namespace spike::ops {
namespace {

/// A text by the ABI's two calls: its size with the terminating zero, then its bytes.
template <class Read>
std::string read_text(const OrtApi& api, Read read) {
  size_t size = 0;
  OrtStatus* status = read(nullptr, &size);
  if (status != nullptr) api.ReleaseStatus(status);
  if (size == 0) return {};
  std::string text(size, '\0');
  check(api, read(text.data(), &size));
  text.resize(size - 1);
  return text;
}

void describe(const OrtApi& api, const OrtValue* value, Tensor& tensor) {
  OrtTensorTypeAndShapeInfo* raw = nullptr;
  check(api, api.GetTensorTypeAndShape(value, &raw));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(api.ReleaseTensorTypeAndShapeInfo)>
      info(raw, api.ReleaseTensorTypeAndShapeInfo);
  check(api, api.GetTensorElementType(raw, &tensor.type));
  check(api, api.GetDimensionsCount(raw, &tensor.rank));
  if (tensor.rank > Tensor::max_rank)
    throw Failure("an input has " + std::to_string(tensor.rank) + " dims, at most 8 are supported");
  check(api, api.GetDimensions(raw, tensor.dims, tensor.rank));
}

}  // namespace

void check(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw Failure(message);
}

Tensor read_value(const OrtApi& api, const OrtValue* value) {
  Tensor tensor;
  if (value == nullptr) return tensor;
  describe(api, value, tensor);
  void* data = nullptr;
  // The ABI has no reader for const values at this version; the data isn't written through this.
  check(api, api.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  tensor.data = data;
  return tensor;
}

std::string node_name(const OrtApi& api, const OrtKernelInfo* info) {
  return read_text(api, [&](char* out, size_t* size) {
    return api.KernelInfo_GetNodeName(info, out, size);
  });
}

std::string string_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name) {
  std::string text = read_text(api, [&](char* out, size_t* size) {
    return api.KernelInfoGetAttribute_string(info, name, out, size);
  });
  if (text.empty()) throw Failure(std::string("attribute '") + name + "' is missing");
  return text;
}

Tensor constant_input(const OrtApi& api, const OrtKernelInfo* info, size_t index) {
  int constant = 0;
  const OrtValue* value = nullptr;
  check(api, api.KernelInfoGetConstantInput_tensor(info, index, &constant, &value));
  return constant != 0 ? read_value(api, value) : Tensor();
}

OrtStatus* failure_status(const OrtApi& api, const std::string& place) noexcept {
  try {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      return api.CreateStatus(ORT_FAIL, (place + ": out of memory").c_str());
    } catch (const std::exception& e) {
      return api.CreateStatus(ORT_INVALID_ARGUMENT, (place + ": " + e.what()).c_str());
    } catch (...) {
      return api.CreateStatus(ORT_FAIL, (place + ": unknown error").c_str());
    }
  } catch (...) {
    return api.CreateStatus(ORT_FAIL, "spike: out of memory");
  }
}

}  // namespace spike::ops
