// The best score of each row, and whether another one is about as good, in one pass over the scores, on the CPU. The schema
// is defined in fastgen/ops/top_two.py.
//
// Of each block of scores the largest is found. Then only the block with the best one is looked at once more: for its place
// and for the second best in the same block.
#include "top_two/block.h"
#include "checks.h"
#include "instruction_set.h"
#include "parallel.h"
#include "plan.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

// Vectors as a language extension: gcc and clang.
#if defined(__GNUC__)

namespace {

using fastgen::Block;
using fastgen::kInfinity;
using fastgen::LookAt;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Scores of a block, which stays in the first cache.
constexpr int64_t kBlock = 2048;

namespace portable {
#define FASTGEN_TARGET
#define FASTGEN_WIDTH 4
#include "top_two/loops.h"
}  // namespace portable

#ifdef FASTGEN_X86
namespace avx2 {
#define FASTGEN_TARGET __attribute__((target("avx2,fma")))
#define FASTGEN_WIDTH 8
#include "top_two/loops.h"
}  // namespace avx2

namespace avx512 {
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define FASTGEN_WIDTH 16
#include "top_two/loops.h"
}  // namespace avx512
#endif

}  // namespace

fastgen::LookAt fastgen::look_at() {
#define FASTGEN_LOOK_AT(SET) &SET::look_at
  return FASTGEN_CHOOSE(FASTGEN_LOOK_AT);
#undef FASTGEN_LOOK_AT
}

namespace {

struct Best {
  int64_t token;
  bool is_near;
};

// A NaN is larger than any number, and nothing is near to it.
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
  fastgen::Arguments("top_two").writes(tokens, is_near).reads(scores);
  STD_TORCH_CHECK(scores.dim() == 2 && scores.is_contiguous() && scores.scalar_type() == ScalarType::Float &&
                      scores.size(1) > 0,
                  "top_two: scores must be [rows, vocabulary] of float32");
  STD_TORCH_CHECK(tokens.dim() == 1 && tokens.size(0) == scores.size(0) && tokens.is_contiguous() &&
                      tokens.scalar_type() == ScalarType::Long && is_near.dim() == 1 &&
                      is_near.size(0) == scores.size(0) && is_near.is_contiguous() &&
                      is_near.scalar_type() == ScalarType::Bool,
                  "top_two: tokens must be [rows] of int64, and is_near of bool");
  const int64_t vocabulary = scores.size(1);
  const float* score = static_cast<const float*>(scores.const_data_ptr());
  int64_t* token = static_cast<int64_t*>(tokens.mutable_data_ptr());
  bool* near = static_cast<bool*>(is_near.mutable_data_ptr());
  const LookAt look = fastgen::look_at();
  // A thread is not worth starting for a few thousand scores.
  const int64_t grain = std::max<int64_t>(1, 32768 / vocabulary);
  fastgen::parallel_for(0, scores.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Best found = best_of(score + row * vocabulary, vocabulary, static_cast<float>(masked),
                                 static_cast<float>(share), look);
      token[row] = found.token, near[row] = found.is_near;
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("top_two_out", FASTGEN_PLANNED(top_two_out)); }

#endif
