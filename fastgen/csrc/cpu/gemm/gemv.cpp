// GEMV for the few rows of a decode step, on the unpacked weight, in float32, bfloat16 and float16. The schemas are
// defined in fastgen/ops/linear/__init__.py.
//
// An output is the dot product of a row with a row of the weight. With so few rows, reading the weight is the
// bottleneck: each thread reads its part as a few streams far apart, and the weight rows of a few outputs stay in the
// cache until all rows have been multiplied with them. The next data is prefetched meanwhile, a share of it with every
// few rows, so that memory and multipliers are busy at the same time. Sums are in float32, in one order for any number
// of rows; but 8 to 16 rows of bfloat16 are multiplied in AMX tiles, in another order.
//
// For a weight that is stored by inputs, multiples of its columns are added to the result instead.
#include "../isa.h"
#include "amx.h"
#include "operands.h"

#include <array>
#include <utility>

namespace {

using namespace fastgen;

// `prepare` is null if x is read unchanged.
struct Kernel {
  void (*multiply)(const Operands<void>& operands, int64_t first, int64_t outputs);
  void (*prepare)(const uint16_t* x, int64_t inputs, float* to);
};

#define FASTGEN_KERNELS "gemm/gemv_kernels.h"
#define FASTGEN_BF16
#include "../each_isa.h"

#if defined(FASTGEN_AMX) && defined(FASTGEN_HAS_BF16)
#include "gemv_amx.h"
#define FASTGEN_GEMV_AMX 1
#endif

// Returns the kernel for this type and number of rows. The weight's inputs are contiguous, or its outputs.
Kernel kernel(ScalarType type, bool by_outputs, int64_t rows) {
#ifdef FASTGEN_HAS_BF16
  if (type == ScalarType::BFloat16 && has_avx512_bf16() && !instruction_set_is_given()) {
#ifdef FASTGEN_GEMV_AMX
    if (!by_outputs && rows >= amx::kMinRows && rows <= amx::kMaxRows && has_amx()) return {&amx::multiply, nullptr};
#endif
    return avx512bf16::kernel(type, by_outputs);
  }
#endif
  return FASTGEN_CHOOSE(kernel(type, by_outputs));
}

// Returns whether the outputs of a weight are contiguous, rather than its inputs.
bool is_by_outputs(const Tensor& weight) {
  return weight.stride(1) != 1 && weight.stride(0) == 1;
}

bool is_laid_out(const Tensor& weight) { return are_inputs_adjacent(weight) || is_by_outputs(weight); }

struct Work {
  Kernel kernel;
  Operands<void> operands;
};

// Prepares the x of each GEMV, where its kernel needs that: once for consecutive GEMVs with the same x. `memory` must
// live as long as they are multiplied.
void prepare(std::vector<Work>& products, std::vector<std::vector<float>>& memory) {
  Operands<void> last{};
  for (auto& [kernel, product] : products) {
    if (kernel.prepare == nullptr) continue;
    const void* x = product.x;
    // Rows of an expanded x have one address, whichever they are.
    if (x != last.x || product.x_stride != last.x_stride || product.rows != last.rows) {
      last = product;
      auto& prepared = memory.emplace_back(product.rows * product.inputs);
      for (int64_t row = 0; row < product.rows; ++row) {
        const uint16_t* from = static_cast<const uint16_t*>(x) + row * product.x_stride;
        kernel.prepare(from, product.inputs, prepared.data() + row * product.inputs);
      }
    }
    product.x = memory.back().data(), product.x_stride = product.inputs;
  }
}

// Computes one or more GEMVs. The threads share all outputs together.
void multiply(std::vector<Work>& products) {
  int64_t outputs = 0;
  std::vector<int64_t> each;
  for (const auto& [_, product] : products) outputs += each.emplace_back(product.outputs);
  if (outputs == 0) return;
  std::vector<std::vector<float>> memory;
  prepare(products, memory);
  const int64_t threads = std::max<int64_t>(torch::stable::get_num_threads(), 1);
  // Pieces of whole groups of outputs (of the first weight), one for each thread.
  constexpr int64_t kWhole = 24;  // 8 for one row, 3 or 4 for more
  const int64_t piece = std::max<int64_t>((outputs + threads * kWhole - 1) / (threads * kWhole) * kWhole, 2 * kWhole);
  parallel_for(0, (outputs + piece - 1) / piece, 1, [&](int64_t begin, int64_t end) {
    for_each_part(each, begin * piece, end * piece, [&](size_t i, int64_t from, int64_t to) {
      products[i].kernel.multiply(products[i].operands, from, to - from);
    });
  });
}

void gemv_batch_out(Tensors results, Tensor x, Tensors weights, MaybeTensors biases) {
  check_batch("gemv", results, x, weights, biases);
  check_x("gemv", x, is_floating(x.scalar_type()));
  std::vector<Work> products;
  for (size_t i = 0; i < weights.size(); ++i) {
    Work work{{}, checked<void>("gemv", results[i], x, weights[i], biases[i], &is_laid_out)};
    const bool by_outputs = is_by_outputs(weights[i]);
    STD_TORCH_CHECK(by_outputs == is_by_outputs(weights[0]), "gemv: all weights must be laid out in one way");
    if (by_outputs) work.operands.weight_stride = weights[i].stride(1);
    work.kernel = kernel(x.scalar_type(), by_outputs, x.size(0));
    products.push_back(work);
  }
  if (x.size(0) > 0) multiply(products);
}

// Prefetches a weight row while the previous one is multiplied.
void prefetch(const float* row, int64_t inputs) {
  constexpr int64_t kCacheLine = 64 / sizeof(float);
  for (int64_t i = 0; i < inputs; i += kCacheLine) __builtin_prefetch(row + i, 0, 3);
}

}  // namespace

void fastgen::gemv_each(const std::vector<Operands<void>>& products, ScalarType type, bool by_outputs) {
  std::vector<Work> all;
  for (const Operands<void>& product : products) all.push_back({kernel(type, by_outputs, product.rows), product});
  multiply(all);
}

void fastgen::gemv_of_outputs(const Tensor& x, int64_t row, const Tensor& weight, const std::optional<Tensor>& bias,
                              const int64_t* outputs, int64_t count, float* y) {
  const int64_t inputs = x.size(1), stride = weight.stride(0);
  const float* from = numbers_of<const float>(x) + row * x.stride(0);
  const float* first = numbers_of<const float>(weight);
  const float* biases = bias ? numbers_of<const float>(*bias) : nullptr;
  const auto multiply = kernel(ScalarType::Float, false, 1).multiply;
  for (int64_t i = 0; i < count; ++i) {
    if (i + 1 < count) prefetch(first + outputs[i + 1] * stride, inputs);
    const float* own = biases == nullptr ? nullptr : biases + outputs[i];
    multiply({from, first + outputs[i] * stride, own, y + i, inputs, stride, 1, inputs, 1}, 0, 1);
  }
}

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("gemv_out", FASTGEN_PLANNED(one_of<&gemv_batch_out>));
  library.impl("gemv_batch_out", FASTGEN_PLANNED(gemv_batch_out));
}
