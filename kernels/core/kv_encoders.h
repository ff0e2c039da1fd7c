// Per-tier encoders of keys and values, for kv_format.cpp.
#pragma once

#include "core/kv_format.h"

namespace spike {

/// The encoders of one tier, by the functions of kv_format.h that call them.
struct KvEncoders {
  void (*row)(KvFormat format, const float* x, int64_t dim, uint8_t* row);
  void (*keys)(const uint8_t* const* rows, int64_t dim, uint8_t* group);
  void (*recent)(const float* x, int64_t dim, uint8_t* row);
};

KvEncoders kv_encoders_avx2();
KvEncoders kv_encoders_avx512();

}  // namespace spike
