// RMS norm of rows, on the CPU, for float32 and bfloat16. The schema is defined in fastgen/ops/rms_norm.py.
//
// A model spells it out as six operations with a tensor each. Here a row is read twice, the second time from the cache.
#include "instruction_set.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __GNUC__  // vectors as a language extension: gcc and clang

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kLanes = 16;
// Numbers of a task: fewer are not worth another thread.
constexpr int64_t kTask = 16384;

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float))));
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t)), aligned(sizeof(uint16_t))));

struct Options {
  float eps;
  float offset;        // added to the weight
  bool rounds_scaled;  // the row is rounded to its type before it is multiplied by the weight, too
};

using Normalise = void (*)(const void*, const void*, void*, int64_t, Options);

// The functions below are compiled for each instruction set, and must be inlined into a function that has it.
#define FASTGEN_INLINE inline __attribute__((always_inline))

struct Float32 {
  using Number = float;
  static FASTGEN_INLINE void load(Floats& to, const float* from) { std::memcpy(&to, from, sizeof(to)); }
  static FASTGEN_INLINE void store(float* to, const Floats& from) { std::memcpy(to, &from, sizeof(from)); }
  static FASTGEN_INLINE void round(Floats&) {}
};

struct BFloat16 {
  using Number = uint16_t;
  static FASTGEN_INLINE void load(Floats& to, const uint16_t* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    const Bits bits = __builtin_convertvector(halves, Bits) << 16;
    std::memcpy(&to, &bits, sizeof(to));
  }
  // To the nearest, and of two that are as near to the even one. What is not a number stays so.
  static FASTGEN_INLINE void rounded(Bits& bits, const Floats& from) {
    std::memcpy(&bits, &from, sizeof(bits));
    const Bits nearest = bits + 0x7fff + ((bits >> 16) & 1);
    const Bits is_nan = (Bits)(from != from);
    bits = (is_nan & (bits | 0x400000)) | (~is_nan & nearest);
  }
  static FASTGEN_INLINE void store(uint16_t* to, const Floats& from) {
    Bits bits;
    rounded(bits, from);
    const Halves halves = __builtin_convertvector(bits >> 16, Halves);
    std::memcpy(to, &halves, sizeof(halves));
  }
  static FASTGEN_INLINE void round(Floats& value) {
    Bits bits;
    rounded(bits, value);
    bits &= 0xffff0000u;
    std::memcpy(&value, &bits, sizeof(value));
  }
};

template <typename Type>
FASTGEN_INLINE void scaled(typename Type::Number* out, const typename Type::Number* row,
                           const typename Type::Number* weight, float scale, const Options& options) {
  Floats value, factor;
  Type::load(value, row);
  Type::load(factor, weight);
  value *= scale;
  if (options.rounds_scaled) Type::round(value);
  value *= factor + options.offset;
  Type::store(out, value);
}

template <typename Type>
FASTGEN_INLINE void normalise(const void* row_data, const void* weight_data, void* out_data, int64_t width,
                              const Options& options) {
  using Number = typename Type::Number;
  const Number* row = static_cast<const Number*>(row_data);
  const Number* weight = static_cast<const Number*>(weight_data);
  Number* out = static_cast<Number*>(out_data);
  const int64_t whole = width - width % kLanes, left = width - whole;
  // What does not fill a vector is filled up with zeros.
  Number last_row[kLanes] = {}, last_weight[kLanes] = {}, last_out[kLanes];
  std::memcpy(last_row, row + whole, left * sizeof(Number));
  std::memcpy(last_weight, weight + whole, left * sizeof(Number));

  Floats sums = {}, value;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Type::load(value, row + i);
    sums += value * value;
  }
  Type::load(value, last_row);
  sums += value * value;
  for (int64_t step = kLanes / 2; step > 0; step /= 2) {
    for (int64_t i = 0; i < step; ++i) sums[i] += sums[i + step];
  }
  const float scale = 1.0f / std::sqrt(sums[0] / static_cast<float>(width) + options.eps);
  for (int64_t i = 0; i < whole; i += kLanes) scaled<Type>(out + i, row + i, weight + i, scale, options);
  scaled<Type>(last_out, last_row, last_weight, scale, options);
  std::memcpy(out + whole, last_out, left * sizeof(Number));
}

#define FASTGEN_NORMALISE(TARGET)                                                                     \
  TARGET void float32(const void* row, const void* weight, void* out, int64_t width, Options options) {  \
    normalise<Float32>(row, weight, out, width, options);                                            \
  }                                                                                                  \
  TARGET void bfloat16(const void* row, const void* weight, void* out, int64_t width, Options options) { \
    normalise<BFloat16>(row, weight, out, width, options);                                           \
  }

namespace portable {
FASTGEN_NORMALISE()
}
#ifdef FASTGEN_X86
namespace avx2 {
FASTGEN_NORMALISE(__attribute__((target("avx2"))))
}
namespace avx512 {
FASTGEN_NORMALISE(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))))
}
#endif
#undef FASTGEN_NORMALISE

Normalise kernel(ScalarType type) {
  const bool is_float32 = type == ScalarType::Float;
#ifdef FASTGEN_X86
  switch (fastgen::instruction_set()) {
    case fastgen::InstructionSet::kAvx512: return is_float32 ? &avx512::float32 : &avx512::bfloat16;
    case fastgen::InstructionSet::kAvx2: return is_float32 ? &avx2::float32 : &avx2::bfloat16;
    case fastgen::InstructionSet::kPortable: break;
  }
#endif
  return is_float32 ? &portable::float32 : &portable::bfloat16;
}

void rms_norm_out(Tensor out, Tensor x, Tensor weight, double eps, double offset, bool rounds_scaled) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                  "rms_norm: x must be float32 or bfloat16");
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1) &&
                      weight.scalar_type() == type && x.is_contiguous() && weight.is_contiguous(),
                  "rms_norm: x must be [..., width] and weight [width], of one type and contiguous");
  STD_TORCH_CHECK(out.scalar_type() == type && out.is_contiguous() && out.numel() == x.numel(),
                  "rms_norm: the result must be like x");
  const int64_t width = weight.size(0), rows = width == 0 ? 0 : x.numel() / width;
  const int64_t bytes = width * (type == ScalarType::Float ? sizeof(float) : sizeof(uint16_t));
  const char* from = static_cast<const char*>(x.const_data_ptr());
  const void* factors = weight.const_data_ptr();
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const Options options{static_cast<float>(eps), static_cast<float>(offset), rounds_scaled};
  const Normalise run = kernel(type);
  const int64_t rows_of_task = std::max<int64_t>(kTask / std::max<int64_t>(width, 1), 1);
  torch::stable::parallel_for(0, rows, rows_of_task, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) run(from + row * bytes, factors, to + row * bytes, width, options);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("rms_norm_out", TORCH_BOX(&rms_norm_out)); }

#endif
