// Which vectors the kernels may use: they are compiled for each instruction set, and chosen at run time.
#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__GNUC__) && defined(__x86_64__)
#define FASTGEN_X86 1
#endif

namespace fastgen {

enum class InstructionSet { kPortable, kAvx2, kAvx512 };

// The widest vectors that the machine has, and that ATEN_CPU_CAPABILITY allows: "default", "avx2" or "avx512", the
// variable by which torch's own kernels are chosen.
inline InstructionSet instruction_set() {
#ifdef FASTGEN_X86
  const char* allowed = std::getenv("ATEN_CPU_CAPABILITY");
  const bool any = allowed == nullptr || std::strncmp(allowed, "avx512", 6) == 0;
  if (any && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  const bool narrow = allowed != nullptr && std::strcmp(allowed, "default") == 0;
  if (!narrow && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    return InstructionSet::kAvx2;
  }
#endif
  return InstructionSet::kPortable;
}

}  // namespace fastgen
