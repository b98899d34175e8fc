// Chooses the instruction set.
#include "instruction_set.h"

#include "gemm/amx.h"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(FASTGEN_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using fastgen::InstructionSet;

constexpr int kUnknown = -1, kGiven = 4;  // kGiven is added to the instruction set
std::atomic<int> choice{kUnknown};
std::atomic<bool> avx_vnni_is_allowed{true};
std::atomic<int> counts_as_zen5{kUnknown};  // for tests

#ifdef FASTGEN_X86
struct Answer {
  unsigned int a, b, c, d;
};

// Runs the CPUID instruction.
Answer cpuid(unsigned int leaf, unsigned int part) {
  Answer answer{};
  __asm__("cpuid" : "=a"(answer.a), "=b"(answer.b), "=c"(answer.c), "=d"(answer.d) : "a"(leaf), "c"(part));
  return answer;
}
#endif

InstructionSet widest() {
#ifdef FASTGEN_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    return wide ? InstructionSet::kAvx512 : InstructionSet::kAvx2;
  }
#endif
  return InstructionSet::kPortable;
}

int choose() {
  const char* given = std::getenv("ATEN_CPU_CAPABILITY");
  const auto is = [given](const char* name) { return given != nullptr && std::strcmp(given, name) == 0; };
  const InstructionSet machine = widest();
  if (is("default")) return static_cast<int>(InstructionSet::kPortable) | kGiven;
  if (is("avx2")) return static_cast<int>(machine < InstructionSet::kAvx2 ? machine : InstructionSet::kAvx2) | kGiven;
  return static_cast<int>(machine) | (is("avx512") ? kGiven : 0);
}

int chosen() {
  int found = choice.load(std::memory_order_relaxed);
  if (found == kUnknown) choice.store(found = choose(), std::memory_order_relaxed);
  return found;
}

}  // namespace

namespace fastgen {

InstructionSet instruction_set() { return static_cast<InstructionSet>(chosen() & ~kGiven); }

bool instruction_set_is_given() { return (chosen() & kGiven) != 0; }

bool has_avx512_bf16() {
#ifdef FASTGEN_X86
  return instruction_set() == InstructionSet::kAvx512 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has_amx() {
#if defined(FASTGEN_AMX) && defined(__linux__)
  static const bool allowed = [] {
    constexpr long kRequest = 0x1023, kRegisters = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    constexpr unsigned int kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
    return (cpuid(7, 0).d & kAll) == kAll && syscall(SYS_arch_prctl, kRequest, kRegisters) == 0;
  }();
  return allowed && !instruction_set_is_given();
#else
  return false;
#endif
}

bool has_avx_vnni() {
#ifdef FASTGEN_X86
  static const bool there = [] {
    const bool has_part = cpuid(7, 0).a >= 1;
    return has_part && (cpuid(7, 1).a & 1u << 4) != 0 && widest() != InstructionSet::kPortable;
  }();
  return there && avx_vnni_is_allowed.load(std::memory_order_relaxed);
#else
  return false;
#endif
}

bool prefetches_nearby() { return is_amd(); }

bool is_amd() {
#ifdef FASTGEN_X86
  static const bool is_amd = __builtin_cpu_is("amd");
  return is_amd;
#else
  return false;
#endif
}

bool is_zen5_or_later() {
#ifdef FASTGEN_X86
  static const bool there = [] {
    const unsigned int version = cpuid(1, 0).a, family = (version >> 8 & 15) + (version >> 20 & 255);
    return is_amd() && family >= 26;
  }();
  const int given = counts_as_zen5.load(std::memory_order_relaxed);
  return given == kUnknown ? there : given != 0;
#else
  return false;
#endif
}

}  // namespace fastgen

namespace {

// The number of the instruction set for fastgen/ops/linear/choose.py: 0 portable, 1 AVX2, 2 AVX-512, 3 with BF16, 4
// with AMX.
int64_t instruction_set_op() {
  const auto vectors = static_cast<int64_t>(fastgen::instruction_set());
  if (fastgen::instruction_set() != InstructionSet::kAvx512 || fastgen::instruction_set_is_given()) return vectors;
  return !fastgen::has_avx512_bf16() ? vectors : fastgen::has_amx() ? 4 : 3;
}

}  // namespace

// It has no tensor, so that no device chooses the kernel.
STABLE_TORCH_LIBRARY_IMPL(fastgen, CompositeExplicitAutograd, library) {
  library.impl("instruction_set", TORCH_BOX(&instruction_set_op));
}

// For tests, which run every kernel in one process: the next operator reads the environment again.
extern "C" void fastgen_forget_instruction_set() { choice.store(kUnknown, std::memory_order_relaxed); }

extern "C" void fastgen_allow_avx_vnni(bool allowed) {
  avx_vnni_is_allowed.store(allowed, std::memory_order_relaxed);
}

// For tests: 1 makes the kernels run as on Zen 5, 0 as on others, -1 as on this processor. Returns whether they now run
// as on Zen 5.
extern "C" int fastgen_count_as_zen5(int value) {
  counts_as_zen5.store(value, std::memory_order_relaxed);
  return fastgen::is_zen5_or_later();
}
