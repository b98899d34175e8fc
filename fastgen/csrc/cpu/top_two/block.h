// What is found in a block of scores (top_two.cpp).
#pragma once

#include <cstdint>
#include <limits>

namespace fastgen {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Block {
  float best, size;
  bool has_nan;
};

// (scores, count, masked): the block's largest score, its largest size below `masked`, and whether there is a NaN.
using LookAt = Block (*)(const float*, int64_t, float);

// For this processor.
LookAt look_at();

}  // namespace fastgen
