// Entry point that ONNX Runtime calls when the library is registered.
#include "ops/ops.h"

namespace {

constexpr uint32_t api_version = 17;  // the first with KernelContext_ParallelFor

/// The domain "spike". Never freed: sessions keep pointers to it.
OrtStatus* make_domain(const OrtApi& api, OrtCustomOpDomain** out) {
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* status = api.CreateCustomOpDomain("spike", &domain)) return status;
  if (OrtStatus* status = api.CustomOpDomain_Add(domain, spike::ops::chain_op())) {
    api.ReleaseCustomOpDomain(domain);
    return status;
  }
  *out = domain;
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(api_version);
  if (api == nullptr) {  // older than 1.17; CreateStatus has been there since version 1
    api = base->GetApi(1);
    return api->CreateStatus(ORT_FAIL, "spike: needs ONNX Runtime 1.18 or later");
  }
  static OrtCustomOpDomain* domain = nullptr;
  static OrtStatus* const failure = make_domain(*api, &domain);
  if (domain == nullptr) return failure;
  return api->AddCustomOpDomain(options, domain);
}
