// What executes the instructions of fastgen/csrc/cpu/elementwise.cpp: one line of numbers at a time.
#pragma once

#include <cstdint>

namespace fastgen {

// As in fastgen/ops/elementwise.py. Numbers of the last three types are only copied.
enum Kind : int64_t {
  kCopy,
  kNegate,
  kAdd,
  kSubtract,
  kMultiply,
  kRelu,
  kSilu,
  kSigmoid,
  kTanh,
  kGelu,
  kGeluTanh,
  kRmsNorm,
  kLayerNorm,
  kKinds
};
enum Type : int64_t { kFloat32, kBFloat16, kFloat16, kBytes1, kBytes4, kBytes8, kTypes };

// Numbers that are `stride` numbers apart. Without data, all of them are one number.
struct Piece {
  char* data;
  int64_t type, stride;
};

// The second number is the second operand where that has no memory. Of norms, the numbers are eps and what is added to
// the weight.
struct Options {
  double numbers[2];
  bool rounds_scaled;  // a row is rounded to its type before it is multiplied by the weight, too
};

// Lines of `count` numbers each: the first one of the result and of three operands, and how many bytes further on each has
// the next one.
using Line = void (*)(const Piece* pieces, const int64_t* apart, int64_t lines, int64_t count, const Options& options);

// With the widest vectors that the process may use.
Line line_of(int64_t kind);

}  // namespace fastgen
