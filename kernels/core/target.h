// Compiles a stretch of a file for more instructions than the rest of the program may use.
//
// Include every header before SPIKE_TARGET_BEGIN: an inline function first seen inside the region
// would be compiled for it, and the linker could then keep that copy for everybody. Only headers
// whose contents are in an unnamed namespace (the simd_*.h, *_tile.h) belong inside.
#pragma once

// GCC 12 warns about the deliberately undefined values in its own intrinsics (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#define SPIKE_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define SPIKE_TARGET_BEGIN(features) \
  SPIKE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define SPIKE_TARGET_END _Pragma("clang attribute pop")
#else
#define SPIKE_TARGET_BEGIN(features) \
  _Pragma("GCC push_options") SPIKE_PRAGMA(GCC target(features))
#define SPIKE_TARGET_END _Pragma("GCC pop_options")
#endif

#define SPIKE_AVX2 "avx2,fma,f16c"
#define SPIKE_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
#define SPIKE_AVX512_BF16 "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16"
