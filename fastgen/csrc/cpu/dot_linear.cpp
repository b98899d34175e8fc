// GEMV for the few rows of a decode step, on the weight as it is, in float32, bfloat16 and float16. The schema is defined in
// fastgen/ops/linear/gemv.py.
//
// An output is the dot product of a row with a line of the weight. With so few rows the product is bound by reading the
// weight: each thread reads its part as a few streams far from each other, and the lines of a few outputs stay in the
// cache until all rows have been multiplied with them. What comes next is asked for meanwhile, a share of it with every
// few rows, so that memory and the multiplications are busy at the same time. Sums are in float32, in one order whatever
// the number of rows; but 8 to 16 rows of bfloat16 are multiplied in AMX tiles, in another order.
//
// Of a weight in float32 that is stored by inputs, multiples of the lines are added to the result instead.
#include "bfloat16.h"
#include "checks.h"
#include "dot_linear/lines.h"
#include "float16.h"
#include "instruction_set.h"
#include "amx.h"
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
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

// Vectors as a language extension: gcc and clang. Of two numbers in the place of one, the first must be the lower.
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#ifdef FASTGEN_X86
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Of whatever type the kernel computes with; strides and sizes are in numbers.
struct Arguments {
  const void *x, *weight, *bias;
  void* y;
  int64_t x_stride, weight_stride, rows, inputs, outputs;
};

namespace portable {
#define FASTGEN_TARGET
#define FASTGEN_WIDTH 4
#define FASTGEN_OUTPUTS 3
#define FASTGEN_ROWS 4
#define FASTGEN_TALL_OUTPUTS 3
#define FASTGEN_TALL_ROWS 4
#define FASTGEN_FLOAT16 fastgen::Float16<FASTGEN_WIDTH>
#include "dot_linear/kernels.h"
}  // namespace portable

#ifdef FASTGEN_X86
namespace avx2 {
#define FASTGEN_TARGET __attribute__((target("avx2,fma,f16c")))
#define FASTGEN_WIDTH 8
#define FASTGEN_OUTPUTS 3
#define FASTGEN_ROWS 4
#define FASTGEN_TALL_OUTPUTS 3
#define FASTGEN_TALL_ROWS 4
#define FASTGEN_FLOAT16 fastgen::Float16F16c<FASTGEN_WIDTH>
#include "dot_linear/kernels.h"
}  // namespace avx2

namespace avx512 {
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define FASTGEN_WIDTH 16
#define FASTGEN_OUTPUTS 4
#define FASTGEN_ROWS 6
#define FASTGEN_TALL_OUTPUTS 3
#define FASTGEN_TALL_ROWS 9
#define FASTGEN_FLOAT16 fastgen::Float16Avx512<FASTGEN_WIDTH>
#include "dot_linear/kernels.h"
}  // namespace avx512

#if __has_include(<avx512bf16intrin.h>)
#define FASTGEN_BF16_PAIRS 1
namespace avx512bf16 {
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16")))
#define FASTGEN_WIDTH 16
#define FASTGEN_OUTPUTS 4
#define FASTGEN_ROWS 6
#define FASTGEN_TALL_OUTPUTS 3
#define FASTGEN_TALL_ROWS 9
#define FASTGEN_FLOAT16 fastgen::Float16Avx512<FASTGEN_WIDTH>
#define FASTGEN_ADD_PAIRS(sums, x, weight) \
  (Vector)_mm512_dpbf16_ps((__m512)(sums), (__m512bh)(x), (__m512bh)(weight))
#include "dot_linear/kernels.h"
}  // namespace avx512bf16
#endif
#endif

#if defined(FASTGEN_AMX) && defined(FASTGEN_BF16_PAIRS)
#include "dot_linear/amx.h"
#define FASTGEN_DOT_MATRICES 1
#endif

using Multiply = void (*)(const Arguments&, int64_t, int64_t);
using Prepare = void (*)(const uint16_t*, int64_t, float*);

// `prepare` is null where x is read as it is.
struct Kernel {
  Multiply multiply;
  Prepare prepare;
};

// For so many rows of this type. Of the weight the inputs are next to each other, or the outputs, in float32.
Kernel kernel(ScalarType type, bool by_outputs, int64_t rows) {
#define FASTGEN_KERNEL(SET)                                                                                \
  by_outputs                          ? Kernel{&SET::add_lines, nullptr}                                   \
  : type == ScalarType::Float         ? Kernel{&SET::multiply<SET::Float32>, nullptr}                      \
  : type == ScalarType::BFloat16      ? Kernel{&SET::multiply<SET::BFloat16>, &SET::prepare<SET::BFloat16>} \
                                      : Kernel{&SET::multiply<SET::Float16>, &SET::prepare<SET::Float16>}
#ifdef FASTGEN_DOT_MATRICES
  if (type == ScalarType::BFloat16 && rows >= amx::kMinRows && rows <= amx::kMaxRows &&
      fastgen::instruction_set() == fastgen::InstructionSet::kAvx512 && fastgen::has_amx() &&
      __builtin_cpu_supports("avx512bf16")) {
    return {&amx::multiply, nullptr};
  }
#endif
#ifdef FASTGEN_BF16_PAIRS
  // ATEN_CPU_CAPABILITY names vectors without this.
  if (type == ScalarType::BFloat16 && fastgen::instruction_set() == fastgen::InstructionSet::kAvx512 &&
      !fastgen::instruction_set_is_given() && __builtin_cpu_supports("avx512bf16")) {
    return {&avx512bf16::multiply<avx512bf16::BFloat16>, nullptr};
  }
#endif
  return FASTGEN_CHOOSE(FASTGEN_KERNEL);
#undef FASTGEN_KERNEL
}

// Whether not the inputs of a weight are next to each other, but its outputs.
bool is_by_outputs(const Tensor& weight) {
  return weight.dim() == 2 && weight.stride(1) != 1 && weight.stride(0) == 1 &&
         weight.scalar_type() == ScalarType::Float;
}

void check(const Tensor& y, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "dot_linear: x must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(weight.scalar_type() == type && y.scalar_type() == type && (!bias || bias->scalar_type() == type),
                  "dot_linear: all must be of one type");
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) > 0 && x.size(1) == weight.size(1),
                  "dot_linear: x must be [rows, inputs] and the weight [outputs, inputs]");
  STD_TORCH_CHECK(x.size(1) == 1 || (x.stride(1) == 1 && (weight.stride(1) == 1 || is_by_outputs(weight))),
                  "dot_linear: the inputs must be next to each other; of a weight in float32, or its outputs");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_contiguous()),
                  "dot_linear: the bias must be [outputs]");
  STD_TORCH_CHECK(y.dim() == 2 && y.size(0) == x.size(0) && y.size(1) == weight.size(0) && y.is_contiguous(),
                  "dot_linear: the result must be [rows, outputs]");
}

struct Work {
  Kernel kernel;
  Arguments arguments;
};

// Products with the same x, one or more, all of which prepare it in the same way. The outputs of all together are
// shared out among the threads.
void multiply(const Tensor& x, std::vector<Work>& products) {
  int64_t outputs = 0;
  for (const auto& [_, product] : products) outputs += product.outputs;
  if (outputs == 0) return;
  std::vector<float> prepared;
  if (const Kernel& kernel = products[0].kernel; kernel.prepare != nullptr) {
    const int64_t rows = x.size(0), inputs = x.size(1);
    prepared.resize(rows * inputs);
    const uint16_t* from = static_cast<const uint16_t*>(x.const_data_ptr());
    for (int64_t row = 0; row < rows; ++row) {
      kernel.prepare(from + row * x.stride(0), inputs, prepared.data() + row * inputs);
    }
    for (auto& [_, product] : products) product.x = prepared.data(), product.x_stride = inputs;
  }
  const int64_t threads = std::max<int64_t>(torch::stable::get_num_threads(), 1);
  // In pieces of whole groups of outputs (of the first product), one for each thread.
  constexpr int64_t kWhole = 24;  // 8 for one row, 3 or 4 for more
  const int64_t piece = std::max<int64_t>((outputs + threads * kWhole - 1) / (threads * kWhole) * kWhole, 2 * kWhole);
  fastgen::parallel_for(0, (outputs + piece - 1) / piece, 1, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // output of this product, among those of all
    for (const auto& [kernel, product] : products) {
      const int64_t from = std::max(begin * piece - first, int64_t{0});
      const int64_t to = std::min(end * piece - first, product.outputs);
      if (from < to) kernel.multiply(product, from, to - from);
      first += product.outputs;
    }
  });
}

void dot_linears_out(std::vector<Tensor> results, Tensor x, std::vector<Tensor> weights,
                     std::vector<std::optional<Tensor>> biases) {
  fastgen::Arguments("dot_linear").writes(results).reads(x, weights, biases);
  STD_TORCH_CHECK(results.size() == weights.size() && biases.size() == weights.size(),
                  "dot_linear: as many results and biases as weights");
  std::vector<Work> products;
  const bool by_outputs = !weights.empty() && is_by_outputs(weights[0]);
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor &y = results[i], &weight = weights[i];
    const std::optional<Tensor>& bias = biases[i];
    check(y, x, weight, bias);
    STD_TORCH_CHECK(is_by_outputs(weight) == by_outputs, "dot_linear: all weights must be laid out in one way");
    products.push_back({kernel(x.scalar_type(), by_outputs, x.size(0)),
                        {x.const_data_ptr(), weight.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr,
                         y.mutable_data_ptr(), x.stride(0), weight.stride(by_outputs ? 1 : 0), x.size(0), x.size(1),
                         weight.size(0)}});
  }
  if (!products.empty() && x.size(0) > 0) multiply(x, products);
}

void dot_linear_out(Tensor y, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  dot_linears_out({y}, x, {weight}, {bias});
}

// A line of a weight is asked for while the one before it is multiplied.
void ask_for(const float* line, int64_t inputs) {
  constexpr int64_t kCacheLine = 64 / sizeof(float);
  for (int64_t i = 0; i < inputs; i += kCacheLine) __builtin_prefetch(line + i, 0, 3);
}

}  // namespace

void fastgen::dot_lines(const Tensor& x, int64_t row, const Tensor& weight, const std::optional<Tensor>& bias,
                        const int64_t* lines, int64_t count, float* y) {
  const int64_t inputs = x.size(1), stride = weight.stride(0);
  const float* from = static_cast<const float*>(x.const_data_ptr()) + row * x.stride(0);
  const float* first = static_cast<const float*>(weight.const_data_ptr());
  const float* biases = bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  const Kernel found = kernel(ScalarType::Float, false, 1);
  for (int64_t i = 0; i < count; ++i) {
    if (i + 1 < count) ask_for(first + lines[i + 1] * stride, inputs);
    const float* of_line = biases == nullptr ? nullptr : biases + lines[i];
    found.multiply({from, first + lines[i] * stride, of_line, y + i, inputs, stride, 1, inputs, 1}, 0, 1);
  }
}

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("dot_linear_out", FASTGEN_PLANNED(dot_linear_out));
  library.impl("dot_linears_out", FASTGEN_PLANNED(dot_linears_out));
}

#endif
