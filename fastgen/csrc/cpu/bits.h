// The bits of a float, and the float of some bits.
#pragma once

#include <cstdint>
#include <cstring>

// For functions that must be inlined into one that is compiled for an instruction set.
#ifdef __GNUC__
#define FASTGEN_ALWAYS inline __attribute__((always_inline))
#else
#define FASTGEN_ALWAYS inline
#endif

namespace fastgen {

FASTGEN_ALWAYS uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

FASTGEN_ALWAYS float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// The number of the lowest bit that is set; there must be one.
FASTGEN_ALWAYS int lowest_bit(uint64_t bits) {
#ifdef __GNUC__
  return __builtin_ctzll(bits);
#else
  int number = 0;
  for (; (bits & 1) == 0; bits >>= 1) ++number;
  return number;
#endif
}

}  // namespace fastgen
