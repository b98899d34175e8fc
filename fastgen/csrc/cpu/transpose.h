// Transposes square blocks of four-byte elements: [n, n], for the width n of a vector.
#pragma once
#include "instruction_set.h"

#include <cstdint>
#ifdef FASTGEN_X86
#include <immintrin.h>
#endif

namespace fastgen {

inline void transpose4(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 4; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

#ifdef FASTGEN_X86

__attribute__((target("avx2,fma"))) inline void transpose8(const float* from, int64_t from_stride, float* to,
                                                           int64_t to_stride) {
  __m256 rows[8], pairs[8];
#pragma GCC unroll 8
  for (int64_t n = 0; n < 8; ++n) rows[n] = _mm256_loadu_ps(from + n * from_stride);
  // Transposes four lines by four columns in each half of a line.
#pragma GCC unroll 4
  for (int64_t n = 0; n < 8; n += 2) {
    pairs[n] = _mm256_unpacklo_ps(rows[n], rows[n + 1]);
    pairs[n + 1] = _mm256_unpackhi_ps(rows[n], rows[n + 1]);
  }
#pragma GCC unroll 2
  for (int64_t n = 0; n < 8; n += 4) {
    rows[n] = _mm256_shuffle_ps(pairs[n], pairs[n + 2], 0x44);
    rows[n + 1] = _mm256_shuffle_ps(pairs[n], pairs[n + 2], 0xee);
    rows[n + 2] = _mm256_shuffle_ps(pairs[n + 1], pairs[n + 3], 0x44);
    rows[n + 3] = _mm256_shuffle_ps(pairs[n + 1], pairs[n + 3], 0xee);
  }
  // Half h of row i, for all lines: column 4 * h + i.
#pragma GCC unroll 4
  for (int64_t i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(rows[i], rows[4 + i], 0x20));
    _mm256_storeu_ps(to + (4 + i) * to_stride, _mm256_permute2f128_ps(rows[i], rows[4 + i], 0x31));
  }
}

__attribute__((target("avx512f"))) inline void transpose16(const void* from, int64_t from_stride, void* to,
                                                           int64_t to_stride) {
  const uint32_t* lines = static_cast<const uint32_t*>(from);
  uint32_t* columns = static_cast<uint32_t*>(to);
  __m512i quarters[4], pairs[4], rows[4];
  // Loads quarter q of four lines that are four apart into one vector, without shuffles.
#pragma GCC unroll 4
  for (int64_t q = 0; q < 4; ++q) {
#pragma GCC unroll 4
    for (int64_t n = 0; n < 4; ++n) {
      const uint32_t* line = lines + n * from_stride + 4 * q;
      const auto four = [&](int64_t i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + 4 * i * from_stride));
      };
      __m512i x = _mm512_castsi128_si512(four(0));
      x = _mm512_inserti32x4(x, four(1), 1);
      x = _mm512_inserti32x4(x, four(2), 2);
      quarters[n] = _mm512_inserti32x4(x, four(3), 3);
    }
    // Transposes four lines by four columns in each quarter.
    pairs[0] = _mm512_unpacklo_epi32(quarters[0], quarters[1]);
    pairs[1] = _mm512_unpackhi_epi32(quarters[0], quarters[1]);
    pairs[2] = _mm512_unpacklo_epi32(quarters[2], quarters[3]);
    pairs[3] = _mm512_unpackhi_epi32(quarters[2], quarters[3]);
    rows[0] = _mm512_unpacklo_epi64(pairs[0], pairs[2]);
    rows[1] = _mm512_unpackhi_epi64(pairs[0], pairs[2]);
    rows[2] = _mm512_unpacklo_epi64(pairs[1], pairs[3]);
    rows[3] = _mm512_unpackhi_epi64(pairs[1], pairs[3]);
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) _mm512_storeu_si512(columns + (4 * q + i) * to_stride, rows[i]);
  }
}

#endif

}  // namespace fastgen
