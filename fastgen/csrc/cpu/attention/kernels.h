// The kernels of shared-prefix attention, compiled once for each instruction set, and the choice at run time.
//
// The wheel has to run on machines that lack AVX2, so the compiler's options cannot name it: each copy is compiled
// inside a region of code that says so itself.
#pragma once

#include "problem.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#if defined(__GNUC__) && defined(__x86_64__)
#define FASTGEN_X86 1
#include <immintrin.h>
#endif

// Before a loop over registers: compilers keep an array in registers only once the loops over it are gone.
#if defined(__GNUC__)
#define FASTGEN_UNROLL _Pragma("GCC unroll 16")
#else
#define FASTGEN_UNROLL
#endif

namespace fastgen {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

inline float to_float(float x) { return x; }
inline float to_float(c10::Half x) { return static_cast<float>(x); }
inline float to_float(c10::BFloat16 x) { return static_cast<float>(x); }

inline float* allocate_floats(int64_t count) {
  return static_cast<float*>(::operator new(static_cast<size_t>(count) * sizeof(float), std::align_val_t{64}));
}
inline void free_floats(float* memory) { ::operator delete(memory, std::align_val_t{64}); }

namespace portable {
#include "vector_portable.h"

#include "kernel.h"
}  // namespace portable

#ifdef FASTGEN_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#include "vector_avx2.h"

#include "kernel.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // a false alarm about the intrinsics themselves
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")
#endif
namespace avx512 {
#include "vector_avx512.h"

#include "kernel.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif
#endif

// The widest vectors that the machine has, and that ATEN_CPU_CAPABILITY allows: "default", "avx2" or "avx512", the
// variable by which torch's own kernels are chosen.
inline AttentionKernels choose_kernels(ElementType type) {
#ifdef FASTGEN_X86
  const char* allowed = std::getenv("ATEN_CPU_CAPABILITY");
  const bool any = allowed == nullptr || std::strncmp(allowed, "avx512", 6) == 0;
  if (any && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return avx512::kernels(type);
  }
  const bool narrow = allowed != nullptr && std::strcmp(allowed, "default") == 0;
  if (!narrow && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    return avx2::kernels(type);
  }
#endif
  return portable::kernels(type);
}

}  // namespace
}  // namespace fastgen
