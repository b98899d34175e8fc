// No-repeat n-gram on CUDA: one block per row, whose threads stride over the windows, so that rows may have any length.
//
// Nothing here waits for the device or depends on the contents of device memory: the kernel reads the lengths, and the
// call can be captured in a CUDA graph.
#include "../no_repeat_ngram.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <cuda_runtime.h>

#include <algorithm>

namespace {

using torch::stable::Tensor;

constexpr int64_t kMaxThreads = 256;
constexpr int64_t kSharedBytes = 48 * 1024;  // available to a block on every device without opting in

template <bool prefix_in_shared, typename word_t, typename token_t>
__global__ void no_repeat_ngram_kernel(fastgen::Problem<word_t, token_t> problem) {
  extern __shared__ __align__(8) unsigned char shared[];
  const int64_t row = blockIdx.x;
  const int64_t first = problem.first_of_prefix(row);
  if (first < 0) return;  // the same for the whole block, so that no thread waits below
  const token_t* prefix = problem.prefix(row, first);
  int64_t stride = problem.tokens.stride;
  if constexpr (prefix_in_shared) {
    token_t* copy = reinterpret_cast<token_t*>(shared);
    for (int64_t k = threadIdx.x; k < problem.n - 1; k += blockDim.x) copy[k] = prefix[k * stride];
    __syncthreads();
    prefix = copy;
    stride = 1;
  }
  problem.ban(row, prefix, stride, threadIdx.x, blockDim.x);
}

Tensor no_repeat_ngram_cuda(Tensor scores, Tensor tokens, std::optional<Tensor> lengths, int64_t n,
                            std::optional<Tensor> context, std::optional<Tensor> context_lengths) {
  fastgen::solve(scores, tokens, lengths, n, context, context_lengths, [&scores](const auto& problem) {
    const int32_t device = scores.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    const int64_t windows = problem.source.lengths.full - problem.n + 1;
    const auto blocks = static_cast<unsigned>(problem.rows);
    const auto threads = static_cast<unsigned>(std::min(kMaxThreads, (windows + 31) / 32 * 32));
    const int64_t prefix_bytes = (problem.n - 1) * static_cast<int64_t>(sizeof(*problem.tokens.data));
    const auto on = static_cast<cudaStream_t>(stream);
    if (prefix_bytes <= kSharedBytes) {
      no_repeat_ngram_kernel<true><<<blocks, threads, prefix_bytes, on>>>(problem);
    } else {
      no_repeat_ngram_kernel<false><<<blocks, threads, 0, on>>>(problem);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return scores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CUDA, library) {
  library.impl("no_repeat_ngram_", TORCH_BOX(&no_repeat_ngram_cuda));
}
