// Compiles the file FASTGEN_KERNELS once for each instruction set, in the namespaces `portable`, `avx2` and `avx512`.
// FASTGEN_CHOOSE selects one at run time. The file can use vectors.h, and two macros:
//   FASTGEN_TARGET  the attribute that lets the compiler use the instruction set
//   FASTGEN_WIDTH   floats of a vector
// FASTGEN_BF16 adds a copy in `avx512bf16`, for processors that multiply pairs of bfloat16. FASTGEN_VNNI adds copies
// for processors that multiply bytes, `avxvnni`, and `avx512vnni` in place of `avx512`. These copies see
// FASTGEN_HAS_BF16 and FASTGEN_HAS_VNNI. FASTGEN_LOOPS also vectorises plain loops with 512 bits. No include guard: it
// is meant to be included several times.

namespace portable {
#define FASTGEN_TARGET
#define FASTGEN_WIDTH 4
#include "vectors.h"

#include FASTGEN_KERNELS
#undef FASTGEN_TARGET
#undef FASTGEN_WIDTH
}  // namespace portable

#ifdef FASTGEN_X86

namespace avx2 {
#define FASTGEN_TARGET __attribute__((target("avx2,fma,f16c")))
#define FASTGEN_WIDTH 8
#include "vectors.h"

#include FASTGEN_KERNELS
#undef FASTGEN_TARGET
}  // namespace avx2

// With 256 bits, for processors without AVX-512: gcc 11, clang 12.
#if defined(FASTGEN_VNNI) && __has_include(<avxvnniintrin.h>)
#define FASTGEN_HAS_VNNI 1
#define FASTGEN_AVX_VNNI 1
namespace avxvnni {
#define FASTGEN_TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#include "vectors.h"

#include FASTGEN_KERNELS
#undef FASTGEN_TARGET
}  // namespace avxvnni
#undef FASTGEN_HAS_VNNI
#endif

#undef FASTGEN_WIDTH
#define FASTGEN_WIDTH 16

#ifndef FASTGEN_VNNI
namespace avx512 {
#ifdef FASTGEN_LOOPS
#define FASTGEN_TARGET FASTGEN_WIDE_AVX512
#else
#define FASTGEN_TARGET FASTGEN_AVX512
#endif
#include "vectors.h"

#include FASTGEN_KERNELS
#undef FASTGEN_TARGET
}  // namespace avx512
#else
#define FASTGEN_HAS_VNNI 1
namespace avx512vnni {
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")))
#include "vectors.h"

#include FASTGEN_KERNELS
#undef FASTGEN_TARGET
}  // namespace avx512vnni
#undef FASTGEN_HAS_VNNI
#endif

#if defined(FASTGEN_BF16) && __has_include(<avx512bf16intrin.h>)
#define FASTGEN_HAS_BF16 1
namespace avx512bf16 {
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16")))
#include "vectors.h"

#include FASTGEN_KERNELS
#undef FASTGEN_TARGET
}  // namespace avx512bf16
#endif

#undef FASTGEN_WIDTH

#endif

#undef FASTGEN_KERNELS
