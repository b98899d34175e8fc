// A number of each row: one int64 for all of them, or one for each.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace fastgen {

struct OfRows {
  const int64_t* data;
  int64_t stride;

  static bool fits(const torch::stable::Tensor& x, int64_t rows) {
    return x.is_cpu() && x.scalar_type() == torch::headeronly::ScalarType::Long &&
           (x.numel() == 1 || (x.dim() == 1 && x.size(0) == rows));
  }
  explicit OfRows(const torch::stable::Tensor& x)
      : data(static_cast<const int64_t*>(x.const_data_ptr())), stride(x.numel() == 1 ? 0 : x.stride(0)) {}
  int64_t operator[](int64_t row) const { return data[row * stride]; }
};

}  // namespace fastgen
