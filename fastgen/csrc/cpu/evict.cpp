// Evicts a tensor from the processor's caches. The schema is defined in fastgen/ops/linear/__init__.py.
#include "instruction_set.h"
#include "operator.h"

#ifdef FASTGEN_X86
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

using namespace fastgen;

#ifdef FASTGEN_X86
constexpr uintptr_t kLine = 64;

bool evicts() {
  constexpr unsigned kFlushOptimised = 1u << 23;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & kFlushOptimised) != 0;
}

__attribute__((target("clflushopt"))) void flush(uintptr_t begin, uintptr_t end) {
  for (uintptr_t line = begin / kLine * kLine; line < end; line += kLine) {
    _mm_clflushopt(reinterpret_cast<void*>(line));
  }
  _mm_mfence();
}
#else
bool evicts() { return false; }
void flush(uintptr_t, uintptr_t) {}
#endif

// Evicts everything from the tensor's first element to its last. Returns whether this processor can.
bool evict(Tensor x) {
  static const bool can = evicts();
  const Extent extent = Arguments("evict").extent_of(x);
  if (can) flush(extent.begin, extent.end);
  return can;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("evict", TORCH_BOX(&evict)); }
