// How the codes of a panel lie in memory (fastgen/ops/linear/grouped.py).
#pragma once

#include "rows.h"

#include <cstdint>

namespace fastgen {

// A line of a panel: a word of four bytes for each of its outputs.
constexpr int64_t kLine = kPanel * 4;

// Bits that a code may have.
constexpr bool are_bits(int64_t bits) { return bits == 4 || bits == 5 || bits == 6 || bits == 8; }

// Lines come in sets. Of 8 bits, a line is a set: a word has four inputs. Of 4 bits, too: a word has eight, the first four in
// the lower halves of its bytes. Of 5 and 6 bits, some such lines of the lower four bits are followed by one of the upper bits: in
// each byte, those of the first four inputs are lowest.
constexpr int64_t low_lines(int64_t bits) { return bits == 5 ? 4 : bits == 6 ? 2 : 1; }
constexpr int64_t set_inputs(int64_t bits) { return bits == 8 ? 4 : 8 * low_lines(bits); }
constexpr int64_t set_bytes(int64_t bits) { return set_inputs(bits) * kPanel * bits / 8; }

// The code of an input; `words` is that of its output in the first line of the panel.
inline int code_of(const uint8_t* words, int64_t bits, int64_t input) {
  const int64_t in_set = input % set_inputs(bits), four = in_set / 4, byte = in_set % 4;
  const uint8_t* set = words + input / set_inputs(bits) * set_bytes(bits) + byte;
  if (bits == 8) return set[0];
  const int low = set[four / 2 * kLine] >> (four % 2 * 4) & 15;
  if (bits == 4) return low;
  const int high = set[low_lines(bits) * kLine] >> (four * (bits - 4)) & ((1 << (bits - 4)) - 1);
  return low | high << 4;
}

}  // namespace fastgen
