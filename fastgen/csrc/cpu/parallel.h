// Divides work among torch's threads or, in a recorded graph that requests it, among FastGen's own.
//
// Torch's threads go to sleep immediately after each operator if the process has more of them than processors: for
// example after another thread of it has used torch, which gives that thread a pool of its own. Waking them for an
// operator of some microseconds takes longer than the operator. The threads of FastGen's pool poll for a while.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace fastgen {

using Range = void (*)(int64_t begin, int64_t end, void* context);

// Returns whether the calling thread owns the pool, which has then run all of [begin, end).
bool run_in_team(int64_t begin, int64_t end, int64_t grain, Range run, void* context);

// As torch::stable::parallel_for: f(begin, end) for parts of the range with at least `grain` elements.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  const Range run = [](int64_t from, int64_t to, void* context) { (*static_cast<const F*>(context))(from, to); };
  if (!run_in_team(begin, end, grain, run, const_cast<void*>(static_cast<const void*>(&f)))) {
    torch::stable::parallel_for(begin, end, grain, f);
  }
}

}  // namespace fastgen
