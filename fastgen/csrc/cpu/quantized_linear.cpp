// Linear layers on weights of 8 bits or in bfloat16, where the processor multiplies those faster than float32: in the
// matrix registers of AMX, or, in bfloat16, with the vector instructions of AVX-512 BF16. The schemas are defined in
// fastgen/ops/quantized_linear.py.
//
// A weight is stored in tiles of 16 outputs and 64 bytes of inputs, in the order in which those instructions take it: a
// line of a tile holds four bytes (four inputs of 8 bits, or two in bfloat16) of each of its outputs. A panel is two
// tiles wide. Inputs get their type row by row, so that a row's result does not depend on what else is in the batch; the
// sums in bfloat16 are rounded in another order with more than 16 rows than with fewer.
#include "instruction_set.h"
#include "matrix_registers.h"
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
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#ifdef FASTGEN_MATRICES
#define FASTGEN_QUANTIZED 1
#endif

namespace {

using torch::headeronly::ScalarType;
using fastgen::kTileBytes;  // of 16 outputs
using fastgen::kTileLine;
using fastgen::kTileRows;
using torch::stable::Tensor;

constexpr int64_t kPanel = 2 * kTileRows;  // outputs of a panel
constexpr int64_t kRows = 2 * kTileRows;   // rows that are multiplied in one go
// Rows that a thread takes through all panels before it goes on: their inputs stay in the second-level cache.
constexpr int64_t kBlock = 128;
// Weights that all rows of a block go through, some rows at a time: they stay in the second-level cache as well.
constexpr int64_t kGroupBytes = 1 << 18;
// Bytes of weights that a decoding step asks for ahead of time: one turn of its loop after the next.
constexpr int64_t kAhead = 8 * kTileBytes;
// Elements of a type that are made of float32 before it pays to wake another thread.
constexpr int64_t kGrain = 1 << 16;
// So many products of 8 bits fit into a sum of 32.
constexpr int64_t kMaxInputs = 1 << 16;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

#ifdef FASTGEN_QUANTIZED

#define FASTGEN_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

namespace vectors16 {
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512bf16")))
#define FASTGEN_SUM float
#define FASTGEN_ADD(sums, x, weight) \
  _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sums), (__m512bh)(x), (__m512bh)(weight)))
#include "quantized_linear/vectors.h"
}  // namespace vectors16

namespace matrices8 {
#define FASTGEN_TARGET __attribute__((target("amx-tile,amx-int8,avx512f")))
#define FASTGEN_SUM int32_t
#define FASTGEN_ADD(sums, x, weight) _tile_dpbusd(sums, x, weight)
#include "quantized_linear/matrices.h"
}  // namespace matrices8

namespace matrices16 {
#define FASTGEN_TARGET __attribute__((target("amx-tile,amx-bf16,avx512f")))
#define FASTGEN_SUM float
#define FASTGEN_ADD(sums, x, weight) _tile_dpbf16ps(sums, x, weight)
#include "quantized_linear/matrices.h"
}  // namespace matrices16

// x[rows, depth bytes] times a panel, into sums[rows, kPanel].
using Multiply = void (*)(const uint8_t*, int64_t, int64_t, const uint8_t*, int64_t, void*);

struct Kernel {
  Multiply multiply;
  bool matrices;
};

Kernel kernel8() {
  const bool wide = fastgen::instruction_set() == fastgen::InstructionSet::kAvx512;
  STD_TORCH_CHECK(wide && fastgen::has_matrices(), "int8_linear: this processor does not have AMX");
  return {&matrices8::multiply, true};
}

Kernel kernel16() {
  const bool wide = fastgen::instruction_set() == fastgen::InstructionSet::kAvx512;
  STD_TORCH_CHECK(wide && __builtin_cpu_supports("avx512bf16"),
                  "bf16_linear: this processor does not have AVX-512 BF16");
  return fastgen::has_matrices() ? Kernel{&matrices16::multiply, true} : Kernel{&vectors16::multiply, false};
}

// A mask of the first `count` of 16 elements.
inline __mmask16 mask(int64_t count) { return count < 16 ? static_cast<__mmask16>((1u << count) - 1) : 0xffff; }

// The smallest and the largest value of a row, or 0, and whether all of them are finite.
struct Range {
  float low = 0.0f, high = 0.0f;
  bool finite = true;
};

FASTGEN_AVX512 Range range(const float* x, int64_t count) {
  __m512 low = _mm512_setzero_ps(), high = low, all = low;
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 some = mask(count - i);
    const __m512 values = _mm512_maskz_loadu_ps(some, x + i);
    low = _mm512_min_ps(low, values);
    high = _mm512_max_ps(high, values);
    all = _mm512_fmadd_ps(values, _mm512_setzero_ps(), all);  // NaN from the first value on that is not finite
  }
  return {_mm512_reduce_min_ps(low), _mm512_reduce_max_ps(high), _mm512_reduce_add_ps(all) == 0.0f};
}

// What 8 bits stand for: scale * (value - zero).
struct Affine {
  float scale;
  int32_t zero;
};

// A row of inputs in 8 unsigned bits, the smallest value (or 0) as 0 and the largest (or 0) as 255.
FASTGEN_AVX512 Affine quantize(const float* x, int64_t count, uint8_t* to) {
  const Range found = range(x, count);
  const float scale = found.high / 255.0f - found.low / 255.0f;
  const float factor = found.finite && scale > 0.0f ? 1.0f / scale : 0.0f;
  const __m512i zero = _mm512_cvtps_epi32(_mm512_set1_ps(-found.low * factor));
  const __m512 factors = _mm512_set1_ps(factor);
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 some = mask(count - i);
    const __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), factors));
    // Rounded twice, the largest may come to 256: it saturates.
    _mm_mask_storeu_epi8(to + i, some, _mm512_cvtusepi32_epi8(_mm512_add_epi32(value, zero)));
  }
  return {found.finite ? scale : kNaN, _mm_cvtsi128_si32(_mm512_castsi512_si128(zero))};
}

// The inputs of an output in 8 signed bits; what these are multiples of, and their sum.
FASTGEN_AVX512 void quantize_output(const float* x, int64_t count, uint8_t* to, float* scale, int32_t* total) {
  const Range found = range(x, count);
  const float largest = std::max(found.high, -found.low);
  const __m512 factor = _mm512_set1_ps(found.finite && largest > 0.0f ? 127.0f / largest : 0.0f);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 some = mask(count - i);
    const __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), factor));
    _mm_mask_storeu_epi8(to + i, some, _mm512_cvtepi32_epi8(value));
    sum = _mm512_add_epi32(sum, value);
  }
  *scale = found.finite ? largest / 127.0f : kNaN;
  *total = _mm512_reduce_add_epi32(sum);
}

// A row in bfloat16.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) void round16(const float* x, int64_t count,
                                                                             uint8_t* to) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 some = mask(count - i);
    const __m256i values = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, x + i));
    _mm256_mask_storeu_epi16(to + 2 * i, some, values);
  }
}

// A line of each of 16 outputs, `stride` bytes apart, as a tile.
FASTGEN_AVX512 void lay_out(const uint8_t* lines, int64_t stride, uint8_t* tile) {
  fastgen::transpose16(lines, stride / 4, tile, kTileLine / 4);
}

inline int64_t padded(int64_t bytes) { return (bytes + kTileLine - 1) / kTileLine * kTileLine; }

// The weight in panels. `convert(row, output, to)` writes an output's inputs in the type that they are stored in.
template <class Convert>
Tensor pack(const Tensor& weight, int64_t bytes, const Convert& convert) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1), panels = (outputs + kPanel - 1) / kPanel;
  const int64_t output_stride = weight.stride(0), input_stride = weight.stride(1), depth = padded(inputs * bytes);
  Tensor packed = torch::stable::new_empty(weight, {panels, depth, kPanel}, ScalarType::Byte);
  const float* from = static_cast<const float*>(weight.const_data_ptr());
  uint8_t* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> lines(kTileRows * depth);  // of a tile's outputs; zeros behind the last input
    std::vector<float> rows(input_stride == 1 ? 0 : kPanel * inputs);
    constexpr int64_t kSome = kTileLine / sizeof(float);  // inputs at a time: a cache line of each output
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanel, valid = std::min(kPanel, outputs - first);
      const float* some = from + first * output_stride;
      int64_t stride = output_stride;
      if (input_stride != 1) {
        for (int64_t k = 0; k < inputs; k += kSome) {
          const int64_t last = std::min(k + kSome, inputs);
          for (int64_t n = 0; n < valid; ++n) {
            for (int64_t i = k; i < last; ++i) rows[n * inputs + i] = some[n * output_stride + i * input_stride];
          }
        }
        some = rows.data();
        stride = inputs;
      }
      for (int64_t side = 0; side < kPanel; side += kTileRows) {
        for (int64_t n = 0; n < kTileRows; ++n) {
          uint8_t* line = lines.data() + n * depth;
          if (side + n < valid) {
            convert(some + (side + n) * stride, first + side + n, line);
          } else {
            std::fill(line, line + depth, 0);
          }
        }
        uint8_t* tile = to + panel * depth * kPanel + side / kTileRows * kTileBytes;
        for (int64_t k = 0; k < depth; k += kTileLine) lay_out(lines.data() + k, depth, tile + k * kPanel);
      }
    }
  });
  return packed;
}

void check_weight(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::Float && weight.size(0) > 0 &&
                      weight.size(1) > 0 && weight.size(1) <= kMaxInputs,
                  "the weight must be [outputs, inputs] of float32, with at most ", kMaxInputs, " inputs");
}

std::tuple<Tensor, Tensor, Tensor> pack_int8_linear(Tensor weight) {
  check_weight(weight);
  kernel8();
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  Tensor scales = torch::stable::new_empty(weight, {outputs});
  Tensor totals = torch::stable::new_empty(weight, {outputs}, ScalarType::Int);
  float* scale = static_cast<float*>(scales.mutable_data_ptr());
  int32_t* total = static_cast<int32_t*>(totals.mutable_data_ptr());
  Tensor packed = pack(weight, 1, [&](const float* row, int64_t n, uint8_t* to) {
    quantize_output(row, inputs, to, scale + n, total + n);
  });
  return {packed, scales, totals};
}

Tensor pack_bf16_linear(Tensor weight) {
  check_weight(weight);
  kernel16();
  const int64_t inputs = weight.size(1);
  return pack(weight, 2, [&](const float* row, int64_t, uint8_t* to) { round16(row, inputs, to); });
}

void check_product(const Tensor& x, const Tensor& packed, int64_t bytes, const std::optional<Tensor>& bias,
                   int64_t outputs) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.size(1) > 0 &&
                      (x.stride(1) == 1 || x.size(1) == 1),
                  "x must be [rows, inputs] of float32, with the inputs next to each other");
  STD_TORCH_CHECK(packed.dim() == 3 && packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
                      packed.size(1) == padded(x.size(1) * bytes) && packed.size(2) == kPanel && outputs > 0 &&
                      packed.size(0) == (outputs + kPanel - 1) / kPanel,
                  "the weight was not packed for this product");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == outputs && bias->is_contiguous() &&
                            bias->scalar_type() == ScalarType::Float),
                  "the bias must be [outputs] of float32");
}

// `convert(row, number, to)` makes the inputs of a row; `finish(sums, row, rows, output, count, y)` makes the results of
// some rows, `count` outputs of each, of the sums of their products.
template <class Sum, class Convert, class Finish>
Tensor multiply(const Tensor& x, const Tensor& packed, int64_t outputs, const Kernel& kernel, const Convert& convert,
                const Finish& finish) {
  const int64_t rows = x.size(0), panels = packed.size(0), depth = packed.size(1), stride = x.stride(0);
  Tensor y = torch::stable::new_empty(x, {rows, outputs});
  const float* from = static_cast<const float*>(x.const_data_ptr());
  const uint8_t* weights = static_cast<const uint8_t*>(packed.const_data_ptr());
  float* to = static_cast<float*>(y.mutable_data_ptr());
  std::unique_ptr<uint8_t[]> inputs(new uint8_t[rows * depth]);
  torch::stable::parallel_for(0, rows, std::max<int64_t>(kGrain / depth, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* some = inputs.get() + row * depth;
      std::fill(some + depth - kTileLine, some + depth, 0);  // what is behind the last input
      convert(from + row * stride, row, some);
    }
  });
  // Blocks of nearly the same size, in whole tiles, so that threads have as much to do as each other.
  const int64_t blocks = (rows + kBlock - 1) / kBlock, tiles = (rows + kRows - 1) / kRows;
  const int64_t most = std::max<int64_t>(kGroupBytes / (depth * kPanel), 1);
  torch::stable::parallel_for(0, panels * blocks, 1, [&](int64_t begin, int64_t end) {
    alignas(kTileLine) Sum sums[kRows * kPanel];
    int64_t configured = 0;
    for (int64_t task = begin, group = 0; task < end; task += group) {
      const int64_t start = task % panels;
      group = std::min({most, end - task, panels - start});
      const int64_t block = task / panels;
      const int64_t first = tiles * block / blocks * kRows, last = std::min(tiles * (block + 1) / blocks * kRows, rows);
      for (int64_t row = first; row < last; row += kRows) {
        const int64_t some = std::min(kRows, last - row);
        if (kernel.matrices && some != configured) fastgen::configure_matrices(configured = some);
        for (int64_t panel = start; panel < start + group; ++panel) {
          const int64_t output = panel * kPanel, count = std::min(kPanel, outputs - output);
          kernel.multiply(inputs.get() + row * depth, depth, some, weights + panel * depth * kPanel, depth, sums);
          finish(sums, row, some, output, count, to + row * outputs + output);
        }
      }
    }
    if (kernel.matrices) fastgen::release_matrices();
  });
  return y;
}

// sums[rows, kPanel] -> y[rows, count], the rows of which are `stride` apart.
FASTGEN_AVX512 void finish8(const int32_t* sums, const Affine* affine, int64_t rows, const int32_t* totals,
                            const float* scales, const float* bias, int64_t count, float* y, int64_t stride) {
  for (int64_t n = 0; n < count; n += 16) {
    const __mmask16 some = mask(count - n);
    const __m512i total = _mm512_maskz_loadu_epi32(some, totals + n);
    const __m512 scale = _mm512_maskz_loadu_ps(some, scales + n);
    const __m512 start = bias != nullptr ? _mm512_maskz_loadu_ps(some, bias + n) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; ++r) {
      const __m512i shift = _mm512_mullo_epi32(total, _mm512_set1_epi32(affine[r].zero));
      const __m512i sum = _mm512_sub_epi32(_mm512_loadu_si512(sums + r * kPanel + n), shift);
      const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(affine[r].scale));
      _mm512_mask_storeu_ps(y + r * stride + n, some, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, start));
    }
  }
}

FASTGEN_AVX512 void finish16(const float* sums, int64_t rows, const float* bias, int64_t count, float* y,
                             int64_t stride) {
  for (int64_t n = 0; n < count; n += 16) {
    const __mmask16 some = mask(count - n);
    const __m512 start = bias != nullptr ? _mm512_maskz_loadu_ps(some, bias + n) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; ++r) {
      _mm512_mask_storeu_ps(y + r * stride + n, some, _mm512_add_ps(_mm512_loadu_ps(sums + r * kPanel + n), start));
    }
  }
}

Tensor int8_linear(Tensor x, Tensor packed, Tensor scales, Tensor totals, std::optional<Tensor> bias, int64_t outputs) {
  check_product(x, packed, 1, bias, outputs);
  STD_TORCH_CHECK(scales.numel() == outputs && scales.scalar_type() == ScalarType::Float && scales.is_contiguous() &&
                      totals.numel() == outputs && totals.scalar_type() == ScalarType::Int && totals.is_contiguous(),
                  "the weight was not packed for this product");
  const int64_t inputs = x.size(1);
  const float* scale = static_cast<const float*>(scales.const_data_ptr());
  const int32_t* total = static_cast<const int32_t*>(totals.const_data_ptr());
  const float* start = bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  std::unique_ptr<Affine[]> affine(new Affine[x.size(0)]);
  return multiply<int32_t>(
      x, packed, outputs, kernel8(),
      [&](const float* row, int64_t number, uint8_t* to) { affine[number] = quantize(row, inputs, to); },
      [&](const int32_t* sums, int64_t row, int64_t some, int64_t n, int64_t count, float* y) {
        const float* from = start == nullptr ? nullptr : start + n;
        finish8(sums, affine.get() + row, some, total + n, scale + n, from, count, y, outputs);
      });
}

Tensor bf16_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t outputs) {
  check_product(x, packed, 2, bias, outputs);
  const int64_t inputs = x.size(1);
  const float* start = bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  return multiply<float>(
      x, packed, outputs, kernel16(),
      [&](const float* row, int64_t, uint8_t* to) { round16(row, inputs, to); },
      [&](const float* sums, int64_t, int64_t some, int64_t n, int64_t count, float* y) {
        finish16(sums, some, start == nullptr ? nullptr : start + n, count, y, outputs);
      });
}

#endif

}  // namespace

#ifdef FASTGEN_QUANTIZED
STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("pack_int8_linear", TORCH_BOX(&pack_int8_linear));
  library.impl("int8_linear", TORCH_BOX(&int8_linear));
  library.impl("pack_bf16_linear", TORCH_BOX(&pack_bf16_linear));
  library.impl("bf16_linear", TORCH_BOX(&bf16_linear));
}
#endif
