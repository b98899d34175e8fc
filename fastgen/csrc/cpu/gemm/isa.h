// What kernels that are compiled for several instruction sets (each_isa.h) include first.
#pragma once

#include "../bfloat16.h"
#include "../float16.h"
#include "../instruction_set.h"
#include "../transpose.h"

#include <cstdint>

// Vectors as a language extension: gcc and clang. Of two numbers in the place of one, the first must be the lower.
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define FASTGEN_VECTORS 1
#endif

#ifdef FASTGEN_X86
#include <immintrin.h>
#endif

#define FASTGEN_INLINE FASTGEN_TARGET inline __attribute__((always_inline))
#define FASTGEN_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))

namespace fastgen {

// Inputs whose products are summed among themselves before they are added to the others, in GEMM of every format: what easily
// fits into the second-level cache of a panel. A multiple of the inputs of a group, whose numbers share a scale.
constexpr int64_t kDepth = 256;

// Indices of a shuffle that puts byte i of each place of four bytes lowest, and nothing above it: of two places, and of the
// next two.
constexpr int64_t lanes_of_byte(int i) {
  const uint64_t first = 0x80808000ull | static_cast<uint64_t>(i), second = 0x80808000ull | static_cast<uint64_t>(4 + i);
  return static_cast<int64_t>(first | second << 32);
}
constexpr int64_t upper_lanes_of_byte(int i) { return lanes_of_byte(i) + 0x0000000800000008ll; }

}  // namespace fastgen
