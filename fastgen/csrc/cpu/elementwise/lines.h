// The functions that execute the instructions of fastgen/csrc/cpu/elementwise.cpp, one line of elements at a time.
#pragma once

#include <cstdint>

namespace fastgen {

// As in fastgen/ops/elementwise.py. Elements of the last three types are only copied.
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

// Elements that are `stride` elements apart. Without data, all of them have one value.
struct Piece {
  char* data;
  int64_t type, stride;
};

// numbers[1] is the second operand if that has no memory. For norms, the numbers are eps and the addend of the weight.
struct Options {
  double numbers[2];
  bool rounds_scaled;  // whether a row is also rounded to its type before the multiplication by the weight
};

// Executes lines of `count` elements each: the first line of the result and of three operands, and the distance in
// bytes to the next line of each.
using Line = void (*)(const Piece* pieces, const int64_t* apart, int64_t lines, int64_t count, const Options& options);

// Uses the widest vectors that the process may use.
Line line_of(int64_t kind);

}  // namespace fastgen
