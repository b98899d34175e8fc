// Whether this process may use AMX tiles.
#include "amx.h"

#if defined(FASTGEN_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastgen {

bool has_amx() {
#if defined(FASTGEN_AMX) && defined(__linux__)
  static const bool allowed = [] {
    constexpr long kRequest = 0x1023, kRegisters = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned int a = 0, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    constexpr unsigned int kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    const bool there = (d & kBf16) != 0 && (d & kTile) != 0 && (d & kInt8) != 0;
    return there && syscall(SYS_arch_prctl, kRequest, kRegisters) == 0;
  }();
  return allowed && !instruction_set_is_given();
#else
  return false;
#endif
}

}  // namespace fastgen
