// Which vectors the kernels may use: they are compiled for each instruction set, and one is chosen at run time.
#pragma once

#include <cstdint>

#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels need gcc or clang, whose vectors they use, and a machine whose lower bytes come first"
#endif
#ifdef __x86_64__
#define FASTGEN_X86 1
#endif

namespace fastgen {

enum class InstructionSet { kPortable, kAvx2, kAvx512 };

// The widest vectors that the machine has and ATEN_CPU_CAPABILITY allows: "default", "avx2" or "avx512". This variable
// also chooses torch's own kernels. Like torch, the process reads it once: no other thread may change the environment
// meanwhile, and weights packed for one instruction set must not meet the kernels of another.
InstructionSet instruction_set();

// Whether that variable names one of these.
bool instruction_set_is_given();

// Whether AVX-512 is in use and the machine multiplies pairs of bfloat16 in its vectors.
bool has_avx512_bf16();

// Whether the machine multiplies bytes in vectors of 256 bits (AVX-VNNI), which is independent of AVX-512.
bool has_avx_vnni();

// Whether to prefetch a stream of weights a short distance ahead, and not the line after it. On an AMD EPYC (Zen 4),
// one row takes 1.2 to 1.4 times as long with the line after (2,304 bytes ahead), and four rows 1.25 times. Other
// processors were measured only with the line after.
bool prefetches_nearby();

// Whether AMD made the processor.
bool is_amd();

// Whether it is an AMD Zen 5 or later: such an EPYC permutes vectors in other units than those that multiply vectors of
// 512 bits.
bool is_zen5_or_later();

}  // namespace fastgen

// Selects the code compiled for the vectors in use, of the namespaces `portable`, `avx2` and `avx512` (each_isa.h).
#ifdef FASTGEN_X86
#define FASTGEN_CHOOSE(WHAT)                                                     \
  (fastgen::instruction_set() == fastgen::InstructionSet::kAvx512 ? avx512::WHAT \
   : fastgen::instruction_set() == fastgen::InstructionSet::kAvx2 ? avx2::WHAT   \
                                                                  : portable::WHAT)
#else
#define FASTGEN_CHOOSE(WHAT) portable::WHAT
#endif
