// Linear ops of a mixture of experts: consecutive rows of x are multiplied with the weight of their expert. The schema is
// defined in fastgen/ops/linear/__init__.py.
//
// An expert without rows costs nothing. Experts with few rows are multiplied with GEMV, all of them together, so that the
// threads share them; the others with GEMM, one after the other.
#include "operands.h"

namespace {

using namespace fastgen;

void expert_linear_out(Tensor y, Tensor x, Tensor weight, Tensor ends, int64_t gemv_rows) {
  Arguments("expert_linear").writes(y).reads(x, weight, ends);
  const ScalarType type = x.scalar_type();
  check_x("expert_linear", x, is_floating(type));
  check_result("expert_linear", y, x, std::nullopt);
  STD_TORCH_CHECK(weight.dim() == 3 && weight.scalar_type() == type && weight.size(1) == y.size(1) &&
                      weight.size(2) == x.size(1) && (weight.stride(2) == 1 || weight.stride(1) == 1),
                  "expert_linear: the weight must be [experts, outputs, inputs] of the type of x, with adjacent inputs or outputs");
  const int64_t experts = weight.size(0), size = static_cast<int64_t>(x.element_size());
  const int32_t* given = checked<const int32_t>(ends, {experts}, "expert_linear: the ends must be int32, [experts]");
  const bool by_outputs = weight.stride(2) != 1;
  const char *from = numbers_of<const char>(x), *weights = numbers_of<const char>(weight);
  char* to = numbers_of<char>(y);
  std::vector<fastgen::Operands<void>> few, many;
  int64_t begin = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t end = given[expert];
    STD_TORCH_CHECK(begin <= end && end <= x.size(0), "expert_linear: the ends must ascend, up to the number of rows");
    if (begin == end) continue;
    const fastgen::Operands<void> product{from + begin * x.stride(0) * size,
                                          weights + expert * weight.stride(0) * size,
                                          nullptr,
                                          to + begin * y.size(1) * size,
                                          x.stride(0),
                                          weight.stride(by_outputs ? 2 : 1),
                                          end - begin,
                                          x.size(1),
                                          y.size(1)};
    (end - begin <= gemv_rows ? few : many).push_back(product);
    begin = end;
  }
  std::fill(to + begin * y.size(1) * size, to + y.numel() * size, char{0});  // rows of no expert
  gemv_each(few, type, by_outputs);
  for (const fastgen::Operands<void>& product : many) gemm(product, type, by_outputs);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("expert_linear_out", FASTGEN_PLANNED(expert_linear_out));
}
