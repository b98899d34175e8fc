// GEMM in float32 on the unpacked weight. The schemas are defined in fastgen/ops/linear/kernels.py.
//
// If a weight's inputs are contiguous, the rows of x are packed, which are smaller: several rows side by side in a
// vector, which is multiplied by one element of a weight row after the other. With many rows, and if a weight's outputs
// are contiguous, a piece of a panel at a time is packed in the cache and multiplied from there, while the next piece
// is prefetched (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 2008). Either way
// an output is summed in the same order: the result has the same bits.
#include "../isa.h"
#include "operands.h"

#include <array>
#include <utility>

namespace {

using namespace fastgen;
using Operands = fastgen::Operands<float>;

constexpr int64_t kLine = 16;  // floats of a cache line
// From kManyRows rows on, packing pieces of the weight takes less time than packing the rows. At most kMostRows are
// multiplied with a piece at a time: their results stay in the cache.
constexpr int64_t kManyRows = 129, kMostRows = 1024;

// [inputs, outputs] of a weight with any strides: its first element, and the strides of outputs and inputs.
struct Piece {
  const float* first;
  int64_t output, input;
};

// The cache lines of a piece in the order of prefetching: for input k, lines that are `line` floats apart, from
// first + k / kLine * group + k % kLine * input on.
struct Lines {
  const float* first;
  int64_t group, input, line;
};

struct Kernel {
  int64_t panel;  // outputs of a panel
  void (*multiply)(const float*, int64_t, int64_t, const float*, int64_t, const float*, float*, int64_t, const Piece&);
  void (*pack_piece)(const Piece&, int64_t valid, int64_t depth, int64_t width, float* to);
  int64_t width;  // `multiply_rows` gets a multiple of this many outputs, except for the last ones
  int64_t (*floats_of_rows)(int64_t rows, int64_t inputs);
  void (*pack_rows)(const float*, int64_t, int64_t, int64_t, float*);
  void (*multiply_rows)(const Operands& product, int64_t begin, int64_t end);
};

#define FASTGEN_KERNELS "gemm/gemm_kernels.h"
#include "../each_isa.h"

Kernel kernel() { return FASTGEN_CHOOSE(kKernel); }

// A GEMM that is computed panel by panel.
class PanelProduct {
 public:
  PanelProduct(const Operands& operands, int64_t width)
      : operands_(operands), width_(width), multiply_(kernel().multiply) {}

  // A thread's own memory for a panel: the initial values of its sums, and the results that do not fit into y.
  struct Scratch {
    std::vector<float> start, rest;
  };

  int64_t valid(int64_t panel) const { return std::min(width_, operands_.outputs - panel * width_); }

  // Multiplies `some` rows from `row` on with `depth` inputs from `k` on of a panel, and adds to the sums so far.
  void multiply(int64_t panel, int64_t row, int64_t some, int64_t k, int64_t depth, const float* weight,
                const Piece& after, Scratch& scratch) const {
    const Operands& own = operands_;
    const float *source = own.x + row * own.x_stride + k, *first = nullptr;
    if (k == 0) {
      scratch.start.assign(width_, 0.0f);
      if (own.bias != nullptr) std::copy_n(own.bias + panel * width_, valid(panel), scratch.start.data());
      first = scratch.start.data();
    }
    float* target = own.y + row * own.outputs + panel * width_;
    if (valid(panel) == width_) {
      multiply_(source, own.x_stride, some, weight, depth, first, target, own.outputs, after);
      return;
    }
    // The last panel is wider than the rest of the result.
    scratch.rest.resize(some * width_);
    multiply_(source, own.x_stride, some, weight, depth, first, scratch.rest.data(), width_, {weight, 1, width_});
    if (k + depth < own.inputs) return;
    for (int64_t r = 0; r < some; ++r) std::copy_n(&scratch.rest[r * width_], valid(panel), target + r * own.outputs);
  }

 private:
  const Operands operands_;
  const int64_t width_;
  decltype(Kernel::multiply) multiply_;
};

// Multiplies with panels of an unpacked weight, packed piece by piece: each piece once for many rows.
void multiply_pieces(const Operands& operands, int64_t input_stride) {
  const Kernel kernel = ::kernel();
  const int64_t rows = operands.rows, inputs = operands.inputs, width = kernel.panel;
  const int64_t blocks = quotient(rows, kMostRows);
  const PanelProduct product(operands, width);
  const auto piece = [&](int64_t panel, int64_t k) {
    const int64_t output_stride = operands.weight_stride;
    return Piece{operands.weight + panel * width * output_stride + k * input_stride, output_stride, input_stride};
  };
  parallel_for(0, quotient(operands.outputs, width), 1, [&](int64_t begin, int64_t end) {
    PanelProduct::Scratch scratch;
    const Aligned<float> packed(kDepth * width);
    // The same inputs of all panels, and then the following ones: reads a weight that is stored by inputs in memory
    // order.
    const int64_t panels = end - begin, pieces = panels * quotient(inputs, kDepth);
    const auto panel_of = [&](int64_t i) { return begin + i % panels; };
    const auto input_of = [&](int64_t i) { return i / panels * kDepth; };
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, some = rows * (block + 1) / blocks - row;
      for (int64_t i = 0; i < pieces; ++i) {
        const int64_t panel = panel_of(i), k = input_of(i), depth = std::min(kDepth, inputs - k);
        const int64_t next = i + 1 < pieces ? i + 1 : 0;
        kernel.pack_piece(piece(panel, k), product.valid(panel), depth, width, packed.data());
        product.multiply(panel, row, some, k, depth, packed.data(), piece(panel_of(next), input_of(next)), scratch);
      }
    }
  });
}

// Multiplies one x with the rows of several weights. The threads share all outputs together. Each packs the rows of x
// for itself: reading what another thread has just written takes several times as long.
void multiply_rows(const std::vector<Operands>& products) {
  const Kernel kernel = ::kernel();
  const Operands& any = products[0];
  std::vector<int64_t> units;
  int64_t all = 0;
  for (const Operands& product : products) all += units.emplace_back(quotient(product.outputs, kernel.width));
  parallel_for(0, all, 1, [&](int64_t begin, int64_t end) {
    const Aligned<float> packed(kernel.floats_of_rows(any.rows, any.inputs));
    kernel.pack_rows(any.x, any.x_stride, any.rows, any.inputs, packed.data());
    for_each_part(units, begin, end, [&](size_t i, int64_t from, int64_t to) {
      Operands product = products[i];
      product.x = packed.data();
      kernel.multiply_rows(product, from * kernel.width, std::min(to * kernel.width, product.outputs));
    });
  });
}

void gemm_batch_out(Tensors results, Tensor x, Tensors weights, MaybeTensors biases) {
  check_batch("gemm", results, x, weights, biases);
  check_x("gemm", x, x.scalar_type() == ScalarType::Float);
  std::vector<Operands> every, in_rows;
  const auto any_strides = [](const Tensor&) { return true; };
  for (size_t i = 0; i < weights.size(); ++i) {
    every.push_back(checked<float>("gemm", results[i], x, weights[i], biases[i], any_strides));
  }
  if (x.size(0) == 0) return;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i].stride(1) == 1 && x.size(0) < kManyRows) in_rows.push_back(every[i]);
    else multiply_pieces(every[i], weights[i].stride(1));
  }
  if (!in_rows.empty()) multiply_rows(in_rows);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("gemm_out", FASTGEN_PLANNED(one_of<&gemm_batch_out>));
  library.impl("gemm_batch_out", FASTGEN_PLANNED(gemm_batch_out));
}
