// Single results of gemv_out (gemv.cpp).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace fastgen {

// The results of gemv_out for a row and `count` outputs, to the last bit. The arguments must be those of such a product in
// float32, of which the inputs of the weight are next to each other.
void gemv_of_outputs(const torch::stable::Tensor& x, int64_t row, const torch::stable::Tensor& weight,
                     const std::optional<torch::stable::Tensor>& bias, const int64_t* outputs, int64_t count, float* y);

}  // namespace fastgen
