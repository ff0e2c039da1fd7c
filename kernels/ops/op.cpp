#include "ops/op.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

namespace spike::ops {
namespace {

/// One parallel loop: remembers the first exception of a task, to rethrow it in the caller.
struct Loop {
  void (*task)(void*, int64_t);
  void* arg;
  std::mutex mutex;
  std::exception_ptr error;

  static void step(void* self, size_t index) noexcept {
    auto* loop = static_cast<Loop*>(self);
    try {
      loop->task(loop->arg, static_cast<int64_t>(index));
    } catch (...) {
      const std::lock_guard lock(loop->mutex);
      if (!loop->error) loop->error = std::current_exception();
    }
  }
};

int thread_count() {
  static const int count = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return count;
}

std::string dims_text(std::span<const int64_t> dims) {
  std::string text = "[";
  for (int64_t d : dims) text += (text.size() > 1 ? ", " : "") + (d < 0 ? "?" : std::to_string(d));
  return text + "]";
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

Tensor read(const OrtApi& api, const OrtValue* value) {
  Tensor tensor;
  if (value == nullptr) return tensor;
  describe(api, value, tensor);
  void* data = nullptr;
  // The ABI has no reader for const values at this version; the data isn't written through this.
  check(api, api.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  tensor.data = data;
  return tensor;
}

}  // namespace

void check(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw Failure(message);
}

OrtStatus* failure_status(const OrtApi& api, const char* op, const std::string& node) noexcept {
  try {
    const std::string place = std::string("spike.") + op + " '" + node + "': ";
    try {
      throw;
    } catch (const std::bad_alloc&) {
      return api.CreateStatus(ORT_FAIL, (place + "out of memory").c_str());
    } catch (const std::exception& e) {
      return api.CreateStatus(ORT_INVALID_ARGUMENT, (place + e.what()).c_str());
    } catch (...) {
      return api.CreateStatus(ORT_FAIL, (place + "unknown error").c_str());
    }
  } catch (...) {
    return api.CreateStatus(ORT_FAIL, "spike: out of memory");
  }
}

std::string Info::text(const char* name) const {
  std::string found = text(name, "");
  if (found.empty()) throw Failure(std::string("attribute '") + name + "' is missing");
  return found;
}

std::string Info::text(const char* name, const char* otherwise) const {
  size_t size = 0;
  OrtStatus* status = api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size);
  if (status != nullptr) api_.ReleaseStatus(status);
  if (size == 0) return otherwise;
  std::string text(size, '\0');
  check(api_, api_.KernelInfoGetAttribute_string(info_, name, text.data(), &size));
  text.resize(size - 1);  // without the terminating zero
  return text;
}

int64_t Info::integer(const char* name) const {
  int64_t value = 0;
  OrtStatus* status = api_.KernelInfoGetAttribute_int64(info_, name, &value);
  if (status == nullptr) return value;
  api_.ReleaseStatus(status);
  throw Failure(std::string("attribute '") + name + "' is missing or no integer");
}

int64_t Info::integer(const char* name, int64_t otherwise) const {
  int64_t value = 0;
  OrtStatus* status = api_.KernelInfoGetAttribute_int64(info_, name, &value);
  if (status == nullptr) return value;
  api_.ReleaseStatus(status);
  return otherwise;
}

float Info::number(const char* name) const {
  float value = 0.0f;
  OrtStatus* status = api_.KernelInfoGetAttribute_float(info_, name, &value);
  if (status == nullptr) return value;
  api_.ReleaseStatus(status);
  throw Failure(std::string("attribute '") + name + "' is missing or no float");
}

float Info::number(const char* name, float otherwise) const {
  float value = 0.0f;
  OrtStatus* status = api_.KernelInfoGetAttribute_float(info_, name, &value);
  if (status == nullptr) return value;
  api_.ReleaseStatus(status);
  return otherwise;
}

std::string Info::node_name() const {
  size_t size = 0;
  OrtStatus* status = api_.KernelInfo_GetNodeName(info_, nullptr, &size);
  if (status != nullptr) api_.ReleaseStatus(status);
  if (size == 0) return {};
  std::string name(size, '\0');
  check(api_, api_.KernelInfo_GetNodeName(info_, name.data(), &size));
  name.resize(size - 1);
  return name;
}

Matrix Info::weight(size_t input, const std::string& format, int64_t n, int64_t k,
                    int64_t stacked) const {
  const std::string name = "weight at input " + std::to_string(input) + ": ";
  const auto parsed = parse_format(format);
  if (!parsed) throw Failure("unknown format '" + format + "'");
  if (stacked <= 0 || n <= 0 || k <= 0 || k % row_multiple(*parsed) != 0)
    throw Failure(name + "a " + format + " matrix can't be [" + std::to_string(n) + ", " +
                  std::to_string(k) + "]");
  int constant = 0;
  const OrtValue* value = nullptr;
  check(api_, api_.KernelInfoGetConstantInput_tensor(info_, input, &constant, &value));
  if (constant == 0 || value == nullptr) throw Failure(name + "must be a constant initialiser");
  const Tensor tensor = read(api_, value);
  const size_t wanted = static_cast<size_t>(stacked) * packed_bytes(*parsed, n, k);
  if (tensor.type != ORT_U8 || static_cast<size_t>(tensor.elements()) != wanted)
    throw Failure(name + "has " + std::to_string(tensor.elements()) + " bytes, a packed " + format +
                  " matrix [" + std::to_string(n) + ", " + std::to_string(k) + "] has " +
                  std::to_string(wanted));
  if (reinterpret_cast<uintptr_t>(tensor.data) % 64 != 0)
    throw Failure(name + "isn't aligned to 64 bytes: align its offset in the weights file");
  return {*parsed, tensor.as<uint8_t>(), n, k};
}

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

Context::Context(const OrtApi& api, OrtKernelContext* context) : api_(api), context_(context) {
  check(api_, api_.KernelContext_GetInputCount(context_, &inputs_));
}

const OrtValue* Context::value(size_t index) const {
  const OrtValue* value = nullptr;
  if (index < inputs_) check(api_, api_.KernelContext_GetInput(context_, index, &value));
  return value;
}

Tensor Context::input(size_t index) const {
  const OrtValue* found = value(index);
  if (found == nullptr) throw Failure("input " + std::to_string(index) + " is missing");
  return read(api_, found);
}

const float* Context::optional(size_t index, std::span<const int64_t> wanted,
                               const char* name) const {
  const OrtValue* found = value(index);
  if (found == nullptr) return nullptr;
  const Tensor tensor = read(api_, found);
  if (!std::ranges::equal(tensor.shape(), wanted))
    throw Failure(std::string(name) + " has shape " + tensor.shape_text() + ", expected " +
                  dims_text(wanted));
  return tensor.as<float>();
}

void* Context::output(size_t index, std::span<const int64_t> dims) const {
  OrtValue* value = nullptr;
  check(api_, api_.KernelContext_GetOutput(context_, index, dims.data(), dims.size(), &value));
  void* data = nullptr;
  check(api_, api_.GetTensorMutableData(value, &data));
  return data;
}

float* Context::output_like(size_t index, const Tensor& like, int64_t last) const {
  int64_t dims[Tensor::max_rank];
  std::copy_n(like.dims, like.rank, dims);
  dims[like.rank - 1] = last;
  return static_cast<float*>(output(index, {dims, like.rank}));
}

Parallel Context::parallel() { return {thread_count(), this, run}; }

void Context::run(void* self, int64_t tasks, void (*task)(void*, int64_t), void* arg) {
  auto* context = static_cast<Context*>(self);
  Loop loop{task, arg, {}, {}};
  check(context->api_,
        context->api_.KernelContext_ParallelFor(context->context_, Loop::step,
                                                static_cast<size_t>(tasks), 0, &loop));
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace spike::ops
