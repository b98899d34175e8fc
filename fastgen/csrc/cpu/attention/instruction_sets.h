// What FASTGEN_ATTENTION_KERNEL names, a file, compiled once for each instruction set, in the namespaces `portable`,
// `avx2` and `avx512`.
//
// The wheel has to run on machines that lack AVX2, so the compiler's options cannot name it: each copy is compiled
// inside a region of code that says so itself.
#include "../instruction_set.h"
#include "../transpose.h"

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

#include "exponential.h"

#include FASTGEN_ATTENTION_KERNEL
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

#include "exponential.h"

#include FASTGEN_ATTENTION_KERNEL
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

#include "exponential.h"

#include FASTGEN_ATTENTION_KERNEL
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif
#endif

}  // namespace
}  // namespace fastgen
