// GEMM on packed weights with float activations: 16-bit weights, for the rows of a decode step, and weights quantised
// in groups. The schemas are defined in fastgen/ops/linear/__init__.py.
//
// A panel holds the outputs that are multiplied at the same time, for all inputs, in the order of their use. Its values
// are upcast to floats in the registers, exactly those of the unpacked weight, and each is multiplied with all rows of
// a tile. With few rows the only bottleneck is memory, which is read as a few streams, and with many rows
// multiply-adds. Rows are packed so that those of an input are adjacent. Each thread packs them for itself, because
// reading what another thread has just written takes long.
//
// The result is that of GEMM on the unpacked weight to the last bit, for any number of rows.
#include "packed.h"

#include <array>
#include <memory>
#include <utility>

namespace {

using namespace fastgen;

// Rows that are packed at a time: more would leave the cache before the next panel reads them again.
constexpr int64_t kRowsAtOnce = 224;

// Some rows of a GEMM, from `row` on: x as packed by `pack_rows`, with zeros after the inputs.
struct Work {
  const float* x;
  const Weight& weight;
  const Target& target;
  int64_t row, rows, inputs;
};

struct Kernel {
  int64_t width;
  void (*pack_rows)(const float* x, int64_t stride, int64_t rows, int64_t inputs, int64_t padded, float* to);
  void (*multiply)(const Work& work, int64_t begin, int64_t end);
};

#define FASTGEN_KERNELS "gemm/panels_kernels.h"
#include "../each_isa.h"

Kernel kernel() { return FASTGEN_CHOOSE(kKernel); }

bool is_16_bits(ScalarType type) { return type == ScalarType::BFloat16 || type == ScalarType::Half; }

// [outputs, inputs] -> [panels, pairs of inputs, 2 * outputs of a panel], with zeros after the last output and input. A
// pair is adjacent in bfloat16; in float16, the first ones of all outputs precede the second ones.
Tensor pack_panels(Tensor weight) {
  Arguments("pack_panels").reads(weight);
  STD_TORCH_CHECK(weight.dim() == 2 && is_16_bits(weight.scalar_type()) && are_inputs_adjacent(weight),
                  "pack_panels: the weight must be [outputs, inputs] of bfloat16 or float16, its inputs next to each other");
  const int64_t outputs = weight.size(0), inputs = weight.size(1), stride = weight.stride(0), width = kernel().width;
  const int64_t panels = quotient(outputs, width), pairs = quotient(inputs, 2);
  const bool is_half = weight.scalar_type() == ScalarType::Half;
  const int64_t next_input = is_half ? width : 1, next_output = is_half ? 1 : 2;
  Tensor packed = torch::stable::new_empty(weight, {panels, pairs, 2 * width});
  const uint16_t* from = numbers_of<const uint16_t>(weight);
  uint16_t* to = numbers_of<uint16_t>(packed);
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t valid = std::min(width, outputs - panel * width);
      uint16_t* at = to + panel * pairs * 2 * width;
      if (valid < width || inputs % 2 != 0) std::fill_n(at, pairs * 2 * width, uint16_t{0});
      for (int64_t k = 0; k < inputs; ++k) {
        uint16_t* line = at + k / 2 * 2 * width + k % 2 * next_input;
        for (int64_t n = 0; n < valid; ++n) line[n * next_output] = from[(panel * width + n) * stride + k];
      }
    }
  });
  return packed;
}

Product checked(const Tensor& y, const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias) {
  check_result("panels_gemm", y, x, bias);
  check_bias("panels_gemm", bias, y.size(1), !bias || bias->scalar_type() == ScalarType::Float);
  const int64_t width = kernel().width, pairs = quotient(x.size(1), 2);
  STD_TORCH_CHECK(is_16_bits(packed.scalar_type()) && packed.dim() == 3 && packed.is_contiguous() &&
                      packed.size(0) == quotient(y.size(1), width) && packed.size(1) == pairs && packed.size(2) == 2 * width,
                  "panels_gemm: the weight was not packed for this product");
  Weight weight{};
  weight.qweight = numbers_of<const uint8_t>(packed);
  weight.is_half = packed.scalar_type() == ScalarType::Half;
  weight.bits = 16;
  weight.panel_bytes = pairs * 2 * width * 2;
  return {weight, Target(y, bias)};
}

void panels_gemm_batch_out(Tensors results, Tensor x, Tensors packed, MaybeTensors biases) {
  check_batch("panels_gemm", results, x, packed, biases);
  check_x("panels_gemm", x, x.scalar_type() == ScalarType::Float);
  std::vector<Product> products;
  for (size_t i = 0; i < packed.size(); ++i) products.push_back(checked(results[i], x, packed[i], biases[i]));
  if (!products.empty()) multiply_floats(Rows(x, nullptr), products);
}

// Packs some rows, from `first` on, as floats in the order of the weight's inputs, with zeros after them.
void pack_rows(const Kernel& kernel, const Rows& x, int64_t first, int64_t rows, int64_t padded, float* to) {
  if (x.type == ScalarType::Float && x.order == nullptr) {
    return kernel.pack_rows(static_cast<const float*>(x.data) + first * x.stride, x.stride, rows, x.inputs, padded, to);
  }
  const std::unique_ptr<float[]> floats(new float[rows * x.inputs]);
  for (int64_t r = 0; r < rows; ++r) {
    read_line(x.data, (first + r) * x.stride, x.inputs, 1, x.order, x.type, floats.get() + r * x.inputs);
  }
  kernel.pack_rows(floats.get(), x.inputs, rows, x.inputs, padded, to);
}

}  // namespace

// The threads share the panels of all weights together.
void fastgen::multiply_floats(const Rows& x, const std::vector<Product>& products) {
  const Kernel kernel = ::kernel();
  const int64_t bits = products[0].weight.bits;
  const int64_t line = bits == 16 ? 2 : set_inputs(bits), width = bits == 16 ? kernel.width : kPanel;
  std::vector<int64_t> panels;
  int64_t all = 0;
  for (const Product& each : products) all += panels.emplace_back(quotient(each.target.outputs, width));
  if (x.rows == 0 || all == 0) return;
  const int64_t padded = quotient(x.inputs, line) * line, most = std::min(x.rows, kRowsAtOnce);
  parallel_for(0, all, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> packed(new float[most * padded]);  // uninitialised
    for (int64_t row = 0; row < x.rows; row += most) {
      const int64_t rows = std::min(most, x.rows - row);
      pack_rows(kernel, x, row, rows, padded, packed.get());
      for_each_part(panels, begin, end, [&](size_t i, int64_t from, int64_t to) {
        kernel.multiply({packed.get(), products[i].weight, products[i].target, row, rows, padded}, from, to);
      });
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("pack_panels", TORCH_BOX(&pack_panels));
  library.impl("panels_gemm_batch_out", FASTGEN_PLANNED(panels_gemm_batch_out));
}
