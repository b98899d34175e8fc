// The best of some scores as torch.topk has them on the CPU: of equal ones the same, and in the same order. torch leaves
// that to algorithms of the standard library, and these are the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fastgen {

struct Candidate {
  float score;
  int64_t index;
};

// What is not a number is better than all numbers.
inline bool is_better(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score != a.score && b.score == b.score);
}

// Whether `count` of `all` are found by going through all of them once, with the best so far in a heap. Then a candidate
// changes nothing that is no better than `count` of those in front of it, and may be left out.
inline bool is_one_pass(int64_t count, int64_t all) { return count * 64 <= all; }

// The `count` best, best first, become the first of `candidates`: all of them, or those that were not left out.
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
