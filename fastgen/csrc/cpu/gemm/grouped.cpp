// GEMM on weights that are quantised to 4 to 8 bits in groups: the operators. The schemas are defined in
// fastgen/ops/linear/__init__.py. Activations stay floats (panels.cpp) or are quantised to 8 bits (int8.cpp).
#include "packed.h"

namespace {

using namespace fastgen;

// Checks the tensors of a packed weight, and combines them.
Weight checked(const Tensor& qweight, const Tensor& scales, const std::optional<Tensor>& zeros,
               const std::optional<Tensor>& mins, int64_t inputs, int64_t outputs, int64_t bits, int64_t group_size) {
  STD_TORCH_CHECK(are_bits(bits) && group_size >= 8 && group_size % 8 == 0 && group_size <= kMaxGroup &&
                      group_size % set_inputs(bits) == 0,
                  "grouped_linear: 4, 5, 6 or 8 bits, and groups of 8 to ", kMaxGroup,
                  " inputs: in eights, of 5 bits in 32s and of 6 bits in 16s");
  const int64_t groups = quotient(inputs, group_size), panels = quotient(outputs, kPanel);
  const int64_t factors_count = product_of("grouped_linear", panels, groups, kPanel);
  product_of("grouped_linear", factors_count, group_size);  // an upper bound of the packed weight's bytes
  const int64_t panel_bytes = groups * group_size * kPanel * bits / 8;
  const ScalarType type = scales.scalar_type();
  const bool in_blocks = type == ScalarType::Byte;
  const BlockLayout block =
      in_blocks && scales.dim() == 3 ? block_layout(scales.size(2)) : BlockLayout{1, false};
  const auto fits = [&](const Tensor& factors, ScalarType wanted) {
    return factors.scalar_type() == wanted && factors.is_contiguous() && factors.numel() == factors_count;
  };
  const bool fit = in_blocks ? block.groups > 1 && groups % block.groups == 0 && scales.is_contiguous() && !zeros && !mins &&
                                   scales.numel() == panels * groups / block.groups * block.bytes()
                             : (type == ScalarType::Half || type == ScalarType::Float) && fits(scales, type) &&
                                   !(zeros && mins) && (!zeros || fits(*zeros, ScalarType::Byte)) &&
                                   (!mins || fits(*mins, type));
  STD_TORCH_CHECK(qweight.scalar_type() == ScalarType::Byte && qweight.is_contiguous() &&
                      qweight.numel() == panels * panel_bytes && fit,
                  "grouped_linear: the weight was not packed for this product");
  const bool has_zero_point = !zeros && !mins && !(in_blocks && block.has_mins);
  return {numbers_of<const uint8_t>(qweight),
          zeros ? numbers_of<const uint8_t>(*zeros) : nullptr,
          scales.const_data_ptr(),
          mins ? mins->const_data_ptr() : nullptr,
          in_blocks ? numbers_of<const uint8_t>(scales) : nullptr,
          block,
          type == ScalarType::Half,
          has_zero_point ? 1 << (bits - 1) : 0,
          bits,
          group_size,
          groups,
          panel_bytes};
}

const int64_t* checked_order(const Tensor& x, const std::optional<Tensor>& order) {
  if (!order) return nullptr;
  STD_TORCH_CHECK(order->dim() == 1 && order->size(0) == x.size(1) && order->scalar_type() == ScalarType::Long &&
                      order->is_contiguous(),
                  "grouped_linear: the order must be [inputs] of int64");
  const int64_t* from = numbers_of<const int64_t>(*order);
  STD_TORCH_CHECK(std::all_of(from, from + x.size(1), [&](int64_t i) { return i >= 0 && i < x.size(1); }),
                  "grouped_linear: the order names inputs that are not there");
  return from;
}

// GEMMs with the same x and the same groups.
struct Products {
  Rows x;
  std::vector<Product> each;
};

Products products_of(const Tensors& results, const Tensor& x, const Tensors& qweights, const Tensors& scales,
                     const MaybeTensors& zeros, const MaybeTensors& mins, const std::optional<Tensor>& order,
                     const MaybeTensors& biases, int64_t bits, int64_t group_size, bool rotated, bool floats) {
  Arguments("grouped_linear").writes(results).reads(x, qweights, scales, zeros, mins, order, biases);
  const size_t count = results.size();
  STD_TORCH_CHECK(qweights.size() == count && scales.size() == count && zeros.size() == count && mins.size() == count &&
                      biases.size() == count,
                  "grouped_linear: as many parts of weights and biases as results");
  STD_TORCH_CHECK(!rotated || can_rotate(group_size),
                  "grouped_linear: rotated groups have 32, 64 or 128 inputs");
  check_x("grouped_linear", x, is_floating(x.scalar_type()));
  STD_TORCH_CHECK(!floats || (!rotated && group_size > 0 && kDepth % group_size == 0),
                  "grouped_linear: activations stay floats with groups that divide ", kDepth,
                  " inputs and are not rotated");
  Products products{Rows(x, checked_order(x, order)), {}};
  for (size_t i = 0; i < count; ++i) {
    const Tensor& y = results[i];
    check_result("grouped_linear", y, x, biases[i]);
    products.each.push_back({checked(qweights[i], scales[i], zeros[i], mins[i], x.size(1), y.size(1), bits, group_size),
                             Target(y, biases[i])});
  }
  return products;
}

// The addresses of tensors.
using Places = std::vector<const void*>;

void add_place(Places& to, const Tensor& tensor) { to.push_back(tensor.const_data_ptr()); }

void add_place(Places& to, const std::optional<Tensor>& tensor) {
  if (tensor) add_place(to, *tensor);
}

template <class One>
void add_place(Places& to, const std::vector<One>& tensors) {
  for (const One& each : tensors) add_place(to, each);
}

template <class... Some>
Places places_of(const Some&... tensors) {
  Places found;
  (add_place(found, tensors), ...);
  return found;
}

void grouped_linear_batch_out(Tensors results, Tensor x, Tensors qweights, Tensors scales, MaybeTensors zeros,
                              MaybeTensors mins, std::optional<Tensor> order, MaybeTensors biases, int64_t bits,
                              int64_t group_size, bool rotated, bool floats) {
  const auto made = [=] {
    return products_of(results, x, qweights, scales, zeros, mins, order, biases, bits, group_size, rotated, floats);
  };
  const auto run = [rotated, floats](const Products& products) {
    if (products.each.empty()) return;
    if (floats) return multiply_floats(products.x, products.each);
    multiply_int8(products.x, rotated, products.each);
  };
  if (!plan_is_open()) return run(made());
  const auto places = [=] { return places_of(results, x, qweights, scales, zeros, mins, biases); };
  // Resolves addresses once, and again after memory has moved. Checks the values of an order each time.
  const bool is_ordered = order.has_value();
  add_to_plan([made, run, places, is_ordered, products = made(), known = places()]() mutable {
    if (is_ordered || places() != known) products = made(), known = places();
    run(products);
  });
}

void grouped_linear_out(Tensor y, Tensor x, Tensor qweight, Tensor scales, std::optional<Tensor> zeros,
                        std::optional<Tensor> mins, std::optional<Tensor> order, std::optional<Tensor> bias, int64_t bits,
                        int64_t group_size, bool rotated, bool floats) {
  grouped_linear_batch_out({y}, x, {qweight}, {scales}, {zeros}, {mins}, order, {bias}, bits, group_size, rotated, floats);
}

Tensor grouped_linear(Tensor x, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, std::optional<Tensor> mins,
                      std::optional<Tensor> order, std::optional<Tensor> bias, int64_t outputs, int64_t bits,
                      int64_t group_size, bool rotated, bool floats) {
  STD_TORCH_CHECK(x.dim() == 2 && outputs > 0, "grouped_linear: x must be [rows, inputs]");
  Tensor y = torch::stable::new_empty(x, {x.size(0), outputs});
  grouped_linear_out(y, x, qweight, scales, zeros, mins, order, bias, bits, group_size, rotated, floats);
  return y;
}

// Returns rows of a weight, [n, inputs] in the type of `like`: those that `which`, [n] int64, names.
Tensor grouped_rows(Tensor like, Tensor which, Tensor qweight, Tensor scales, std::optional<Tensor> zeros,
                    std::optional<Tensor> mins, int64_t outputs, int64_t inputs, int64_t bits, int64_t group_size) {
  Arguments("grouped_rows").reads(like, which, qweight, scales, zeros, mins);
  const ScalarType type = like.scalar_type();
  STD_TORCH_CHECK(is_floating(type) && which.dim() == 1 && which.scalar_type() == ScalarType::Long &&
                      which.is_contiguous() && outputs > 0 && inputs > 0,
                  "grouped_rows: the rows must be [n] of int64, their type floating");
  const Weight weight = checked(qweight, scales, zeros, mins, inputs, outputs, bits, group_size);
  const int64_t count = which.size(0);
  const int64_t* from = numbers_of<const int64_t>(which);
  const auto read_half = [](const uint16_t* number) { return float16_to_float(*number); };
  Tensor y = torch::stable::new_empty(like, {count, inputs});
  void* to = y.mutable_data_ptr();
  for (int64_t r = 0; r < count; ++r) {
    const int64_t output = from[r];
    STD_TORCH_CHECK(output >= 0 && output < outputs, "grouped_rows: index out of range");
    const int64_t panel = output / kPanel, lane = output % kPanel;
    const uint8_t* words = weight.qweight + panel * weight.panel_bytes + lane * 4;
    for (int64_t i = 0; i < inputs; ++i) {
      const int64_t at = (panel * weight.groups + i / group_size) * kPanel + lane;
      const int value = value_of(words, bits, i);
      const int zero = weight.zeros != nullptr ? weight.zeros[at] : weight.zero_point;
      float scale, least = 0.0f;
      if (weight.block_scales != nullptr) {
        const BlockScale of = block_scale(weight, at);
        scale = read_half(of.unit) * static_cast<float>(of.scale[0] - (weight.block.has_mins ? 0 : kSignedZero));
        if (weight.block.has_mins) least = read_half(of.unit + kPanel) * of.scale[kPanel];
      } else {
        scale = read(weight.scales, at, scales.scalar_type());
        if (weight.mins != nullptr) least = read(weight.mins, at, scales.scalar_type());
      }
      write(to, r * inputs + i, type, scale * static_cast<float>(value - zero) + least);
    }
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("grouped_rows", TORCH_BOX(&grouped_rows));
  library.impl("grouped_linear", TORCH_BOX(&grouped_linear));
  library.impl("grouped_linear_out", TORCH_BOX(&grouped_linear_out));
  library.impl("grouped_linear_batch_out", TORCH_BOX(&grouped_linear_batch_out));
}
