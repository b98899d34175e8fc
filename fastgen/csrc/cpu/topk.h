// The best of some scores as torch.topk returns them on the CPU: the same of equal ones, in the same order. torch
// leaves that to algorithms of the standard library, which this code also uses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fastgen {

struct Candidate {
  float score;
  int64_t index;
};

// NaN is better than all numbers.
inline bool is_better(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score != a.score && b.score == b.score);
}

// Whether one pass with a heap of the best so far finds `count` of `all`. A candidate that `count` earlier ones equal
// or exceed then does not change the result, and may be left out.
inline bool is_one_pass(int64_t count, int64_t all) { return count * 64 <= all; }

// Moves the `count` best, best first, to the front of `candidates`: all of them, or those that were not left out.
inline void topk(std::vector<Candidate>& candidates, int64_t count, bool one_pass) {
  const auto begin = candidates.begin(), last = begin + count - 1, end = candidates.end();
  if (one_pass) {
    std::partial_sort(begin, last + 1, end, is_better);
  } else {
    std::nth_element(begin, last, end, is_better);
    std::sort(begin, last, is_better);
  }
}

}  // namespace fastgen
