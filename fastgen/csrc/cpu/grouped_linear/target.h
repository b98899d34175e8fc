// Where the results of a product with a weight in groups go.
#pragma once

#include "products.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fastgen {

class Target {
 public:
  explicit Target(const Result& result) : to_(result.data), outputs_(result.outputs), type_(result.type) {
    if (result.bias == nullptr) return;
    bias_.resize((outputs_ + kPanel - 1) / kPanel * kPanel);
    for (int64_t i = 0; i < outputs_; ++i) bias_[i] = read(result.bias, i, result.bias_type);
  }

  // The bias of some outputs of a panel, from `first` on, or zeros.
  const float* bias(int64_t first) const {
    static constexpr float kNothing[kPanel] = {};
    return bias_.empty() ? kNothing : bias_.data() + first;
  }

  // `count` outputs of some rows, from `first` on, which need not be all there: the sums of a row lie `stride` behind those of
  // the row before. With kBias it is added.
  template <bool kBias>
  void store(int64_t first, int64_t count, const float* sums, int64_t stride, int64_t row, int64_t rows) const {
    const int64_t there = std::min(count, outputs_ - first);
    const float* added = bias(first);
    for (int64_t r = 0; r < rows; ++r, sums += stride) {
      const int64_t at = (row + r) * outputs_ + first;
      if (type_ != ScalarType::Float) {
        for (int64_t i = 0; i < there; ++i) write(to_, at + i, type_, kBias ? sums[i] + added[i] : sums[i]);
      } else if (!kBias && there == count) {
        std::memcpy(static_cast<float*>(to_) + at, sums, count * sizeof(float));
      } else if (there == kPanel) {  // a number that the compiler knows
        float* line = static_cast<float*>(to_) + at;
        for (int64_t i = 0; i < kPanel; ++i) line[i] = kBias ? sums[i] + added[i] : sums[i];
      } else {
        float* line = static_cast<float*>(to_) + at;
        for (int64_t i = 0; i < there; ++i) line[i] = kBias ? sums[i] + added[i] : sums[i];
      }
    }
  }

 private:
  void* to_;
  int64_t outputs_;
  ScalarType type_;
  std::vector<float> bias_;
};

}  // namespace fastgen
