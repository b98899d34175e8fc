// Activations that are quantised to 8 bits in groups of inputs, for the products of int8.cpp.
#pragma once

#include <cstdint>

namespace fastgen {

// Numbers that are quantised before it pays to wake another thread.
constexpr int64_t kGrain = 1 << 15;

// What the bytes of a group of a row stand for, and their sum.
struct Group {
  float scale;
  int32_t sum;
};

// For this processor.
struct RowKernels {
  // A row in signed bytes, group by group, from `inputs` numbers. It is one of `some` rows that lie between each other: four
  // bytes of each, then the next four.
  void (*quantize)(const float* x, int64_t inputs, int64_t group_size, int64_t some, int8_t* to, Group* groups);
  // Whole groups, `count` numbers, times the Hadamard matrix of their size and a factor.
  void (*rotate)(const float* x, int64_t count, int64_t group_size, float factor, float* to);
  // The second with 1 / group_size, and then the first, with the same results. `memory` is for as many numbers.
  void (*rotate_and_quantize)(const float* x, int64_t count, int64_t group_size, int64_t some, int8_t* to, Group* groups,
                              float* memory);
};
RowKernels row_kernels();

// Sizes of groups that can be rotated.
inline bool can_rotate(int64_t group_size) { return group_size == 32 || group_size == 64 || group_size == 128; }

}  // namespace fastgen
