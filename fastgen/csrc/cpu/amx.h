// AMX tiles: whether this process may use them, and how they are set up.
#pragma once

#include "instruction_set.h"

#include <cstdint>

#if defined(FASTGEN_X86) && (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>))
#define FASTGEN_AMX 1
#include <immintrin.h>
#endif

namespace fastgen {

constexpr int64_t kMatrixRows = 16;   // of a register, at the most
constexpr int64_t kMatrixBytes = 64;  // of a row, at the most

// Whether the processor and the system let this process use AMX tiles. ATEN_CPU_CAPABILITY, which names the
// widest vectors to use, rules them out.
bool has_amx();

#ifdef FASTGEN_AMX

// Sets up the registers of this thread, with so many rows and bytes of a row each, until they are released.
__attribute__((target("amx-tile"))) inline void configure_tiles(const int64_t (&rows)[8], const int64_t (&bytes)[8]) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } configuration;
  for (int i = 0; i < 8; ++i) {
    configuration.bytes[i] = static_cast<uint16_t>(bytes[i]);
    configuration.rows[i] = static_cast<uint8_t>(rows[i]);
  }
  // The intrinsic does not tell the compiler of all that it reads.
  __asm__ volatile("" : : "r"(&configuration) : "memory");
  _tile_loadconfig(&configuration);
}

__attribute__((target("amx-tile"))) inline void release_tiles() { _tile_release(); }

// Releases them at the end of a block, by an exception, too.
struct TilesUntilEnd {
  ~TilesUntilEnd() { release_tiles(); }
};

#endif

}  // namespace fastgen
