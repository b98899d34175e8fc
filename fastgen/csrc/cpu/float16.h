// Numbers of float16, as their bits, from and to float32, by integers; and vectors of them to float32, with the
// instructions of AVX2 (F16C) and AVX-512 too. All give the same bits, denormal numbers and infinities included; what
// is not a number stays so.
#pragma once

#include "bits.h"
#include "instruction_set.h"

#include <cstdint>
#include <cstring>

#ifdef FASTGEN_X86
#include <immintrin.h>
#endif

namespace fastgen {

// Without branches, so that loops of these become vectors.
inline float float16_to_float(uint16_t number) {
  const uint32_t size = number & 0x7fffu;
  // The exponent is counted from 15, that of float32 from 127; the largest one stands for infinity and no number.
  const uint32_t normal = (size << 13) + (112u << 23) + (size >= 0x7c00u ? 112u << 23 : 0u) +
                          (size > 0x7c00u ? 0x400000u & ~(size << 13) : 0u);
  const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f;  // where the exponent is 0
  return of_bits((size < 0x400u ? bits_of(small) : normal) | (static_cast<uint32_t>(number & 0x8000u) << 16));
}

// To the nearest, and of two that are as near to the even one.
inline uint16_t to_float16(float number) {
  const uint32_t bits = bits_of(number);
  const uint32_t size = bits & 0x7fffffffu;
  const uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  // Below 2^-14 the sum with 0.5 is rounded where float16 ends.
  const uint32_t small = bits_of(of_bits(size) + 0.5f) - 0x3f000000u;
  const uint32_t finite = size < 0x38800000u ? small : normal;
  const uint32_t odd = size > 0x7f800000u ? 0x7e00u | ((size >> 13) & 0x3ffu) : 0x7c00u;
  return static_cast<uint16_t>((size >= 0x477ff000u ? odd : finite) | ((bits >> 16) & 0x8000u));
}

#ifdef __GNUC__

// `kCount` numbers at a time, for each instruction set. `Floats` is a vector of so many floats.
template <int kCount>
struct Float16 {
  template <typename Floats>
  static inline __attribute__((always_inline)) void load(Floats& to, const uint16_t* from) {
    float numbers[kCount];
    for (int i = 0; i < kCount; ++i) numbers[i] = float16_to_float(from[i]);
    std::memcpy(&to, numbers, sizeof(numbers));
  }
};

#ifdef FASTGEN_X86

template <int kCount>  // a multiple of 8
struct Float16F16c {
  template <typename Floats>
  static inline __attribute__((always_inline, target("avx,f16c"))) void load(Floats& to, const uint16_t* from) {
    for (int i = 0; i < kCount; i += 8) {
      const __m256 numbers = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
      std::memcpy(reinterpret_cast<char*>(&to) + i * sizeof(float), &numbers, sizeof(numbers));
    }
  }
};

template <int kCount>  // a multiple of 16
struct Float16Avx512 {
  template <typename Floats>
  static inline __attribute__((always_inline, target("avx512f"))) void load(Floats& to, const uint16_t* from) {
    for (int i = 0; i < kCount; i += 16) {
      const __m512 numbers = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      std::memcpy(reinterpret_cast<char*>(&to) + i * sizeof(float), &numbers, sizeof(numbers));
    }
  }
};

#endif
#endif

}  // namespace fastgen
