// What the products of grouped_linear.cpp and the rounding of grouped_rounding.cpp share.
#pragma once
#include "../bfloat16.h"
#include "../float16.h"

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace fastgen {

using torch::headeronly::ScalarType;

constexpr int64_t kPanel = 32;  // outputs
// Numbers that are rounded before it pays to wake another thread.
constexpr int64_t kGrain = 1 << 15;
constexpr int64_t kMaxGroup = 256;
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

inline bool is_floating(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

inline float read(const void* from, int64_t at, ScalarType type) {
  if (type == ScalarType::Float) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return type == ScalarType::BFloat16 ? to_float(bits) : float16_to_float(bits);
}

// `count` numbers, `stride` apart, or those that `order` names.
inline void read_line(const void* from, int64_t at, int64_t count, int64_t stride, const int64_t* order, ScalarType type,
                      float* to) {
  const auto copy = [&](const auto* numbers, const auto& widen) {
    if (order != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        // The order has been checked. If another thread has written to it since, no other memory is read for that.
        const int64_t input = order[i];
        const bool is_there = static_cast<uint64_t>(input) < static_cast<uint64_t>(count);
        to[i] = is_there ? widen(numbers[at + input * stride]) : 0.0f;
      }
    } else if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) to[i] = widen(numbers[at + i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = widen(numbers[at + i * stride]);
    }
  };
  if (type == ScalarType::Float) {
    copy(static_cast<const float*>(from), [](float x) { return x; });
  } else if (type == ScalarType::BFloat16) {
    copy(static_cast<const uint16_t*>(from), [](uint16_t x) { return to_float(x); });
  } else {
    copy(static_cast<const uint16_t*>(from), [](uint16_t x) { return float16_to_float(x); });
  }
}

inline void write(void* to, int64_t at, ScalarType type, float number) {
  if (type == ScalarType::Float) {
    static_cast<float*>(to)[at] = number;
  } else {
    static_cast<uint16_t*>(to)[at] =
        type == ScalarType::BFloat16 ? to_bfloat16(number) : to_float16(number);
  }
}

}  // namespace fastgen
