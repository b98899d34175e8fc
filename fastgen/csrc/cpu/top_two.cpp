// The best score of each row, and whether another one is about as good, in one pass over the scores, on the CPU. The
// schema is defined in fastgen/ops/search_step.py.
//
// The pass finds the largest score of each block. Only the block with the best one is then read again: for its index
// and for the second best in the same block.
#include "instruction_set.h"
#include "isa.h"
#include "operator.h"
#include "top_two/block.h"

#include <cmath>

namespace {

using namespace fastgen;

// Scores of a block, which stays in the first-level cache.
constexpr int64_t kBlock = 2048;

#define FASTGEN_KERNELS "top_two/loops.h"
#include "each_isa.h"

struct Best {
  int64_t token;
  bool is_near;
};

// NaN is larger than any number, and nothing is near it.
Best best_of(const float* scores, int64_t count, float masked, float share, LookAt look) {
  float best = -kInfinity, second = -kInfinity, size = 0.0f;
  int64_t of_best = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const Block block = look(scores + begin, std::min(kBlock, count - begin), masked);
    if (block.has_nan) {
      const float* first_nan = std::find_if(scores + begin, scores + count, [](float x) { return x != x; });
      return {first_nan - scores, false};
    }
    size = std::max(size, block.size);
    if (block.best > best) {
      second = best, best = block.best, of_best = begin;
    } else {
      second = std::max(second, block.best);
    }
  }
  const float *begin = scores + of_best, *end = scores + std::min(of_best + kBlock, count);
  const float* found = std::find(begin, end, best);
  for (const float* each = begin; each < end; ++each) {
    if (each != found) second = std::max(second, *each);
  }
  return {found - scores, count > 1 && second >= best - share * size};
}

void top_two_out(Tensor tokens, Tensor is_near, Tensor scores, double masked, double share) {
  Arguments("top_two").writes(tokens, is_near).reads(scores);
  const char *given = "top_two: scores must be [rows, vocabulary] of float32",
             *wanted = "top_two: tokens must be [rows] of int64, and is_near of bool";
  STD_TORCH_CHECK(scores.dim() == 2 && scores.size(1) > 0, given);
  const int64_t rows = scores.size(0), vocabulary = scores.size(1);
  const float* score = checked<const float>(scores, {rows, vocabulary}, given);
  int64_t* token = checked<int64_t>(tokens, {rows}, wanted);
  bool* near = checked<bool>(is_near, {rows}, wanted);
  const LookAt look = fastgen::look_at();
  // A few thousand scores do not pay for a thread.
  const int64_t grain = std::max<int64_t>(1, 32768 / vocabulary);
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Best found = best_of(score + row * vocabulary, vocabulary, static_cast<float>(masked),
                                 static_cast<float>(share), look);
      token[row] = found.token, near[row] = found.is_near;
    }
  });
}

}  // namespace

fastgen::LookAt fastgen::look_at() { return FASTGEN_CHOOSE(look_at); }

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("top_two_out", FASTGEN_PLANNED(top_two_out)); }
