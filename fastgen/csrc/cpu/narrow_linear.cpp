// Linear layers in float32 for the rows of a decoding step, with a weight of 16 bits in panels. The
// schemas are defined in fastgen/ops/linear/panels.py.
//
// A panel holds as many outputs as a vector has floats, for all inputs, in the order of their use. Its numbers are widened
// in the registers, and each is multiplied with all rows of a tile: so few rows wait for memory alone, which is read as a
// few streams, and many rows wait for multiply-adds alone. Rows are laid out so that those of an input are next to each
// other; each thread does that for itself, because what another one has just written takes long to fetch.
//
// The result is that of GEMM on the widened weight to the last bit, whatever the number of rows.
#include "bfloat16.h"
#include "checks.h"
#include "float16.h"
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
#include <memory>
#include <optional>
#include <utility>
#include <vector>

// Vectors as a language extension: gcc and clang. Of two numbers in the place of one, the first must be the lower.
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// x as `lay_out` makes it, the weight in panels; the result is [rows, outputs], `bias` may be null.
struct PanelProduct {
  const float* x;
  const uint8_t* weight;
  const float* bias;
  float* y;
  int64_t rows, inputs, outputs;  // of inputs an even number
};

// The inputs of x with the zero that follows an odd number of them.
int64_t even(int64_t inputs) { return (inputs + 1) / 2 * 2; }

enum Format { kBFloat16, kFloat16 };

struct Kernel {
  int64_t width;  // outputs of a panel
  void (*lay_out)(const float* x, int64_t stride, int64_t rows, int64_t inputs, int64_t padded, float* to);
  void (*multiply)(const PanelProduct& product, int64_t begin, int64_t end);
};

namespace portable {
#define FASTGEN_TARGET
#define FASTGEN_WIDTH 4
#define FASTGEN_SUMS 12
#define FASTGEN_FLOAT16 fastgen::Float16<FASTGEN_WIDTH>
#define FASTGEN_TRANSPOSE fastgen::transpose4
#include "narrow_linear/kernels.h"
}  // namespace portable

#ifdef FASTGEN_X86
namespace avx2 {
#define FASTGEN_TARGET __attribute__((target("avx2,fma,f16c")))
#define FASTGEN_WIDTH 8
#define FASTGEN_SUMS 12
#define FASTGEN_FLOAT16 fastgen::Float16F16c<FASTGEN_WIDTH>
#define FASTGEN_TRANSPOSE fastgen::transpose8
#include "narrow_linear/kernels.h"
}  // namespace avx2

namespace avx512 {
#define FASTGEN_TARGET __attribute__((target("avx512f,fma")))
#define FASTGEN_WIDTH 16
#define FASTGEN_SUMS 28
#define FASTGEN_FLOAT16 fastgen::Float16Avx512<FASTGEN_WIDTH>
#define FASTGEN_TRANSPOSE fastgen::transpose16
#include "narrow_linear/kernels.h"
}  // namespace avx512
#endif

Kernel kernel(Format format) {
#define FASTGEN_KERNEL(SET) SET::kKernels[format]
  return FASTGEN_CHOOSE(FASTGEN_KERNEL);
#undef FASTGEN_KERNEL
}

int64_t width() { return kernel(kBFloat16).width; }

bool is_narrow(ScalarType type) { return type == ScalarType::BFloat16 || type == ScalarType::Half; }

int64_t panels_of(int64_t outputs) { return fastgen::quotient(outputs, width()); }

// [outputs, inputs] -> [panels, pairs of inputs, 2 * outputs of a panel].
Tensor pack_narrow(Tensor weight) {
  fastgen::Arguments("pack_narrow").reads(weight);
  STD_TORCH_CHECK(weight.dim() == 2 && is_narrow(weight.scalar_type()) && (weight.stride(1) == 1 || weight.size(1) == 1),
                  "pack_narrow: the weight must be [outputs, inputs] of bfloat16 or float16, its inputs next to each other");
  const int64_t outputs = weight.size(0), inputs = weight.size(1), panels = panels_of(outputs);
  Tensor packed = torch::stable::new_empty(weight, {panels, (inputs + 1) / 2, 2 * width()});
  const uint16_t* from = static_cast<const uint16_t*>(weight.const_data_ptr());
  uint16_t* to = static_cast<uint16_t*>(packed.mutable_data_ptr());
#define FASTGEN_PACK(SET)                                                                                \
  (weight.scalar_type() == ScalarType::BFloat16 ? &SET::pack<SET::BFloat16> : &SET::pack<SET::Float16>)
  const auto pack = FASTGEN_CHOOSE(FASTGEN_PACK);
#undef FASTGEN_PACK
  fastgen::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    pack(from, weight.stride(0), outputs, inputs, begin, end, to);
  });
  return packed;
}

Format format_of(const Tensor& packed) {
  STD_TORCH_CHECK(is_narrow(packed.scalar_type()), "narrow_linear: the weight must be packed");
  return packed.scalar_type() == ScalarType::BFloat16 ? kBFloat16 : kFloat16;
}

Kernel check(const Tensor& y, const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.size(1) > 0 &&
                      (x.stride(1) == 1 || x.size(1) == 1),
                  "narrow_linear: x must be [rows, inputs] of float32, with the inputs next to each other");
  STD_TORCH_CHECK(y.dim() == 2 && y.size(0) == x.size(0) && y.is_contiguous() && y.scalar_type() == ScalarType::Float,
                  "narrow_linear: the result must be [rows, outputs] of float32");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == y.size(1) && bias->is_contiguous() &&
                            bias->scalar_type() == ScalarType::Float),
                  "narrow_linear: the bias must be [outputs] of float32");
  const Kernel found = kernel(format_of(packed));
  STD_TORCH_CHECK(packed.dim() == 3 && packed.is_contiguous(), "narrow_linear: the weight must be packed");
  STD_TORCH_CHECK(packed.size(0) == panels_of(y.size(1)) && packed.size(1) * 2 == even(x.size(1)) &&
                      packed.size(2) == 2 * found.width,
                  "narrow_linear: the weight was not packed for this product");
  return found;
}

struct Work {
  Kernel kernel;
  PanelProduct product;
};

// The panels of all products, which have the same x, are shared out among the threads.
void multiply(const Tensor& x, const std::vector<Work>& works) {
  const int64_t rows = x.size(0), inputs = x.size(1);
  int64_t panels = 0;
  for (const auto& [_, product] : works) panels += panels_of(product.outputs);
  const float* from = static_cast<const float*>(x.const_data_ptr());
  fastgen::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> laid_out(new float[rows * even(inputs)]);  // not filled with zeros first
    works[0].kernel.lay_out(from, x.stride(0), rows, inputs, even(inputs), laid_out.get());
    int64_t first = 0;  // panel of this product, among those of all
    for (auto [kernel, product] : works) {
      const int64_t all = panels_of(product.outputs);
      const int64_t begin_here = std::max(begin - first, int64_t{0}), end_here = std::min(end - first, all);
      product.x = laid_out.get();
      if (begin_here < end_here) kernel.multiply(product, begin_here, end_here);
      first += all;
    }
  });
}

void narrow_linears_out(std::vector<Tensor> results, Tensor x, std::vector<Tensor> packed,
                        std::vector<std::optional<Tensor>> biases) {
  fastgen::Arguments("narrow_linear").writes(results).reads(x, packed, biases);
  STD_TORCH_CHECK(results.size() == packed.size() && biases.size() == packed.size(),
                  "narrow_linear: as many results and biases as weights");
  std::vector<Work> works;
  for (size_t i = 0; i < packed.size(); ++i) {
    works.push_back({check(results[i], x, packed[i], biases[i]),
                     {nullptr, static_cast<const uint8_t*>(packed[i].const_data_ptr()),
                      biases[i] ? static_cast<const float*>(biases[i]->const_data_ptr()) : nullptr,
                      static_cast<float*>(results[i].mutable_data_ptr()), x.size(0), even(x.size(1)),
                      results[i].size(1)}});
  }
  if (!works.empty() && x.size(0) > 0) multiply(x, works);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("pack_narrow", TORCH_BOX(&pack_narrow));
  library.impl("narrow_linears_out", FASTGEN_PLANNED(narrow_linears_out));
}

#endif
