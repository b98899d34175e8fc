// AMX tiles: whether this process may use them, and how to configure them.
#pragma once

#include "../instruction_set.h"
#include "operands.h"

#include <cstdint>
#include <optional>

#if defined(FASTGEN_X86) && (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>))
#define FASTGEN_AMX 1
#include <immintrin.h>
#endif

namespace fastgen {

constexpr int64_t kAmxRows = 16;  // the most rows of a tile
constexpr int64_t kAmxLine = 64;  // the most bytes of a row
constexpr int64_t kAmxBytes = kAmxRows * kAmxLine;

// Whether the processor and the system let this process use AMX tiles. If ATEN_CPU_CAPABILITY names the widest vectors
// to use, AMX tiles are not used.
bool has_amx();

#ifdef FASTGEN_AMX

// Configures the tiles of this thread, with these numbers of rows and bytes per row, until they are released.
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
  // The intrinsic does not declare all that it reads.
  __asm__ volatile("" : : "r"(&configuration) : "memory");
  _tile_loadconfig(&configuration);
}

__attribute__((target("amx-tile"))) inline void release_tiles() { _tile_release(); }

// Releases the tiles at the end of a block, also after an exception.
struct TilesUntilEnd {
  ~TilesUntilEnd() { release_tiles(); }
};

// Configures all tiles, with all of their rows and bytes, until the end of a block.
struct WholeTiles : TilesUntilEnd {
  WholeTiles() {
    constexpr int64_t kRows = kAmxRows, kLine = kAmxLine;
    configure_tiles({kRows, kRows, kRows, kRows, kRows, kRows, kRows, kRows},
                    {kLine, kLine, kLine, kLine, kLine, kLine, kLine, kLine});
  }
};

// Masks of the first `count` of 16 lanes of a vector, and of 32.
inline __mmask16 first16(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}
inline __mmask32 first32(int64_t count) { return count >= 32 ? 0xffffffffu : (uint32_t{1} << count) - 1; }

// Returns cache-aligned memory of this thread, which is kept for its next call: the system would clear new memory page
// by page. It holds the data of its last use.
inline char* scratch(int64_t bytes) {
  static thread_local std::optional<Aligned<char>> kept;
  static thread_local int64_t size = 0;
  if (size < bytes) {
    size = 0;
    kept.emplace(bytes);
    size = bytes;
  }
  return kept->data();
}

#endif

}  // namespace fastgen
