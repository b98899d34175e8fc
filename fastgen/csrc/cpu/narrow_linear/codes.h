// Weights in float32 that were unpacked from few bits, in these bits: each group of inputs has a scale and a minimum, and
// each of its numbers is `code * scale + minimum`, exactly.
#pragma once

#include "../bits.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace fastgen {

constexpr int64_t kGroup = 32;  // inputs, of one line of the weight

// A group of a panel has, for all of its outputs each: scales, minimums, and 4 or 8 lines of words of 32 bits. A word has the
// codes of 8 or 4 inputs, the first one in its lowest bits.
constexpr int64_t group_bytes(int64_t bits, int64_t width) {
  return width * (2 * static_cast<int64_t>(sizeof(float)) + kGroup * bits / 8);
}

struct Group {
  float scale, minimum;
  uint32_t codes[kGroup];
};

inline uint32_t greatest_common_divisor(uint32_t a, uint32_t b) {
  while (b != 0) {
    const uint32_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// Divides all numbers by the divisor. Returns whether nothing is left over. Without branches, so that the loop becomes vectors.
inline bool divide(const uint32_t* numbers, uint32_t divisor, uint32_t* quotients) {
  uint32_t lost = 0;
  for (int64_t i = 0; i < kGroup; ++i) {
    // Numbers have at most 24 bits, so a quotient that is whole is exact in float32.
    quotients[i] = static_cast<uint32_t>(
        static_cast<int32_t>(static_cast<float>(static_cast<int32_t>(numbers[i])) / static_cast<float>(divisor)));
    lost |= quotients[i] * divisor ^ numbers[i];
  }
  return lost == 0;
}

// Returns how many bits the largest code needs, 4 or 8, or 0 if the group has no codes.
//
// A scale in a file is a float16, so each weight is a multiple of 2^-24, the smallest float16. The scale that is found is the
// greatest common divisor of the differences from the minimum, so codes are as small as they can be. Differences of more than
// 24 bits are refused: below that, `code * scale + minimum` is exact, with and without FMA. A negative zero is found as a
// positive one, with which sums are the same, but for the sign of a zero.
inline int64_t find_codes(const float* numbers, Group& group) {
  constexpr float kUnits = 0x1p24f;
  int32_t units[kGroup], least = INT32_MAX;
  bool are_whole = true;
  for (int64_t i = 0; i < kGroup; ++i) {
    const float exact = numbers[i] * kUnits;
    const bool is_small = std::fabs(exact) < 0x1p30f;  // false for NaN, too
    units[i] = static_cast<int32_t>(is_small ? exact : 0.0f);
    // What is no zero may be taken for one where the processor flushes subnormal numbers.
    const bool is_known = units[i] != 0 || bits_of(numbers[i]) << 1 == 0;
    are_whole &= is_small && is_known && static_cast<float>(units[i]) == exact;
    least = std::min(least, units[i]);
  }
  if (!are_whole) return 0;
  uint32_t differences[kGroup], all = 0;
  for (int64_t i = 0; i < kGroup; ++i) all |= differences[i] = static_cast<uint32_t>(units[i] - least);
  group.minimum = static_cast<float>(least) / kUnits;
  group.scale = 0.0f;
  std::fill_n(group.codes, kGroup, 0u);
  if (all == 0) return 4;
  const int shift = lowest_bit(all);
  if (all >> shift >= 1u << 24) return 0;
  for (uint32_t& difference : differences) difference >>= shift;
  uint32_t divisor = 0;
  for (int64_t i = 0; i < kGroup / 4; ++i) divisor = greatest_common_divisor(differences[i], divisor);
  if (divisor == 0 || !divide(differences, divisor, group.codes)) {
    for (const uint32_t difference : differences) divisor = greatest_common_divisor(difference, divisor);
    divide(differences, divisor, group.codes);
  }
  uint32_t most = 0;
  for (const uint32_t code : group.codes) most |= code;
  group.scale = std::ldexp(static_cast<float>(divisor), shift - 24);
  return most > 255 ? 0 : most > 15 ? 8 : 4;
}

// Writes a panel of a weight, [outputs, inputs], with whole groups of inputs; behind the last output there are zeros. Returns
// whether all of its numbers have codes of so many bits; otherwise, what it has written is of no use.
inline bool pack_codes(const float* weight, int64_t outputs, int64_t inputs, int64_t bits, int64_t width, int64_t panel,
                       uint8_t* to) {
  Group group;
  for (int64_t k = 0; k < inputs; k += kGroup, to += group_bytes(bits, width)) {
    std::fill_n(to, group_bytes(bits, width), uint8_t{0});
    for (int64_t o = 0; o < std::min(width, outputs - panel * width); ++o) {
      const int64_t found = find_codes(weight + (panel * width + o) * inputs + k, group);
      if (found == 0 || found > bits) return false;
      std::memcpy(to + o * sizeof(float), &group.scale, sizeof(float));
      std::memcpy(to + (width + o) * sizeof(float), &group.minimum, sizeof(float));
      for (int64_t i = 0; i < kGroup; i += 32 / bits) {
        uint32_t word = 0;
        for (int64_t n = 0; n < 32 / bits; ++n) word |= group.codes[i + n] << (n * bits);
        std::memcpy(to + ((2 + i * bits / 32) * width + o) * sizeof(float), &word, sizeof(word));
      }
    }
  }
  return true;
}

}  // namespace fastgen
