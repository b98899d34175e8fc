// The kernels of decode attention for each instruction set, and the choice at run time.
#pragma once

#include "problem.h"

#define FASTGEN_ATTENTION_KERNEL "kernel.h"
#include "instruction_sets.h"

namespace fastgen {
namespace {

inline AttentionKernels choose_kernels(ElementType type) {
#define FASTGEN_KERNELS(SET) SET::kernels(type)
  return FASTGEN_CHOOSE(FASTGEN_KERNELS);
#undef FASTGEN_KERNELS
}

}  // namespace
}  // namespace fastgen
