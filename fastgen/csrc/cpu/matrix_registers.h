// The matrix registers of AMX: whether this process may use them, and their configuration.
#pragma once
#include "instruction_set.h"

#include <algorithm>
#include <cstdint>

#if defined(FASTGEN_X86) && (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>))
#define FASTGEN_MATRICES 1
#include <immintrin.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastgen {

constexpr int64_t kTileRows = 16;  // lines of a register
constexpr int64_t kTileLine = 64;  // bytes of a line
constexpr int64_t kTileBytes = kTileRows * kTileLine;

// The registers of this thread, for so many rows: 0 to 3 for sums, 4 and 5 for rows, 6 and 7 for weights; 2, 3 and 5
// have the rows from the 17th on. Up to 16 rows, they have the same rows as the others.
__attribute__((target("amx-tile"))) inline void configure_matrices(int64_t count) {
  const int64_t upper = std::min(count, kTileRows), lower = count > kTileRows ? count - kTileRows : count;
  struct alignas(kTileLine) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } configuration;
  const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
  for (int i = 0; i < 8; ++i) {
    configuration.bytes[i] = kTileLine;
    configuration.rows[i] = static_cast<uint8_t>(rows[i]);
  }
  // The intrinsic does not tell the compiler of all that it reads.
  __asm__ volatile("" : : "r"(&configuration) : "memory");
  _tile_loadconfig(&configuration);
}

__attribute__((target("amx-tile"))) inline void release_matrices() { _tile_release(); }

// Whether the processor and the system let this process use the matrix registers. ATEN_CPU_CAPABILITY, which names the
// widest vectors to use, rules them out.
inline bool has_matrices() {
#ifdef __linux__
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

#endif
