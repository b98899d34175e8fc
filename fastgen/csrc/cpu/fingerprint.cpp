// A fingerprint of a tensor. The schema is defined in fastgen/ops/fingerprint.py.
#include "operator.h"

namespace {

using namespace fastgen;

// Adds a word to a sum. The operation is invertible, so that a change of a single word is always detected.
inline void add(uint64_t& sum, uint64_t word) {
  const uint64_t mixed = sum ^ word;
  sum = (mixed << 31 | mixed >> 33) * 0x9e3779b97f4a7c15u;
}

// Computes the fingerprint of some bytes, as eight interleaved sums.
uint64_t fingerprint_of(const char* from, int64_t bytes) {
  constexpr int64_t kLanes = 8, kStep = kLanes * sizeof(uint64_t);
  uint64_t lanes[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8}, words[kLanes];
  const auto take = [&] {
#pragma GCC unroll 8
    for (int64_t lane = 0; lane < kLanes; ++lane) add(lanes[lane], words[lane]);
  };
  int64_t i = 0;
  for (; i + kStep <= bytes; i += kStep) {
    std::memcpy(words, from + i, kStep);
    take();
  }
  std::memset(words, 0, kStep);
  std::memcpy(words, from + i, bytes - i);
  take();
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (uint64_t lane : lanes) add(sum, lane);
  return sum;
}

int64_t fingerprint(Tensor x) {
  Arguments("fingerprint").reads(x);
  STD_TORCH_CHECK(x.is_contiguous(), "fingerprint: the numbers must lie next to each other");
  constexpr int64_t kPart = 1 << 17;
  const int64_t bytes = x.numel() * static_cast<int64_t>(x.element_size()), parts = quotient(bytes, kPart);
  const char* from = numbers_of<const char>(x);
  std::vector<uint64_t> sums(parts);
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      sums[part] = fingerprint_of(from + part * kPart, std::min(kPart, bytes - part * kPart));
    }
  });
  uint64_t total = 0;
  for (uint64_t sum : sums) add(total, sum);
  return static_cast<int64_t>(total);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("fingerprint", TORCH_BOX(&fingerprint)); }
