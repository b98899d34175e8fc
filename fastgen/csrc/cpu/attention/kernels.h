// The kernels of shared-prefix attention, compiled once for each instruction set, and the choice at run time.
//
// The wheel has to run on machines that lack AVX2, so the compiler's options cannot name it: each copy is compiled
// inside a region of code that says so itself.
#pragma once

#include "../instruction_set.h"
#include "problem.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>

#ifdef FASTGEN_X86
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

inline AttentionKernels choose_kernels(ElementType type) {
#ifdef FASTGEN_X86
  switch (instruction_set()) {
    case InstructionSet::kAvx512: return avx512::kernels(type);
    case InstructionSet::kAvx2: return avx2::kernels(type);
    case InstructionSet::kPortable: break;
  }
#endif
  return portable::kernels(type);
}

}  // namespace
}  // namespace fastgen
