// Products of grouped_linear.cpp as its operators get them: checked, with where everything lies.
#pragma once
#include "../checks.h"
#include "../linear/depth.h"
#include "lines.h"
#include "rounded_rows.h"
#include "rows.h"

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace fastgen {

using torch::stable::Tensor;

// Scales, and minimums where there are some, that are bytes times a number in float16 for each block, which is some groups in a
// row. In a panel, a block has the numbers of its scales, those of its minimums, and then the bytes of each group in that order.
// Without minimums, a byte stands for itself less `kSignedMiddle`.
constexpr int kSignedMiddle = 128;
struct BlockLayout {
  int64_t groups;
  bool has_minimums;

  int64_t unit_bytes() const { return (has_minimums ? 2 : 1) * 2 * kPanel; }
  int64_t group_bytes() const { return (has_minimums ? 2 : 1) * kPanel; }
  int64_t bytes() const { return unit_bytes() + groups * group_bytes(); }
};
// Those of GGUF: Q4_K and Q5_K, Q2_K, and Q3_K and Q6_K. Their sizes tell them apart.
constexpr BlockLayout kBlockLayouts[] = {{8, true}, {16, true}, {16, false}};

struct Weight {
  const uint8_t *numbers, *zeros;
  const void *scales, *minimums;  // float16 or float32
  const uint8_t* multiples;       // of scales and minimums, in place of these; else null
  BlockLayout block;              // of these
  bool are_half;
  int32_t middle;  // the number that stands for 0, if neither zeros nor minimums are given
  int64_t bits, group_size, groups, panel_bytes, outputs;

  bool has_minimums() const { return multiples != nullptr ? block.has_minimums : minimums != nullptr; }
};

// Where the multiples of an output are, of which there are kPanel for each group of each panel.
struct Place {
  const uint16_t* unit;  // of the scale; that of the minimum is kPanel numbers behind it
  const uint8_t* scale;  // and so is the minimum
};

inline Place place(const Weight& weight, int64_t at) {
  const uint64_t group = static_cast<uint64_t>(at) / kPanel, lane = static_cast<uint64_t>(at) % kPanel;
  const int shift = weight.block.groups == 8 ? 3 : 4;
  const uint8_t* block = weight.multiples + (group >> shift) * weight.block.bytes();
  const uint64_t in_block = group & (weight.block.groups - 1);
  return {reinterpret_cast<const uint16_t*>(block) + lane,
          block + weight.block.unit_bytes() + in_block * weight.block.group_bytes() + lane};
}

// A packed weight as the operators get it, with its checks.
struct Packed {
  Tensor numbers, scales;
  std::optional<Tensor> zeros, minimums;

  Weight weight(int64_t inputs, int64_t outputs, int64_t bits, int64_t group_size) const {
    STD_TORCH_CHECK(are_bits(bits) && group_size >= 8 && group_size % 8 == 0 && group_size <= kMaxGroup &&
                        group_size % set_inputs(bits) == 0,
                    "grouped_linear: 4, 5, 6 or 8 bits, and groups of 8 to ", kMaxGroup,
                    " inputs: in eights, of 5 bits in 32s and of 6 bits in 16s");
    const int64_t groups = quotient(inputs, group_size), panels = quotient(outputs, kPanel);
    const int64_t factors_count = product_of("grouped_linear", panels, groups, kPanel);
    product_of("grouped_linear", factors_count, group_size);  // of which a packed weight has at most as many bytes
    const int64_t panel_bytes = groups * group_size * kPanel * bits / 8;
    const ScalarType type = scales.scalar_type();
    const bool are_multiples = type == ScalarType::Byte;
    const BlockLayout block = are_multiples && scales.dim() == 3 ? block_of(scales.size(2)) : BlockLayout{1, false};
    const auto fits = [&](const Tensor& factors, ScalarType wanted) {
      return factors.scalar_type() == wanted && factors.is_contiguous() && factors.numel() == factors_count;
    };
    const bool fit = are_multiples ? block.groups > 1 && groups % block.groups == 0 && scales.is_contiguous() && !zeros &&
                                         !minimums && scales.numel() == panels * groups / block.groups * block.bytes()
                                   : (type == ScalarType::Half || type == ScalarType::Float) && fits(scales, type) &&
                                         !(zeros && minimums) && (!zeros || fits(*zeros, ScalarType::Byte)) &&
                                         (!minimums || fits(*minimums, type));
    STD_TORCH_CHECK(numbers.scalar_type() == ScalarType::Byte && numbers.is_contiguous() &&
                        numbers.numel() == panels * panel_bytes && fit,
                    "grouped_linear: the weight was not packed for this product");
    const bool has_middle = !zeros && !minimums && !(are_multiples && block.has_minimums);
    return {static_cast<const uint8_t*>(numbers.const_data_ptr()),
            zeros ? static_cast<const uint8_t*>(zeros->const_data_ptr()) : nullptr,
            scales.const_data_ptr(),
            minimums ? minimums->const_data_ptr() : nullptr,
            are_multiples ? static_cast<const uint8_t*>(scales.const_data_ptr()) : nullptr,
            block,
            type == ScalarType::Half,
            has_middle ? 1 << (bits - 1) : 0,
            bits,
            group_size,
            groups,
            panel_bytes,
            outputs};
  }

 private:
  static BlockLayout block_of(int64_t bytes) {
    for (const BlockLayout& each : kBlockLayouts) {
      if (each.bytes() == bytes) return each;
    }
    return {1, false};
  }
};

inline void check_input(const Tensor& x, const std::optional<Tensor>& order, int64_t group_size, bool rotated) {
  STD_TORCH_CHECK(!rotated || can_rotate(group_size),
                  "grouped_linear: rotated groups have 32, 64 or 128 inputs");
  STD_TORCH_CHECK(x.dim() == 2 && is_floating(x.scalar_type()) && x.size(1) > 0 && (x.stride(1) == 1 || x.size(1) == 1),
                  "grouped_linear: x must be [rows, inputs] of a floating type, with the inputs next to each other");
  if (!order) return;
  STD_TORCH_CHECK(order->dim() == 1 && order->size(0) == x.size(1) && order->scalar_type() == ScalarType::Long &&
                      order->is_contiguous(),
                  "grouped_linear: the order must be [inputs] of int64");
  const int64_t* from = static_cast<const int64_t*>(order->const_data_ptr());
  STD_TORCH_CHECK(std::all_of(from, from + x.size(1), [&](int64_t i) { return i >= 0 && i < x.size(1); }),
                  "grouped_linear: the order names inputs that are not there");
}

inline void check_result(const Tensor& y, const Tensor& x, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(y.dim() == 2 && y.size(0) == x.size(0) && y.is_contiguous() && y.scalar_type() == x.scalar_type(),
                  "grouped_linear: the result must be [rows, outputs] of the type of x");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == y.size(1) && bias->is_contiguous() &&
                            is_floating(bias->scalar_type())),
                  "grouped_linear: the bias must be [outputs] of a floating type");
}

// Where a result goes, [rows, outputs], and the bias, which may be null.
struct Result {
  void* data;
  const void* bias;
  ScalarType type, bias_type;
  int64_t outputs;
};

// A product, when its weight and its result have been checked.
struct Product {
  Weight weight;
  Result result;
};

// Products with the same x and the same groups. x is rounded to 8 bits, or stays floats.
struct Products {
  Rows x;
  int64_t group_size;
  bool rotated, floats;
  std::vector<Product> each;

  Products(const std::vector<Tensor>& results, const Tensor& x, const std::vector<Tensor>& numbers,
           const std::vector<Tensor>& scales, const std::vector<std::optional<Tensor>>& zeros,
           const std::vector<std::optional<Tensor>>& minimums, const std::optional<Tensor>& order,
           const std::vector<std::optional<Tensor>>& biases, int64_t bits, int64_t group_size, bool rotated,
           bool floats)
      : group_size(group_size), rotated(rotated), floats(floats) {
    Arguments("grouped_linear").writes(results).reads(x, numbers, scales, zeros, minimums, order, biases);
    const size_t count = results.size();
    STD_TORCH_CHECK(numbers.size() == count && scales.size() == count && zeros.size() == count &&
                        minimums.size() == count && biases.size() == count,
                    "grouped_linear: as many parts of weights and biases as results");
    check_input(x, order, group_size, rotated);
    STD_TORCH_CHECK(!floats || (!rotated && group_size > 0 && kDepth % group_size == 0),
                    "grouped_linear: activations stay floats with groups that divide ", kDepth,
                    " inputs and are not rotated");
    const int64_t* from = order ? static_cast<const int64_t*>(order->const_data_ptr()) : nullptr;
    this->x = {x.const_data_ptr(), from, x.scalar_type(), x.size(0), x.size(1), x.stride(0)};
    for (size_t i = 0; i < count; ++i) {
      const Tensor& y = results[i];
      const std::optional<Tensor>& bias = biases[i];
      check_result(y, x, bias);
      const Packed packed{numbers[i], scales[i], zeros[i], minimums[i]};
      each.push_back({packed.weight(x.size(1), y.size(1), bits, group_size),
                      {y.mutable_data_ptr(), bias ? bias->const_data_ptr() : nullptr, y.scalar_type(),
                       bias ? bias->scalar_type() : ScalarType::Float, y.size(1)}});
    }
  }
};

// All of them with float activations (cpu/narrow_groups.cpp).
void multiply_floats(const Products& products);

}  // namespace fastgen
