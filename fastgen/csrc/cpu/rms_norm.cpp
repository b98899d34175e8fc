// RMS norm of rows, on the CPU, for float32, bfloat16 and float16. The schema is defined in fastgen/ops/rms_norm.py.
//
// A model writes it as six operations with a tensor each. This kernel reads a row twice, the second time from the
// cache.
#include "elementwise/lines.h"
#include "operator.h"

namespace {

using namespace fastgen;

// Elements of a task: fewer do not pay for another thread.
constexpr int64_t kTask = 16384;

void rms_norm_out(Tensor out, Tensor x, Tensor weight, double eps, double offset, bool rounds_scaled) {
  Arguments("rms_norm").writes(out).reads_in_place(x).reads(weight);
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(is_floating(type), "rms_norm: x must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1) &&
                      weight.scalar_type() == type && x.is_contiguous() && weight.is_contiguous(),
                  "rms_norm: x must be [..., width] and weight [width], of one type and contiguous");
  STD_TORCH_CHECK(out.scalar_type() == type && out.is_contiguous() && out.numel() == x.numel(),
                  "rms_norm: the result must be like x");
  const int64_t width = weight.size(0), rows = width == 0 ? 0 : x.numel() / width;
  const int64_t bytes = width * static_cast<int64_t>(x.element_size());
  const int64_t numbers = type == ScalarType::Float    ? kFloat32
                          : type == ScalarType::Half   ? kFloat16
                                                       : kBFloat16;
  // The operands of a line are only read.
  char *from = const_cast<char*>(numbers_of<const char>(x)), *factors = const_cast<char*>(numbers_of<const char>(weight));
  char* to = numbers_of<char>(out);
  const Options options{{eps, offset}, rounds_scaled};
  const Line normalise = line_of(kRmsNorm);
  const int64_t rows_of_task = std::max<int64_t>(kTask / std::max<int64_t>(width, 1), 1);
  parallel_for(0, rows, rows_of_task, [&](int64_t begin, int64_t end) {
    const Piece pieces[] = {
        {to + begin * bytes, numbers, 1}, {from + begin * bytes, numbers, 1}, {factors, numbers, 1}, {}};
    const int64_t apart[] = {bytes, bytes, 0, 0};
    normalise(pieces, apart, end - begin, width, options);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("rms_norm_out", FASTGEN_PLANNED(rms_norm_out)); }
