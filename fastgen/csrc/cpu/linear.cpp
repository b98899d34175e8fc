// Linear layers on weights packed into panels, for the few rows of a decoding step. The schemas are defined in
// fastgen/ops/linear.py.
//
// With few rows the product is bound by reading the weight. A panel holds some outputs of all inputs, in the order in
// which they are used: it is read as one stream, asked for ahead of time, while the tiles of rows multiply what has
// arrived (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 2008, with the packing
// of the weight done once).
#include "instruction_set.h"

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

// Inputs that are multiplied in one go: of a panel, what the second-level cache holds with room to spare.
constexpr int64_t kDepth = 256;
constexpr int64_t kLine = 16;  // floats of a cache line
// Rows that a thread takes through its panels before it goes on, at most, and what of their inputs it takes at a time, in
// floats: that stays in the second-level cache, while every panel comes from farther away once per block.
constexpr int64_t kBlock = 192;
constexpr int64_t kResident = 196608;

namespace portable {
#define FASTGEN_TARGET
#define FASTGEN_WIDTH 4
#define FASTGEN_VECTORS 4
#define FASTGEN_ROWS 4
#include "linear/tiles.h"
}  // namespace portable

#ifdef FASTGEN_X86
namespace avx2 {
#define FASTGEN_TARGET __attribute__((target("avx2,fma")))
#define FASTGEN_WIDTH 8
#define FASTGEN_VECTORS 2
#define FASTGEN_ROWS 6
#include "linear/tiles.h"
}  // namespace avx2

namespace avx512 {
#define FASTGEN_TARGET __attribute__((target("avx512f,fma")))
#define FASTGEN_WIDTH 16
#define FASTGEN_VECTORS 3
#define FASTGEN_ROWS 8
#include "linear/tiles.h"
}  // namespace avx512
#endif

using Multiply = void (*)(const float*, int64_t, int64_t, const float*, int64_t, const float*, float*, int64_t,
                          const float*);

struct Kernel {
  int64_t panel;  // outputs of a panel
  Multiply multiply;
};

Kernel kernel() {
#ifdef FASTGEN_X86
  switch (fastgen::instruction_set()) {
    case fastgen::InstructionSet::kAvx512: return {avx512::kPanel, &avx512::multiply};
    case fastgen::InstructionSet::kAvx2: return {avx2::kPanel, &avx2::multiply};
    case fastgen::InstructionSet::kPortable: break;
  }
#endif
  return {portable::kPanel, &portable::multiply};
}

// [outputs, inputs] -> [panels, inputs, outputs of a panel], padded with zeros.
Tensor pack_linear(Tensor weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::Float,
                  "pack_linear: the weight must be [outputs, inputs] of float32");
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const int64_t output_stride = weight.stride(0), input_stride = weight.stride(1);
  const int64_t width = kernel().panel, panels = (outputs + width - 1) / width;
  Tensor packed = torch::stable::new_empty(weight, {panels, inputs, width});
  const float* from = static_cast<const float*>(weight.const_data_ptr());
  float* to = static_cast<float*>(packed.mutable_data_ptr());
  torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    // Some inputs at a time: as many as are next to each other in a cache line.
    constexpr int64_t kSome = 16;
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t valid = std::min(width, outputs - panel * width);
      const float* first = from + panel * width * output_stride;
      float* out = to + panel * width * inputs;
      for (int64_t k = 0; k < inputs; k += kSome) {
        const int64_t last = std::min(k + kSome, inputs);
        if (input_stride == 1) {
          for (int64_t n = 0; n < valid; ++n) {
            for (int64_t i = k; i < last; ++i) out[i * width + n] = first[n * output_stride + i];
          }
        } else {
          for (int64_t i = k; i < last; ++i) {
            for (int64_t n = 0; n < valid; ++n) out[i * width + n] = first[n * output_stride + i * input_stride];
          }
        }
        for (int64_t i = k; i < last; ++i) std::fill(out + i * width + valid, out + (i + 1) * width, 0.0f);
      }
    }
  });
  return packed;
}

void check(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.size(1) > 0 &&
                      (x.stride(1) == 1 || x.size(1) == 1),
                  "packed_linear: x must be [rows, inputs] of float32, with the inputs next to each other");
  STD_TORCH_CHECK(packed.dim() == 3 && packed.scalar_type() == ScalarType::Float && packed.is_contiguous() &&
                      packed.size(2) == kernel().panel && packed.size(1) == x.size(1) && outputs > 0 &&
                      packed.size(0) == (outputs + kernel().panel - 1) / kernel().panel,
                  "packed_linear: the weight was not packed for this product");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == outputs && bias->is_contiguous() &&
                            bias->scalar_type() == ScalarType::Float),
                  "packed_linear: the bias must be [outputs] of float32");
}

Tensor packed_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t outputs) {
  check(x, packed, bias, outputs);
  const int64_t rows = x.size(0), inputs = x.size(1), panels = packed.size(0), width = kernel().panel;
  Tensor y = torch::stable::new_empty(x, {rows, outputs});
  const float* in = static_cast<const float*>(x.const_data_ptr());
  const float* weights = static_cast<const float*>(packed.const_data_ptr());
  const float* biases = bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  float* out = static_cast<float*>(y.mutable_data_ptr());
  const int64_t blocks = (rows + kBlock - 1) / kBlock, stride = x.stride(0);
  const Multiply multiply = kernel().multiply;

  struct Scratch {
    std::vector<float> start, rest;  // of a panel: what its sums are added to, and what does not fit into the result
  };
  // `some` rows from `row` on times `depth` inputs from `k` on of a panel, added to what the inputs before gave.
  const auto multiply_panel = [&](int64_t panel, int64_t row, int64_t some, int64_t k, int64_t depth, Scratch& scratch) {
    const int64_t valid = std::min(width, outputs - panel * width);
    const float *source = in + row * stride + k, *weight = weights + (panel * inputs + k) * width, *first = nullptr;
    if (k == 0) {
      first = scratch.start.data();
      for (int64_t n = 0; n < width; ++n) scratch.start[n] = biases && n < valid ? biases[panel * width + n] : 0.0f;
    }
    float* target = out + row * outputs + panel * width;
    if (valid == width) {
      multiply(source, stride, some, weight, depth, first, target, outputs, weight + inputs * width);
      return;
    }
    // The last panel is wider than what is left of the result.
    scratch.rest.resize(some * width);
    multiply(source, stride, some, weight, depth, first, scratch.rest.data(), width, weight);
    if (k + depth < inputs) return;
    for (int64_t r = 0; r < some; ++r) std::copy_n(&scratch.rest[r * width], valid, target + r * outputs);
  };

  // Blocks are of nearly the same size, and a thread takes some panels of every block: each has as much to do, and
  // reads a part of the weight only. Task i is block i % blocks of panel i / blocks.
  torch::stable::parallel_for(0, panels * blocks, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch{std::vector<float>(width), {}};
    const auto from = [&](int64_t task, int64_t block) { return (task - block + blocks - 1) / blocks; };
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, some = rows * (block + 1) / blocks - row;
      const int64_t chunk = std::max(kResident / some / kDepth, int64_t{1}) * kDepth;
      for (int64_t k = 0; k < inputs; k += chunk) {
        const int64_t depth = std::min(chunk, inputs - k);
        for (int64_t panel = from(begin, block); panel < from(end, block); ++panel) {
          multiply_panel(panel, row, some, k, depth, scratch);
        }
      }
    }
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("pack_linear", TORCH_BOX(&pack_linear));
  library.impl("packed_linear", TORCH_BOX(&packed_linear));
}

#endif
