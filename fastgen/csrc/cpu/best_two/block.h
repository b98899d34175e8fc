// What is found in a block of scores: by the loops of best_two/loops.h, for best_two.cpp and largest_output.cpp.
#pragma once

#include <limits>

namespace fastgen {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Block {
  float best, size;
  bool is_spoilt;
};

}  // namespace fastgen
