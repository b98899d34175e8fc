// The best continuations of each input over all its beams, on the CPU, in float32, bfloat16 or float16. The schema is
// defined in fastgen/ops/search_step.py.
//
// Almost no score is among the best. Scores are therefore compared with the worst of the best so far, vector by vector,
// and only better ones are examined. The denominator of a softmax is summed in the same pass (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018): everything is read once.
//
// A log-softmax and the addend of a row can only change the order in the row to equality. Scores that are no better do
// not change the result of torch.topk, whatever its order of equal scores. The same algorithm therefore gets the few
// remaining candidates, in their order, and chooses as it would from all.
#include "elementwise/functions.h"
#include "floats.h"
#include "isa.h"
#include "operator.h"
#include "topk.h"

#include <cmath>
#include <functional>
#include <limits>

namespace {

using namespace fastgen;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNoNumber = std::numeric_limits<float>::quiet_NaN();
// Scores of one task; of a block, which stays in the first-level cache; and of a line. kLines lines are compared with
// one limit.
constexpr int64_t kPart = 32768, kBlock = 1024, kLine = 64, kLines = 4;

struct Loops {
  void (*above)(const float*, int64_t, float, uint64_t*);
  float (*largest)(const float*, int64_t);
  float (*sum_of_exponentials)(const float*, int64_t, float);
  void (*widen_bfloat16)(float*, const uint16_t*, int64_t);
  void (*widen_float16)(float*, const uint16_t*, int64_t);
};

#define FASTGEN_KERNELS "best_candidates/loops.h"
#define FASTGEN_LOOPS
#include "each_isa.h"

// The sum of the exponentials of some scores is total * e^maximum.
struct Denominator {
  float maximum = -kInfinity;
  double total = 0.0;

  void add(float other, double sum) {
    if (other > maximum) {
      total *= std::exp(static_cast<double>(maximum) - other);
      maximum = other;
    }
    total += other == -kInfinity ? sum : sum * std::exp(static_cast<double>(other) - maximum);
  }
};

// The result of a part of a row: its candidates in order, without those that `count` earlier ones equal or exceed, and
// its share of the denominator.
class Part {
 public:
  void scan(const void* scores, ScalarType type, int64_t size, int64_t index, int64_t count, bool normalise,
            const Loops& loops) {
    index_ = index;
    count_ = count;
    float widened[kBlock];
    for (int64_t begin = 0; begin < size; begin += kBlock) {
      const int64_t numbers = std::min(kBlock, size - begin);
      const float* block = widened;
      if (type == ScalarType::Float) {
        block = static_cast<const float*>(scores) + begin;
      } else {
        const auto widen = type == ScalarType::BFloat16 ? loops.widen_bfloat16 : loops.widen_float16;
        widen(widened, static_cast<const uint16_t*>(scores) + begin, numbers);
      }
      if (normalise) {
        const float maximum = loops.largest(block, numbers);
        denominator.add(maximum, loops.sum_of_exponentials(block, numbers, maximum == -kInfinity ? 0.0f : maximum));
      }
      look_at(block, numbers, begin, loops);
    }
  }

  std::vector<Candidate> found;
  Denominator denominator;

 private:
  void look_at(const float* block, int64_t numbers, int64_t begin, const Loops& loops) {
    int64_t i = 0;
    for (; i < numbers && !is_full(); ++i) look_at(block[i], begin + i);
    uint64_t above[kLines];
    for (int64_t lines; (lines = std::min((numbers - i) / kLine, kLines)) > 0; i += lines * kLine) {
      loops.above(block + i, lines, best_.front(), above);
      for (int64_t line = 0; line < lines; ++line) {
        for (uint64_t left = above[line]; left != 0; left &= left - 1) {
          const int64_t j = i + line * kLine + lowest_bit(left);
          look_at(block[j], begin + j);
        }
      }
    }
    for (; i < numbers; ++i) look_at(block[i], begin + i);
  }

  void look_at(float score, int64_t place) {
    if (is_full()) {
      if (score <= best_.front()) return;
      std::pop_heap(best_.begin(), best_.end(), std::greater<float>());
      best_.pop_back();
    }
    best_.push_back(score == score ? score : kInfinity);
    std::push_heap(best_.begin(), best_.end(), std::greater<float>());
    found.push_back({score, index_ + place});
  }

  bool is_full() const { return static_cast<int64_t>(best_.size()) == count_; }

  int64_t index_ = 0, count_ = 0;
  std::vector<float> best_;  // a min-heap of the best scores
};

// Adds the candidates of a row, with scores that are comparable across rows.
void add_row(std::vector<Candidate>& candidates, const std::vector<Part>& parts, int64_t begin, int64_t end,
             int64_t first, int64_t count, float running, bool normalise) {
  Denominator all;
  for (int64_t part = begin; part < end; ++part) all.add(parts[part].denominator.maximum, parts[part].denominator.total);
  const float logarithm = static_cast<float>(std::log(all.total));
  if (normalise && !(std::isfinite(all.maximum) && std::isfinite(logarithm))) {  // the softmax is undefined
    for (int64_t i = 0; i < count; ++i) candidates.push_back({kNoNumber, first + i});
    return;
  }
  for (int64_t part = begin; part < end; ++part) {
    for (const Candidate& each : parts[part].found) {
      const float score = normalise ? each.score - all.maximum - logarithm : each.score;
      candidates.push_back({score + running, each.index});
    }
  }
}

// Finds the `count` best of scores [inputs * beams, vocabulary], or of their log-softmax, plus an addend for each row,
// [inputs, beams]: their values, beams and tokens, [inputs, count] each.
void best_candidates_out(Tensor values, Tensor beams, Tensor tokens, Tensor scores, Tensor running, bool normalise) {
  Arguments("best_candidates").writes(values, beams, tokens).reads(scores, running);
  const ScalarType type = scores.scalar_type();
  STD_TORCH_CHECK(scores.dim() == 2 && running.dim() == 2 && scores.size(0) == running.size(0) * running.size(1) &&
                      is_floating(type) && running.scalar_type() == ScalarType::Float && scores.is_contiguous() &&
                      running.is_contiguous(),
                  "best_candidates: scores must be [inputs * beams, vocabulary] of float32, bfloat16 or float16, and "
                  "running [inputs, beams] of float32");
  STD_TORCH_CHECK(values.dim() == 2, "best_candidates: the values must be [inputs, count], of float32");
  const int64_t inputs = running.size(0), per_input = running.size(1), vocabulary = scores.size(1);
  const int64_t count = values.size(1), all = product_of("best_candidates", per_input, vocabulary);
  const char* wanted = "best_candidates: beams and tokens must be [inputs, count], of int64";
  const char* data = numbers_of<const char>(scores);
  const float* added = numbers_of<const float>(running);
  float* value = checked<float>(values, {inputs, count}, "best_candidates: the values must be [inputs, count], of float32");
  int64_t *beam = checked<int64_t>(beams, {inputs, count}, wanted), *token = checked<int64_t>(tokens, {inputs, count}, wanted);
  STD_TORCH_CHECK(count >= 1 && count <= all, "best_candidates: there are not so many candidates");

  const bool one_pass = is_one_pass(count, all);
  const int64_t kept = one_pass ? count : all;  // otherwise nothing may be left out
  const int64_t bytes = static_cast<int64_t>(scores.element_size()), parts = quotient(vocabulary, kPart);
  const Loops chosen = FASTGEN_CHOOSE(kLoops);
  std::vector<Part> found(inputs * per_input * parts);
  parallel_for(0, static_cast<int64_t>(found.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / parts, first = task % parts * kPart;
      found[task].scan(data + (row * vocabulary + first) * bytes, type, std::min(kPart, vocabulary - first),
                       row % per_input * vocabulary + first, kept, normalise, chosen);
    }
  });
  std::vector<Candidate> candidates;
  for (int64_t input = 0; input < inputs; ++input) {
    candidates.clear();
    for (int64_t row = input * per_input; row < (input + 1) * per_input; ++row) {
      add_row(candidates, found, row * parts, (row + 1) * parts, row % per_input * vocabulary,
              std::min(kept, vocabulary), added[row], normalise);
    }
    topk(candidates, count, one_pass);
    for (int64_t i = 0; i < count; ++i) {
      value[input * count + i] = candidates[i].score;
      beam[input * count + i] = candidates[i].index / vocabulary;
      token[input * count + i] = candidates[i].index % vocabulary;
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("best_candidates_out", FASTGEN_PLANNED(best_candidates_out)); }
