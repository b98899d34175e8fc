// Numbers of the floating types, one by one, as float32.
#pragma once

#include "../bfloat16.h"
#include "../float16.h"

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace fastgen {

using torch::headeronly::ScalarType;

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
  const auto copy = [&](const auto* numbers, const auto& upcast) {
    if (order != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        // The order has been checked. If another thread has written to it since, no other memory is read for that.
        const int64_t input = order[i];
        const bool is_there = static_cast<uint64_t>(input) < static_cast<uint64_t>(count);
        to[i] = is_there ? upcast(numbers[at + input * stride]) : 0.0f;
      }
    } else if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) to[i] = upcast(numbers[at + i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = upcast(numbers[at + i * stride]);
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
    static_cast<uint16_t*>(to)[at] = type == ScalarType::BFloat16 ? to_bfloat16(number) : to_float16(number);
  }
}

}  // namespace fastgen
