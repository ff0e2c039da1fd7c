// Entry point that ONNX Runtime calls when the library is registered.
extern "C" __attribute__((visibility("default"))) void* RegisterCustomOps(void*, const void*) {
  return nullptr;
}
