// Numbers of bfloat16, as their bits, from and to float32.
#pragma once

#include "bits.h"

#include <cstdint>

namespace fastgen {

inline float to_float(uint16_t number) { return of_bits(static_cast<uint32_t>(number) << 16); }

// To the nearest, and of two that are as near to the even one. What is not a number stays so.
inline uint16_t to_bfloat16(float number) {
  const uint32_t bits = bits_of(number);
  const uint32_t nearest = bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>((number != number ? bits | 0x400000 : nearest) >> 16);
}

}  // namespace fastgen
