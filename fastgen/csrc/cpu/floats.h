// Converts float32, bfloat16 and float16 from and to their bits, with integers and without branches, so that loops
// vectorise. float16 has the same bits as with the instructions of AVX2 (F16C) and AVX-512, denormal numbers and
// infinities included. NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

// For functions that must be inlined into one that is compiled for an instruction set.
#define FASTGEN_ALWAYS inline __attribute__((always_inline))

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

// The index of the lowest set bit; there must be one.
FASTGEN_ALWAYS int lowest_bit(uint64_t bits) { return __builtin_ctzll(bits); }

// ---- bfloat16

inline float to_float(uint16_t number) { return of_bits(static_cast<uint32_t>(number) << 16); }

// Rounds to nearest, ties to even. NaN stays NaN.
inline uint16_t to_bfloat16(float number) {
  const uint32_t bits = bits_of(number);
  const uint32_t nearest = bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>((number != number ? bits | 0x400000 : nearest) >> 16);
}

// ---- float16

inline float float16_to_float(uint16_t number) {
  const uint32_t size = number & 0x7fffu;
  // The exponent's bias is 15, that of float32 127; the largest exponent stands for infinity and NaN.
  const uint32_t normal = (size << 13) + (112u << 23) + (size >= 0x7c00u ? 112u << 23 : 0u) +
                          (size > 0x7c00u ? 0x400000u & ~(size << 13) : 0u);
  const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f;  // for exponent 0
  return of_bits((size < 0x400u ? bits_of(small) : normal) | (static_cast<uint32_t>(number & 0x8000u) << 16));
}

// Rounds to nearest, ties to even.
inline uint16_t to_float16(float number) {
  const uint32_t bits = bits_of(number);
  const uint32_t size = bits & 0x7fffffffu;
  const uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  // Below 2^-14 the sum with 0.5 is rounded at float16's last bit.
  const uint32_t small = bits_of(of_bits(size) + 0.5f) - 0x3f000000u;
  const uint32_t finite = size < 0x38800000u ? small : normal;
  const uint32_t odd = size > 0x7f800000u ? 0x7e00u | ((size >> 13) & 0x3ffu) : 0x7c00u;
  return static_cast<uint16_t>((size >= 0x477ff000u ? odd : finite) | ((bits >> 16) & 0x8000u));
}

}  // namespace fastgen
