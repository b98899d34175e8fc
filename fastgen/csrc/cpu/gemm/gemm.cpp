// GEMM on the unpacked weight, in float32, bfloat16 and float16. The schemas are defined in fastgen/ops/linear/__init__.py.
//
// If a weight's inputs are contiguous, the rows of x are packed, which are smaller: several rows side by side in a
// vector, which is multiplied by one element of a weight row after the other. With many rows, and if a weight's outputs
// are contiguous, a piece of a panel at a time is packed in the cache and multiplied from there, while the next piece
// is prefetched (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 2008). Either way
// an output is summed in the same order: the result has the same bits.
//
// 16-bit numbers become float32: x before, the weight while a piece is packed, for any number of rows. The result is
// that of the GEMM in float32, rounded once.
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
  void (*upcast)(const uint16_t* from, int64_t count, bool is_half, float* to);
  void (*downcast)(const float* from, int64_t count, bool is_half, uint16_t* to);
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

// A GEMM in bfloat16 or float16.
struct HalfProduct {
  fastgen::Operands<uint16_t> operands;
  int64_t input_stride;  // of the weight
  bool is_half;          // float16

  // Packs a piece of the weight as float32, [depth, width]. `lines` has room for as many numbers.
  void pack(const Kernel& kernel, int64_t output, int64_t k, int64_t depth, float* lines, float* to) const {
    const int64_t width = kernel.panel, valid = std::min(width, operands.outputs - output);
    const uint16_t* first = operands.weight + output * operands.weight_stride + k * input_stride;
    if (input_stride == 1) {
      for (int64_t n = 0; n < valid; ++n) {
        kernel.upcast(first + n * operands.weight_stride, depth, is_half, lines + n * depth);
      }
      kernel.pack_piece({lines, depth, 1}, valid, depth, width, to);
      return;
    }
    for (int64_t i = 0; i < depth; ++i) {
      kernel.upcast(first + i * input_stride, valid, is_half, to + i * width);
      std::fill(to + i * width + valid, to + (i + 1) * width, 0.0f);
    }
  }

  // Multiplies `some` rows of x, as float32, with the panels from `begin` to `end`; y is that of these rows.
  void multiply(const Kernel& kernel, const float* x, int64_t some, int64_t begin, int64_t end, uint16_t* y) const {
    const int64_t width = kernel.panel, inputs = operands.inputs;
    const Aligned<float> lines(kDepth * width), packed(kDepth * width), start(width), sums(some * width);
    for (int64_t output = begin * width; output < std::min(end * width, operands.outputs); output += width) {
      const int64_t valid = std::min(width, operands.outputs - output);
      std::fill_n(start.data(), width, 0.0f);
      if (operands.bias != nullptr) kernel.upcast(operands.bias + output, valid, is_half, start.data());
      for (int64_t k = 0; k < inputs; k += kDepth) {
        const int64_t depth = std::min(kDepth, inputs - k);
        pack(kernel, output, k, depth, lines.data(), packed.data());
        kernel.multiply(x + k, inputs, some, packed.data(), depth, k == 0 ? start.data() : nullptr, sums.data(), width,
                        {packed.data(), 1, width});
      }
      for (int64_t r = 0; r < some; ++r) {
        kernel.downcast(sums.data() + r * width, valid, is_half, y + r * operands.outputs + output);
      }
    }
  }
};

// Multiplies kMostRows rows at a time with all panels.
void multiply_halves(const HalfProduct& product) {
  const Kernel kernel = ::kernel();
  const auto& own = product.operands;
  const Aligned<float> x(std::min(own.rows, kMostRows) * own.inputs);
  for (int64_t row = 0; row < own.rows; row += kMostRows) {
    const int64_t some = std::min(kMostRows, own.rows - row);
    for (int64_t r = 0; r < some; ++r) {
      kernel.upcast(own.x + (row + r) * own.x_stride, own.inputs, product.is_half, x.data() + r * own.inputs);
    }
    parallel_for(0, quotient(own.outputs, kernel.panel), 1, [&](int64_t begin, int64_t end) {
      product.multiply(kernel, x.data(), some, begin, end, own.y + row * own.outputs);
    });
  }
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

void halves_batch_out(const Tensors& results, const Tensor& x, const Tensors& weights, const MaybeTensors& biases) {
  const auto is_laid_out = [](const Tensor& weight) { return are_inputs_adjacent(weight) || weight.stride(0) == 1; };
  std::vector<HalfProduct> every;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto operands = checked<uint16_t>("gemm", results[i], x, weights[i], biases[i], is_laid_out);
    const int64_t input_stride = are_inputs_adjacent(weights[i]) ? 1 : weights[i].stride(1);
    every.push_back({operands, input_stride, x.scalar_type() == ScalarType::Half});
  }
  for (const HalfProduct& product : every) multiply_halves(product);
}

void gemm_batch_out(Tensors results, Tensor x, Tensors weights, MaybeTensors biases) {
  check_batch("gemm", results, x, weights, biases);
  check_x("gemm", x, is_floating(x.scalar_type()));
  if (x.scalar_type() != ScalarType::Float) return halves_batch_out(results, x, weights, biases);
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

// The same operands with their types.
template <class T>
fastgen::Operands<T> typed(const fastgen::Operands<void>& any) {
  return {static_cast<const T*>(any.x), static_cast<const T*>(any.weight), static_cast<const T*>(any.bias),
          static_cast<T*>(any.y), any.x_stride, any.weight_stride, any.rows, any.inputs, any.outputs};
}

}  // namespace

void fastgen::gemm(const fastgen::Operands<void>& any, ScalarType type, bool by_outputs) {
  const int64_t output_stride = by_outputs ? 1 : any.weight_stride, input_stride = by_outputs ? any.weight_stride : 1;
  if (type == ScalarType::Float) {
    Operands product = typed<float>(any);
    product.weight_stride = output_stride;
    if (!by_outputs && product.rows < kManyRows) multiply_rows({product});
    else multiply_pieces(product, input_stride);
    return;
  }
  HalfProduct product{typed<uint16_t>(any), input_stride, type == ScalarType::Half};
  product.operands.weight_stride = output_stride;
  multiply_halves(product);
}

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("gemm_out", FASTGEN_PLANNED(one_of<&gemm_batch_out>));
  library.impl("gemm_batch_out", FASTGEN_PLANNED(gemm_batch_out));
}
