// GEMM in float32 on the weight as it is. The schemas are defined in fastgen/ops/linear/gemm.py.
//
// Of a weight whose inputs are next to each other, the rows are laid out, of which there are fewer numbers: some of them side
// by side in a vector, which is multiplied with one element of a line of the weight after the other. With many rows, and of a
// weight whose outputs are next to each other, a piece of a panel at a time is laid out in the cache and multiplied from
// there, while the next piece is prefetched (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM
// TOMS 2008). Either way an output is summed in the same order: the result has the same bits.
#include "checks.h"
#include "instruction_set.h"
#include "linear/depth.h"
#include "parallel.h"
#include "plan.h"
#include "transpose.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#ifdef __GNUC__  // vectors as a language extension: gcc and clang

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kLine = 16;  // floats of a cache line
// From so many rows on, laying out pieces of the weight takes less time than laying out the rows. So many rows at most are
// multiplied with a piece at a time: their results stay in the cache.
constexpr int64_t kManyRows = 129, kMostRows = 1024;

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

// A product with the lines of a weight, [outputs, inputs], which are `stride` apart: x as `lay_out_rows` makes it, the
// result [rows, outputs], its lines `y_stride` apart; `bias` may be null.
struct LineProduct {
  const float *x, *weight, *bias;
  float* y;
  int64_t rows, inputs, stride, y_stride;
};

// Memory that begins with a cache line: a vector that lies in two of them takes twice as long to load.
class Aligned {
 public:
  explicit Aligned(int64_t size)
      : first_(static_cast<float*>(::operator new(size * sizeof(float), std::align_val_t(64)))) {}
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { ::operator delete(first_, std::align_val_t(64)); }
  float* data() const { return first_; }

 private:
  float* first_;
};

namespace portable {
#define FASTGEN_TARGET
#define FASTGEN_WIDTH 4
#define FASTGEN_VECTORS 4
#define FASTGEN_ROWS 4
#define FASTGEN_OUTPUTS 4
#define FASTGEN_ROW_VECTORS 2
#define FASTGEN_HALF 0
#define FASTGEN_REPEAT4(from) (*reinterpret_cast<const Vector*>(from))
#define FASTGEN_SPREAD 0
#define FASTGEN_ONE_OF4(vector, i) ((vector)[i] - Vector{})
#define FASTGEN_TRANSPOSE fastgen::transpose4
#include "linear/kernels.h"
}  // namespace portable

#ifdef FASTGEN_X86
namespace avx2 {
#define FASTGEN_TARGET __attribute__((target("avx2,fma")))
#define FASTGEN_WIDTH 8
#define FASTGEN_VECTORS 2
#define FASTGEN_ROWS 6
#define FASTGEN_OUTPUTS 4
#define FASTGEN_ROW_VECTORS 3
#define FASTGEN_HALF 0
#define FASTGEN_REPEAT4(from) ((Vector)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from)))
#define FASTGEN_SPREAD 0
#define FASTGEN_ONE_OF4(vector, i) ((Vector)_mm256_permute_ps((__m256)(vector), (i) * 0x55))
#define FASTGEN_TRANSPOSE fastgen::transpose8
#include "linear/kernels.h"
}  // namespace avx2

namespace avx512 {
#define FASTGEN_TARGET __attribute__((target("avx512f,fma")))
#define FASTGEN_WIDTH 16
#define FASTGEN_VECTORS 3
#define FASTGEN_ROWS 8
#define FASTGEN_OUTPUTS 8
#define FASTGEN_ROW_VECTORS 3
#define FASTGEN_HALF 8
#define FASTGEN_REPEAT4(from) ((Vector)_mm512_broadcast_f32x4(_mm_loadu_ps(from)))
#define FASTGEN_SPREAD 4
#define FASTGEN_ONE_OF4(vector, i) ((Vector)_mm512_permute_ps((__m512)(vector), (i) * 0x55))
#define FASTGEN_TRANSPOSE fastgen::transpose16
#include "linear/kernels.h"
}  // namespace avx512
#endif

struct Kernel {
  int64_t panel;  // outputs of a panel
  decltype(&portable::multiply) multiply;
  decltype(&portable::lay_out) lay_out;
  int64_t width;  // outputs that `multiply_lines` is given are a multiple of it, but for the last ones
  decltype(&portable::floats_of_rows) floats_of_rows;
  decltype(&portable::lay_out_rows) lay_out_rows;
  decltype(&portable::multiply_lines) multiply_lines;
};

Kernel kernel() {
#define FASTGEN_KERNEL(SET)                                                                                     \
  Kernel {                                                                                                      \
    SET::kPanel, &SET::multiply, &SET::lay_out, SET::kWidth, &SET::floats_of_rows, &SET::lay_out_rows,          \
        &SET::multiply_lines                                                                \
  }
  return FASTGEN_CHOOSE(FASTGEN_KERNEL);
#undef FASTGEN_KERNEL
}

int64_t panels_of(int64_t outputs) { return fastgen::quotient(outputs, kernel().panel); }

void check_weight(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::Float,
                  "the weight of a linear layer must be [outputs, inputs] of float32");
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

// Panels of a weight as it is, laid out piece by piece: each piece once for many rows.
void multiply_pieces(const Product& product, const Tensor& weight) {
  const int64_t rows = product.rows, inputs = product.inputs, width = product.width();
  const int64_t blocks = (rows + kMostRows - 1) / kMostRows;
  const int64_t output_stride = weight.stride(0), input_stride = weight.stride(1);
  const float* weights = static_cast<const float*>(weight.const_data_ptr());
  const auto lay_out = kernel().lay_out;
  const auto piece = [&](int64_t panel, int64_t k) {
    return Piece{weights + panel * width * output_stride + k * input_stride, output_stride, input_stride};
  };
  fastgen::parallel_for(0, panels_of(product.outputs), 1, [&](int64_t begin, int64_t end) {
    Product::Scratch scratch;
    const Aligned laid_out(kDepth * width);
    // The same inputs of all panels, and then those behind them: of a weight that is stored by inputs, memory is read in
    // the order in which it lies.
    const int64_t panels = end - begin, pieces = panels * ((inputs + kDepth - 1) / kDepth);
    const auto panel_of = [&](int64_t i) { return begin + i % panels; };
    const auto input_of = [&](int64_t i) { return i / panels * kDepth; };
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, some = rows * (block + 1) / blocks - row;
      for (int64_t i = 0; i < pieces; ++i) {
        const int64_t panel = panel_of(i), k = input_of(i), depth = std::min(kDepth, inputs - k);
        const int64_t next = i + 1 < pieces ? i + 1 : 0;
        lay_out(piece(panel, k), product.valid(panel), depth, width, laid_out.data());
        product.multiply(panel, row, some, k, depth, laid_out.data(), piece(panel_of(next), input_of(next)), scratch);
      }
    }
  });
}

// Products of one x, [rows, inputs], its rows `stride` apart, with lines of weights. The outputs of all of them together
// are shared out among the threads. Each thread lays out the rows for itself: to fetch what another one has just written
// takes several times as long.
void multiply_lines(const float* x, int64_t stride, const std::vector<LineProduct>& products,
                    const std::vector<int64_t>& outputs) {
  const Kernel kernel = ::kernel();
  const int64_t rows = products[0].rows, inputs = products[0].inputs;
  const auto units_of = [&](size_t i) { return (outputs[i] + kernel.width - 1) / kernel.width; };
  int64_t units = 0;
  for (size_t i = 0; i < products.size(); ++i) units += units_of(i);
  fastgen::parallel_for(0, units, 1, [&](int64_t begin, int64_t end) {
    const Aligned laid_out(kernel.floats_of_rows(rows, inputs));
    kernel.lay_out_rows(x, stride, rows, inputs, laid_out.data());
    int64_t first = 0;  // unit of this product, among those of all
    for (size_t i = 0; i < products.size(); first += units_of(i), ++i) {
      const int64_t from = std::max(begin - first, int64_t{0}) * kernel.width;
      const int64_t to = std::min((end - first) * kernel.width, outputs[i]);
      LineProduct product = products[i];
      product.x = laid_out.data();
      if (from < to) kernel.multiply_lines(product, from, to);
    }
  });
}

void check_streamed(const Tensor& result, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_weight(weight);
  check_input(x, bias, weight.size(0));
  STD_TORCH_CHECK(weight.size(1) == x.size(1), "streamed_linear: x must have as many inputs as the weight");
  STD_TORCH_CHECK(result.dim() == 2 && result.size(0) == x.size(0) && result.size(1) == weight.size(0) &&
                      result.is_contiguous() && result.scalar_type() == ScalarType::Float,
                  "streamed_linear: the result must be [rows, outputs] of float32");
}

void multiply(const std::vector<Tensor>& results, const Tensor& x, const std::vector<Tensor>& weights,
              const std::vector<std::optional<Tensor>>& biases) {
  fastgen::Arguments("streamed_linear").writes(results).reads(x, weights, biases);
  STD_TORCH_CHECK(results.size() == weights.size() && biases.size() == weights.size(),
                  "streamed_linear: as many results and biases as weights");
  for (size_t i = 0; i < weights.size(); ++i) check_streamed(results[i], x, weights[i], biases[i]);
  if (x.size(0) == 0) return;
  std::vector<LineProduct> products;
  std::vector<int64_t> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i].stride(1) != 1 || x.size(0) >= kManyRows) {
      multiply_pieces(Product(x, biases[i], weights[i].size(0), results[i]), weights[i]);
      continue;
    }
    products.push_back({nullptr, static_cast<const float*>(weights[i].const_data_ptr()),
                        biases[i] ? static_cast<const float*>(biases[i]->const_data_ptr()) : nullptr,
                        static_cast<float*>(results[i].mutable_data_ptr()), x.size(0), x.size(1), weights[i].stride(0),
                        weights[i].size(0)});
    outputs.push_back(weights[i].size(0));
  }
  if (products.empty()) return;
  multiply_lines(static_cast<const float*>(x.const_data_ptr()), x.stride(0), products, outputs);
}

void streamed_linears_out(std::vector<Tensor> results, Tensor x, std::vector<Tensor> weights,
                          std::vector<std::optional<Tensor>> biases) {
  multiply(results, x, weights, biases);
}

void streamed_linear_out(Tensor result, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  multiply({result}, x, {weight}, {bias});
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
  library.impl("streamed_linear", TORCH_BOX(&streamed_linear));
  library.impl("streamed_linear_out", FASTGEN_PLANNED(streamed_linear_out));
  library.impl("streamed_linears_out", FASTGEN_PLANNED(streamed_linears_out));
}

#endif
