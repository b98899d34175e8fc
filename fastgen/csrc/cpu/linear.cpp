// Linear layers for the few rows of a decoding step. The schemas are defined in fastgen/ops/linear.py.
//
// With few rows the product is bound by reading the weight. A panel holds some outputs of all inputs, in the order in
// which they are used: it is read as one stream, asked for ahead of time, while the tiles of rows multiply what has
// arrived (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 2008, with the packing
// of the weight done once: `packed_linear`). Where the weight is left as it is, a piece of a panel at a time is laid out
// in the cache and multiplied from there, while the next piece is asked for (`streamed_linear`): the result is the same
// to the last bit, and the work of laying it out mostly takes place while memory is waited for.
#include "instruction_set.h"
#include "transpose.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#ifdef __GNUC__  // vectors as a language extension: gcc and clang

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Inputs that are multiplied in one go: of a panel, what easily fits into the second-level cache.
constexpr int64_t kDepth = 256;
constexpr int64_t kLine = 16;  // floats of a cache line
// Rows that a thread takes through its panels before it goes on, at most, and what of their inputs it takes at a time, in
// floats: that stays in the second-level cache, while every panel comes from farther away once per block.
constexpr int64_t kBlock = 192;
constexpr int64_t kResident = 196608;

// [inputs, outputs] of a weight, wherever it lies: the first of it, and how far apart two of its inputs and outputs are.
struct Piece {
  const float* first;
  int64_t output, input;
};

// The cache lines of a piece in the order in which they are asked for: for input k, some of `line` floats apart, from
// first + k / kLine * group + k % kLine * input on.
struct Lines {
  const float* first;
  int64_t group, input, line;
};

namespace portable {
#define FASTGEN_TARGET
#define FASTGEN_WIDTH 4
#define FASTGEN_VECTORS 4
#define FASTGEN_ROWS 4
#define FASTGEN_TRANSPOSE fastgen::transpose4
#include "linear/tiles.h"
}  // namespace portable

#ifdef FASTGEN_X86
namespace avx2 {
#define FASTGEN_TARGET __attribute__((target("avx2,fma")))
#define FASTGEN_WIDTH 8
#define FASTGEN_VECTORS 2
#define FASTGEN_ROWS 6
#define FASTGEN_TRANSPOSE fastgen::transpose8
#include "linear/tiles.h"
}  // namespace avx2

namespace avx512 {
#define FASTGEN_TARGET __attribute__((target("avx512f,fma")))
#define FASTGEN_WIDTH 16
#define FASTGEN_VECTORS 3
#define FASTGEN_ROWS 8
#define FASTGEN_TRANSPOSE fastgen::transpose16
#include "linear/tiles.h"
}  // namespace avx512
#endif

using Multiply = void (*)(const float*, int64_t, int64_t, const float*, int64_t, const float*, float*, int64_t,
                          const Piece&);
using LayOut = void (*)(const Piece&, int64_t, int64_t, float*);

struct Kernel {
  int64_t panel;  // outputs of a panel
  Multiply multiply;
  LayOut lay_out;
};

Kernel kernel() {
#ifdef FASTGEN_X86
  switch (fastgen::instruction_set()) {
    case fastgen::InstructionSet::kAvx512: return {avx512::kPanel, &avx512::multiply, &avx512::lay_out};
    case fastgen::InstructionSet::kAvx2: return {avx2::kPanel, &avx2::multiply, &avx2::lay_out};
    case fastgen::InstructionSet::kPortable: break;
  }
#endif
  return {portable::kPanel, &portable::multiply, &portable::lay_out};
}

int64_t panels_of(int64_t outputs) { return (outputs + kernel().panel - 1) / kernel().panel; }

void check_weight(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::Float,
                  "the weight of a linear layer must be [outputs, inputs] of float32");
}

// [outputs, inputs] -> [panels, inputs, outputs of a panel], padded with zeros.
Tensor pack_linear(Tensor weight) {
  check_weight(weight);
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const int64_t output_stride = weight.stride(0), input_stride = weight.stride(1);
  const int64_t width = kernel().panel;
  const LayOut lay_out = kernel().lay_out;
  Tensor packed = torch::stable::new_empty(weight, {panels_of(outputs), inputs, width});
  const float* from = static_cast<const float*>(weight.const_data_ptr());
  float* to = static_cast<float*>(packed.mutable_data_ptr());
  torch::stable::parallel_for(0, panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * width;
      lay_out({from + first * output_stride, output_stride, input_stride}, std::min(width, outputs - first), inputs,
              to + first * inputs);
    }
  });
  return packed;
}

// A product's input and result, and one panel of it.
class Product {
 public:
  Product(const Tensor& x, const std::optional<Tensor>& bias, int64_t outputs, const Tensor& result)
      : rows(x.size(0)),
        inputs(x.size(1)),
        outputs(outputs),
        in_(static_cast<const float*>(x.const_data_ptr())),
        stride_(x.stride(0)),
        bias_(bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr),
        out_(static_cast<float*>(result.mutable_data_ptr())),
        kernel_(kernel()) {}

  // What a thread needs of its own: of a panel, what its sums are added to, and what does not fit into the result.
  struct Scratch {
    std::vector<float> start, rest;
  };

  int64_t width() const { return kernel_.panel; }
  int64_t valid(int64_t panel) const { return std::min(width(), outputs - panel * width()); }

  // `some` rows from `row` on times `depth` inputs from `k` on of a panel, added to what the inputs before gave.
  void multiply(int64_t panel, int64_t row, int64_t some, int64_t k, int64_t depth, const float* weight,
                const Piece& after, Scratch& scratch) const {
    const float *source = in_ + row * stride_ + k, *first = nullptr;
    if (k == 0) {
      scratch.start.assign(width(), 0.0f);
      if (bias_ != nullptr) std::copy_n(bias_ + panel * width(), valid(panel), scratch.start.data());
      first = scratch.start.data();
    }
    float* target = out_ + row * outputs + panel * width();
    if (valid(panel) == width()) {
      kernel_.multiply(source, stride_, some, weight, depth, first, target, outputs, after);
      return;
    }
    // The last panel is wider than what is left of the result.
    scratch.rest.resize(some * width());
    kernel_.multiply(source, stride_, some, weight, depth, first, scratch.rest.data(), width(), {weight, 1, width()});
    if (k + depth < inputs) return;
    for (int64_t r = 0; r < some; ++r) std::copy_n(&scratch.rest[r * width()], valid(panel), target + r * outputs);
  }

  const int64_t rows, inputs, outputs;

 private:
  const float* in_;
  int64_t stride_;
  const float* bias_;
  float* out_;
  Kernel kernel_;
};

void check_input(const Tensor& x, const std::optional<Tensor>& bias, int64_t outputs) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.size(1) > 0 &&
                      (x.stride(1) == 1 || x.size(1) == 1),
                  "a linear layer: x must be [rows, inputs] of float32, with the inputs next to each other");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == outputs && bias->is_contiguous() &&
                            bias->scalar_type() == ScalarType::Float),
                  "a linear layer: the bias must be [outputs] of float32");
}

Tensor packed_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t outputs) {
  check_input(x, bias, outputs);
  STD_TORCH_CHECK(packed.dim() == 3 && packed.scalar_type() == ScalarType::Float && packed.is_contiguous() &&
                      packed.size(2) == kernel().panel && packed.size(1) == x.size(1) && outputs > 0 &&
                      packed.size(0) == panels_of(outputs),
                  "packed_linear: the weight was not packed for this product");
  Tensor result = torch::stable::new_empty(x, {x.size(0), outputs});
  const Product product(x, bias, outputs, result);
  const int64_t rows = product.rows, inputs = product.inputs, width = product.width();
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
  const float* weights = static_cast<const float*>(packed.const_data_ptr());

  // Blocks are of nearly the same size, and a thread takes some panels of every block: each has as much to do, and
  // reads a part of the weight only. Task i is block i % blocks of panel i / blocks.
  torch::stable::parallel_for(0, packed.size(0) * blocks, 1, [&](int64_t begin, int64_t end) {
    Product::Scratch scratch;
    const auto from = [&](int64_t task, int64_t block) { return (task - block + blocks - 1) / blocks; };
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, some = rows * (block + 1) / blocks - row;
      const int64_t chunk = std::max(kResident / some / kDepth, int64_t{1}) * kDepth;
      for (int64_t k = 0; k < inputs; k += chunk) {
        const int64_t depth = std::min(chunk, inputs - k);
        for (int64_t panel = from(begin, block); panel < from(end, block); ++panel) {
          const float* weight = weights + (panel * inputs + k) * width;
          product.multiply(panel, row, some, k, depth, weight, {weight + inputs * width, 1, width}, scratch);
        }
      }
    }
  });
  return result;
}

void streamed_linear_out(Tensor result, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  check_weight(weight);
  const int64_t outputs = weight.size(0);
  check_input(x, bias, outputs);
  STD_TORCH_CHECK(weight.size(1) == x.size(1), "streamed_linear: x must have as many inputs as the weight");
  STD_TORCH_CHECK(result.dim() == 2 && result.size(0) == x.size(0) && result.size(1) == outputs &&
                      result.is_contiguous() && result.scalar_type() == ScalarType::Float,
                  "streamed_linear: the result must be [rows, outputs] of float32");
  const Product product(x, bias, outputs, result);
  const int64_t rows = product.rows, inputs = product.inputs, width = product.width();
  const int64_t blocks = (rows + kBlock - 1) / kBlock, output_stride = weight.stride(0), input_stride = weight.stride(1);
  const float* weights = static_cast<const float*>(weight.const_data_ptr());
  const LayOut lay_out = kernel().lay_out;
  const auto piece = [&](int64_t panel, int64_t k) {
    return Piece{weights + panel * width * output_stride + k * input_stride, output_stride, input_stride};
  };
  // Panels one after the other where an output's inputs are next to each other, else what is next to each other of all
  // panels: so memory is read in the order in which it lies.
  const bool by_panel = input_stride == 1;

  torch::stable::parallel_for(0, panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
    Product::Scratch scratch;
    std::vector<float> laid_out(kDepth * width);
    const int64_t panels = end - begin, depths = (inputs + kDepth - 1) / kDepth;
    const auto panel_of = [&](int64_t i) { return begin + (by_panel ? i / depths : i % panels); };
    const auto input_of = [&](int64_t i) { return (by_panel ? i % depths : i / panels) * kDepth; };
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, some = rows * (block + 1) / blocks - row;
      for (int64_t i = 0; i < panels * depths; ++i) {
        const int64_t panel = panel_of(i), k = input_of(i), depth = std::min(kDepth, inputs - k);
        const int64_t next = i + 1 < panels * depths ? i + 1 : 0;
        lay_out(piece(panel, k), product.valid(panel), depth, laid_out.data());
        product.multiply(panel, row, some, k, depth, laid_out.data(), piece(panel_of(next), input_of(next)), scratch);
      }
    }
  });
}

Tensor streamed_linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  check_weight(weight);
  STD_TORCH_CHECK(x.dim() == 2, "a linear layer: x must be [rows, inputs]");
  Tensor result = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
  streamed_linear_out(result, x, weight, bias);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("pack_linear", TORCH_BOX(&pack_linear));
  library.impl("packed_linear", TORCH_BOX(&packed_linear));
  library.impl("streamed_linear", TORCH_BOX(&streamed_linear));
  library.impl("streamed_linear_out", TORCH_BOX(&streamed_linear_out));
}

#endif
