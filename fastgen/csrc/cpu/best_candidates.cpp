// The best continuations of each input over all its beams, on the CPU. The schema is defined in
// fastgen/ops/best_candidates.py.
//
// Almost no score is among the best. So the scores are compared, some cache lines at a time, with the worst of the best so
// far, and only where there is a better one they are looked at number by number. Everything is read once. What is no
// better changes nothing for torch.topk, whatever its order of equal scores. So the few that are left are given to the
// same algorithm, in their order, and the result is torch's.
#include "instruction_set.h"
#include "topk.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#ifdef __GNUC__  // vectors as a language extension: gcc and clang

namespace {

using fastgen::Candidate;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Scores of one task.
constexpr int64_t kPart = 32768;
// Scores that are compared in one go.
constexpr int64_t kLine = 64;

// Whether one of kLine scores, with `added`, is above `limit`, or is not a number.
using AnyAbove = bool (*)(const float*, float, float);

#define FASTGEN_ANY_ABOVE(WIDTH, TARGET)                                                              \
  typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float))));  \
  TARGET bool any_above(const float* scores, float added, float limit) {                             \
    auto within = reinterpret_cast<const Vector*>(scores)[0] + added <= limit;                       \
    for (int64_t i = 1; i < kLine / WIDTH; ++i) {                                                    \
      within &= reinterpret_cast<const Vector*>(scores)[i] + added <= limit;                         \
    }                                                                                                \
    int all = -1;                                                                                    \
    for (int64_t i = 0; i < WIDTH; ++i) all &= within[i];                                            \
    return all == 0;                                                                                 \
  }

namespace portable {
FASTGEN_ANY_ABOVE(4, )
}
#ifdef FASTGEN_X86
namespace avx2 {
FASTGEN_ANY_ABOVE(8, __attribute__((target("avx2"))))
}
namespace avx512 {
FASTGEN_ANY_ABOVE(16, __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))))
}
#endif
#undef FASTGEN_ANY_ABOVE

AnyAbove any_above() {
#ifdef FASTGEN_X86
  switch (fastgen::instruction_set()) {
    case fastgen::InstructionSet::kAvx512: return &avx512::any_above;
    case fastgen::InstructionSet::kAvx2: return &avx2::any_above;
    case fastgen::InstructionSet::kPortable: break;
  }
#endif
  return &portable::any_above;
}

// The candidates of a part, in their order, without those that are no better than `count` in front of them.
std::vector<Candidate> found_in(const float* scores, int64_t size, float added, int64_t index, int64_t count,
                                AnyAbove above) {
  std::vector<Candidate> found;
  std::vector<float> best;  // a heap of the scores of the best, the worst of them in front
  const auto look_at = [&](int64_t i) {
    const float score = scores[i] + added;
    if (static_cast<int64_t>(best.size()) == count) {
      if (score <= best.front()) return;
      std::pop_heap(best.begin(), best.end(), std::greater<float>());
      best.pop_back();
    }
    best.push_back(score == score ? score : kInfinity);
    std::push_heap(best.begin(), best.end(), std::greater<float>());
    found.push_back({score, index + i});
  };
  int64_t i = 0;
  for (; i < std::min(count, size); ++i) look_at(i);
  for (; i + kLine <= size; i += kLine) {
    if (!above(scores + i, added, best.front())) continue;
    for (int64_t j = i; j < i + kLine; ++j) look_at(j);
  }
  for (; i < size; ++i) look_at(i);
  return found;
}

// The `count` best of scores [inputs * beams, vocabulary], plus what is added to each row, [inputs, beams]: their values,
// beams and tokens, [inputs, count] each.
void best_candidates_out(Tensor values, Tensor beams, Tensor tokens, Tensor scores, Tensor running) {
  STD_TORCH_CHECK(scores.dim() == 2 && running.dim() == 2 && scores.scalar_type() == ScalarType::Float &&
                      running.scalar_type() == ScalarType::Float && scores.is_contiguous() && running.is_contiguous() &&
                      scores.size(0) == running.size(0) * running.size(1),
                  "best_candidates: scores must be [inputs * beams, vocabulary] and running [inputs, beams], of float32");
  STD_TORCH_CHECK(values.dim() == 2 && values.size(0) == running.size(0) && values.scalar_type() == ScalarType::Float &&
                      values.is_contiguous(),
                  "best_candidates: the values must be [inputs, count], of float32");
  for (const Tensor* each : {&beams, &tokens}) {
    STD_TORCH_CHECK(each->dim() == 2 && each->size(0) == values.size(0) && each->size(1) == values.size(1) &&
                        each->scalar_type() == ScalarType::Long && each->is_contiguous(),
                    "best_candidates: beams and tokens must be [inputs, count], of int64");
  }
  const int64_t inputs = running.size(0), per_input = running.size(1), vocabulary = scores.size(1);
  const int64_t count = values.size(1), all = per_input * vocabulary;
  STD_TORCH_CHECK(count >= 1 && count <= all, "best_candidates: there are not so many candidates");
  const float* data = static_cast<const float*>(scores.const_data_ptr());
  const float* added = static_cast<const float*>(running.const_data_ptr());
  float* value = static_cast<float*>(values.mutable_data_ptr());
  int64_t* beam = static_cast<int64_t*>(beams.mutable_data_ptr());
  int64_t* token = static_cast<int64_t*>(tokens.mutable_data_ptr());

  const bool one_pass = fastgen::is_one_pass(count, all);
  const int64_t kept = one_pass ? count : all;  // otherwise nothing may be left out
  const int64_t parts = (vocabulary + kPart - 1) / kPart;
  const AnyAbove above = any_above();
  std::vector<std::vector<Candidate>> found(inputs * per_input * parts);
  torch::stable::parallel_for(0, static_cast<int64_t>(found.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / parts, first = task % parts * kPart;
      found[task] = found_in(data + row * vocabulary + first, std::min(kPart, vocabulary - first), added[row],
                             row % per_input * vocabulary + first, kept, above);
    }
  });
  std::vector<Candidate> candidates;
  for (int64_t input = 0; input < inputs; ++input) {
    candidates.clear();
    for (int64_t part = input * per_input * parts; part < (input + 1) * per_input * parts; ++part) {
      candidates.insert(candidates.end(), found[part].begin(), found[part].end());
    }
    fastgen::topk(candidates, count, one_pass);
    for (int64_t i = 0; i < count; ++i) {
      value[input * count + i] = candidates[i].score;
      beam[input * count + i] = candidates[i].index / vocabulary;
      token[input * count + i] = candidates[i].index % vocabulary;
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("best_candidates_out", TORCH_BOX(&best_candidates_out)); }

#endif
