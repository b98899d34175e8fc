// The summary of a block of scores (top_two.cpp).
#pragma once

#include <cstdint>
#include <limits>

namespace fastgen {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Block {
  float best, size;
  bool has_nan;
};

// (scores, count, masked): returns the block's largest score, its largest magnitude below `masked`, and whether it has
// NaN.
using LookAt = Block (*)(const float*, int64_t, float);

// Returns the function for this processor.
LookAt look_at();

}  // namespace fastgen
