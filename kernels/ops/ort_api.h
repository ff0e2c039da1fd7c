// The part of ONNX Runtime's C ABI that custom ops need, declared by hand.
//
// The onnxruntime wheels ship no headers. Their ABI only ever grows: OrtApi is a table of function
// pointers that keep their places, OrtCustomOp a struct that gains members at its end. So the few
// places used here, checked below by number, hold for every version from 1.17 on.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;  // null: success
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtShapeInferContext;
struct OrtCustomOp;

enum OrtErrorCode { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum OrtElementType { ORT_ANY = 0, ORT_F32 = 1, ORT_U8 = 2, ORT_I32 = 6, ORT_I64 = 7 };
enum OrtPortKind { ORT_VARIADIC = 2 };
enum OrtMemoryKind { ORT_MEMORY_DEFAULT = 0 };

/// Table of functions; `unused` members stand for those between the ones used.
struct OrtApi {
  OrtStatus* (*CreateStatus)(OrtErrorCode code, const char* message);
  void* unused_1[1];
  const char* (*GetErrorMessage)(const OrtStatus* status);
  void* unused_3[23];
  OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain* domain, const OrtCustomOp* op);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);
  void* unused_29[22];
  OrtStatus* (*GetTensorMutableData)(OrtValue* value, void** out);
  void* unused_52[8];
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo* info, OrtElementType* out);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, size_t* out);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t count);
  void* unused_63[2];
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** out);
  void* unused_66[21];
  OrtStatus* (*KernelInfoGetAttribute_string)(const OrtKernelInfo* info, const char* name,
                                              char* out, size_t* size);
  OrtStatus* (*KernelContext_GetInputCount)(const OrtKernelContext* context, size_t* out);
  OrtStatus* (*KernelContext_GetOutputCount)(const OrtKernelContext* context, size_t* out);
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext* context, size_t index,
                                       const OrtValue** out);
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext* context, size_t index,
                                        const int64_t* dims, size_t count, OrtValue** out);
  void* unused_92[1];
  void (*ReleaseStatus)(OrtStatus* status);
  void* unused_94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info);
  void* unused_100[1];
  void (*ReleaseCustomOpDomain)(OrtCustomOpDomain* domain);
  void* unused_102[142];
  OrtStatus* (*KernelInfo_GetNodeName)(const OrtKernelInfo* info, char* out, size_t* size);
  void* unused_245[4];
  OrtStatus* (*KernelInfoGetConstantInput_tensor)(const OrtKernelInfo* info, size_t index,
                                                  int* is_constant, const OrtValue** out);
  void* unused_250[24];
  OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext* context,
                                          void (*task)(void* arg, size_t index), size_t tasks,
                                          size_t batches, void* arg);
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);  // null: this runtime is older
  const char* (*GetVersionString)();
};

/// One custom op, as of API version 18.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info);
  const char* (*GetName)(const OrtCustomOp* op);
  const char* (*GetExecutionProviderType)(const OrtCustomOp* op);
  OrtElementType (*GetInputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp* op);
  OrtElementType (*GetOutputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp* op);
  void (*KernelCompute)(void* kernel, OrtKernelContext* context);
  void (*KernelDestroy)(void* kernel);
  OrtPortKind (*GetInputCharacteristic)(const OrtCustomOp* op, size_t index);
  OrtPortKind (*GetOutputCharacteristic)(const OrtCustomOp* op, size_t index);
  OrtMemoryKind (*GetInputMemoryType)(const OrtCustomOp* op, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp* op);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp* op);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                               void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext* context);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp* op, OrtShapeInferContext* context);
  int (*GetStartVersion)(const OrtCustomOp* op);
  int (*GetEndVersion)(const OrtCustomOp* op);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // extern "C"

#define SPIKE_SLOT(member, number) \
  static_assert(offsetof(OrtApi, member) == (number) * sizeof(void*), "OrtApi::" #member)
SPIKE_SLOT(CreateStatus, 0);
SPIKE_SLOT(GetErrorMessage, 2);
SPIKE_SLOT(CreateCustomOpDomain, 26);
SPIKE_SLOT(CustomOpDomain_Add, 27);
SPIKE_SLOT(AddCustomOpDomain, 28);
SPIKE_SLOT(GetTensorMutableData, 51);
SPIKE_SLOT(GetTensorElementType, 60);
SPIKE_SLOT(GetDimensionsCount, 61);
SPIKE_SLOT(GetDimensions, 62);
SPIKE_SLOT(GetTensorTypeAndShape, 65);
SPIKE_SLOT(KernelInfoGetAttribute_string, 87);
SPIKE_SLOT(KernelContext_GetInputCount, 88);
SPIKE_SLOT(KernelContext_GetOutputCount, 89);
SPIKE_SLOT(KernelContext_GetInput, 90);
SPIKE_SLOT(KernelContext_GetOutput, 91);
SPIKE_SLOT(ReleaseStatus, 93);
SPIKE_SLOT(ReleaseTensorTypeAndShapeInfo, 99);
SPIKE_SLOT(ReleaseCustomOpDomain, 101);
SPIKE_SLOT(KernelInfo_GetNodeName, 244);
SPIKE_SLOT(KernelInfoGetConstantInput_tensor, 249);
SPIKE_SLOT(KernelContext_ParallelFor, 274);
#undef SPIKE_SLOT
static_assert(sizeof(OrtApi) == 275 * sizeof(void*));
static_assert(offsetof(OrtCustomOp, CreateKernelV2) == 17 * sizeof(void*));
static_assert(sizeof(OrtCustomOp) == 26 * sizeof(void*));
