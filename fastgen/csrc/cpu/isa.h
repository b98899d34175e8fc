// Common includes of kernels that are compiled for several instruction sets (each_isa.h).
#pragma once

#include "floats.h"
#include "instruction_set.h"
#include "transpose.h"

#include <cstdint>

#ifdef FASTGEN_X86
#include <immintrin.h>
#endif

#define FASTGEN_INLINE FASTGEN_TARGET inline __attribute__((always_inline))
#define FASTGEN_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
// Makes gcc vectorise loops with 512 bits too.
#ifdef __clang__
#define FASTGEN_WIDE_AVX512 FASTGEN_AVX512
#else
#define FASTGEN_WIDE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#endif

namespace fastgen {

// Inputs whose products are summed separately before they are added to the total, in GEMM of every format: a panel of
// them easily fits into the second-level cache. A multiple of the inputs of a group, which share a scale.
constexpr int64_t kDepth = 256;

// Shuffle indices that move byte i of each four bytes to the lowest place, with zeros above: for two elements, and for
// the next two.
constexpr int64_t lanes_of_byte(int i) {
  const uint64_t first = 0x80808000ull | static_cast<uint64_t>(i), second = 0x80808000ull | static_cast<uint64_t>(4 + i);
  return static_cast<int64_t>(first | second << 32);
}
constexpr int64_t upper_lanes_of_byte(int i) { return lanes_of_byte(i) + 0x0000000800000008ll; }

}  // namespace fastgen
