// The kernels of shared-prefix attention for each instruction set, and the choice at run time.
#pragma once

#include "problem.h"

#define FASTGEN_ATTENTION_KERNEL "kernel.h"
#include "instruction_sets.h"

namespace fastgen {
namespace {

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
