// The best continuations of each input over all its beams, on the CPU. The schema is defined in
// fastgen/ops/best_candidates.py.
//
// Almost no score is among the best. So the scores are compared, a cache line at a time, with the worst of the best so
// far, and only a line with a better one is looked at number by number. Everything is read once.
#include "instruction_set.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#ifdef __GNUC__  // vectors as a language extension: gcc and clang

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
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

struct Candidate {
  float score;
  int64_t index;
};

// The `size` best candidates seen, best first. Of equal ones all but the first seen may be missing.
class Best {
 public:
  explicit Best(int64_t size) : size_(size) { found_.reserve(size + 1); }

  // What a score must be above to be among the best.
  float limit() const {
    return static_cast<int64_t>(found_.size()) < size_ ? kNegativeInfinity : found_.back().score;
  }

  void add(Candidate candidate) {
    if (candidate.score != candidate.score) has_nan_ = true;
    if (!(candidate.score > limit())) return;
    if (static_cast<int64_t>(found_.size()) == size_) found_.pop_back();
    const auto at = std::upper_bound(found_.begin(), found_.end(), candidate,
                                     [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
    found_.insert(at, candidate);
  }

  void add(const Best& other) {
    has_nan_ = has_nan_ || other.has_nan_;
    for (const Candidate& candidate : other.found_) add(candidate);
  }

  bool has_nan() const { return has_nan_; }
  const std::vector<Candidate>& found() const { return found_; }

 private:
  int64_t size_;
  bool has_nan_ = false;
  std::vector<Candidate> found_;
};

void scan(Best& best, const float* scores, int64_t count, float added, int64_t index, AnyAbove above) {
  int64_t i = 0;
  for (; i + kLine <= count; i += kLine) {
    if (!above(scores + i, added, best.limit())) continue;
    for (int64_t j = i; j < i + kLine; ++j) best.add({scores[j] + added, index + j});
  }
  for (; i < count; ++i) best.add({scores[i] + added, index + i});
}

// Scores and indices of the best, [inputs, count] each; the indices are empty where the scores alone do not decide what
// comes first, or there are fewer than `count` above -inf, or one is not a number.
std::tuple<Tensor, Tensor> best_candidates(Tensor scores, Tensor running, int64_t count) {
  STD_TORCH_CHECK(scores.dim() == 2 && running.dim() == 2 && scores.scalar_type() == ScalarType::Float &&
                      running.scalar_type() == ScalarType::Float && scores.is_contiguous() && running.is_contiguous() &&
                      scores.size(0) == running.size(0) * running.size(1),
                  "best_candidates: scores must be [inputs * beams, vocabulary] and running [inputs, beams], of float32");
  const int64_t inputs = running.size(0), beams = running.size(1), vocabulary = scores.size(1);
  STD_TORCH_CHECK(count >= 1 && count <= beams * vocabulary, "best_candidates: there are not so many candidates");
  Tensor values = torch::stable::new_empty(scores, {inputs, count});
  Tensor indices = torch::stable::new_empty(scores, {inputs, count}, ScalarType::Long);
  const float* data = static_cast<const float*>(scores.const_data_ptr());
  const float* added = static_cast<const float*>(running.const_data_ptr());
  float* value = static_cast<float*>(values.mutable_data_ptr());
  int64_t* index = static_cast<int64_t*>(indices.mutable_data_ptr());

  const int64_t parts = (vocabulary + kPart - 1) / kPart;
  const AnyAbove above = any_above();
  // One more than is wanted, to see whether it is equal to the last one that is.
  std::vector<Best> found;
  found.reserve(inputs * beams * parts);
  for (int64_t task = 0; task < inputs * beams * parts; ++task) found.emplace_back(count + 1);
  torch::stable::parallel_for(0, static_cast<int64_t>(found.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / parts, first = task % parts * kPart;
      scan(found[task], data + row * vocabulary + first, std::min(kPart, vocabulary - first), added[row],
           row % beams * vocabulary + first, above);
    }
  });
  for (int64_t input = 0; input < inputs; ++input) {
    Best best(count + 1);
    for (int64_t part = 0; part < beams * parts; ++part) best.add(found[input * beams * parts + part]);
    const std::vector<Candidate>& all = best.found();
    bool decided = !best.has_nan() && static_cast<int64_t>(all.size()) >= count;
    for (size_t i = 1; decided && i < all.size(); ++i) decided = all[i - 1].score != all[i].score;
    if (!decided) return {values, torch::stable::new_empty(scores, {0}, ScalarType::Long)};
    for (int64_t i = 0; i < count; ++i) {
      value[input * count + i] = all[i].score;
      index[input * count + i] = all[i].index;
    }
  }
  return {values, indices};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("best_candidates", TORCH_BOX(&best_candidates)); }

#endif
