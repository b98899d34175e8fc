// No-repeat n-gram on the CPU: rows in parallel. The schema is defined in fastgen/ops/no_repeat_ngram.py.
#include "../no_repeat_ngram.h"
#include "operator.h"

namespace {

using namespace fastgen;

// About as many comparisons as pay for waking a thread.
constexpr int64_t kComparisonsPerTask = 32768;

Tensor no_repeat_ngram_cpu(Tensor scores, Tensor tokens, std::optional<Tensor> lengths, int64_t n,
                           std::optional<Tensor> context, std::optional<Tensor> context_lengths) {
  Arguments("no_repeat_ngram_").writes_distinct(scores).reads(tokens, lengths, context, context_lengths);
  solve(scores, tokens, lengths, n, context, context_lengths, [](const auto& problem) {
    const int64_t rows_per_task = 1 + kComparisonsPerTask / (1 + problem.source.lengths.full);
    parallel_for(0, problem.rows, rows_per_task, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = problem.first_of_prefix(row);
        if (first >= 0) problem.ban(row, problem.prefix(row, first), problem.tokens.stride, 0, 1);
      }
    });
  });
  return scores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("no_repeat_ngram_", TORCH_BOX(&no_repeat_ngram_cpu));
}
