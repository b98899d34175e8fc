// Linear layers on weights in bfloat16, where the processor multiplies those faster than float32: in AMX tiles
// of AMX, or with the vector instructions of AVX-512 BF16. The schemas are defined in fastgen/ops/quantized_linear.py.
//
// A weight is stored in tiles of 16 outputs and 32 inputs, in the order in which those instructions take it: a line of a
// tile holds two inputs of each of its outputs. A panel is two tiles wide. Inputs are rounded row by row, so that a row's
// result does not depend on what else is in the batch; the sums are rounded in another order with more than 16 rows than
// with fewer.
#include "checks.h"
#include "instruction_set.h"
#include "amx.h"
#include "parallel.h"
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

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTileRows = 16;  // outputs of a tile, and rows that are multiplied with it in AMX tiles
constexpr int64_t kLine = 64;      // bytes of a line of a tile
constexpr int64_t kBytes = 2;      // of a number
constexpr int64_t kTileBytes = kTileRows * kLine;
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

#ifdef FASTGEN_AMX

#define FASTGEN_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

namespace vectors16 {
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512bf16")))
#define FASTGEN_SUM float
#define FASTGEN_ADD(sums, x, weight) \
  _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sums), (__m512bh)(x), (__m512bh)(weight)))
#include "quantized_linear/vectors.h"
}  // namespace vectors16

// The registers of this thread, for so many rows (see amx.h).
inline void configure(int64_t count) {
  const int64_t upper = std::min(count, kTileRows), lower = count > kTileRows ? count - kTileRows : count;
  fastgen::configure_tiles({upper, upper, lower, lower, upper, lower, kTileRows, kTileRows},
                           {kLine, kLine, kLine, kLine, kLine, kLine, kLine, kLine});
}

namespace amx16 {
#define FASTGEN_TARGET __attribute__((target("amx-tile,amx-bf16,avx512f")))
#define FASTGEN_SUM float
#define FASTGEN_ADD(sums, x, weight) _tile_dpbf16ps(sums, x, weight)
#include "quantized_linear/amx.h"
}  // namespace amx16

// x[rows, depth bytes] times a panel, into sums[rows, kPanel].
using Multiply = void (*)(const uint8_t*, int64_t, int64_t, const uint8_t*, int64_t, void*);

struct Kernel {
  Multiply multiply;
  bool uses_amx;
};

Kernel kernel16() {
  const bool wide = fastgen::instruction_set() == fastgen::InstructionSet::kAvx512;
  STD_TORCH_CHECK(wide && __builtin_cpu_supports("avx512bf16"),
                  "bf16_linear: this processor does not have AVX-512 BF16");
  return fastgen::has_amx() ? Kernel{&amx16::multiply, true} : Kernel{&vectors16::multiply, false};
}

// A mask of the first `count` of 16 elements.
inline __mmask16 mask(int64_t count) { return count < 16 ? static_cast<__mmask16>((1u << count) - 1) : 0xffff; }

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
  fastgen::transpose16(lines, stride / 4, tile, kLine / 4);
}

inline int64_t padded(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

Tensor pack_bf16_linear(Tensor weight) {
  fastgen::Arguments("pack_bf16_linear").reads(weight);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::Float && weight.size(0) > 0 &&
                      weight.size(1) > 0,
                  "the weight must be [outputs, inputs] of float32");
  kernel16();
  const int64_t outputs = weight.size(0), inputs = weight.size(1), panels = (outputs + kPanel - 1) / kPanel;
  const int64_t output_stride = weight.stride(0), input_stride = weight.stride(1), depth = padded(inputs * kBytes);
  Tensor packed = torch::stable::new_empty(weight, {panels, depth, kPanel}, ScalarType::Byte);
  const float* from = static_cast<const float*>(weight.const_data_ptr());
  uint8_t* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  fastgen::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> lines(kTileRows * depth);  // of a tile's outputs; zeros behind the last input
    std::vector<float> rows(input_stride == 1 ? 0 : kPanel * inputs);
    constexpr int64_t kSome = kLine / sizeof(float);  // inputs at a time: a cache line of each output
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
            round16(some + (side + n) * stride, inputs, line);
          } else {
            std::fill(line, line + depth, 0);
          }
        }
        uint8_t* tile = to + panel * depth * kPanel + side / kTileRows * kTileBytes;
        for (int64_t k = 0; k < depth; k += kLine) lay_out(lines.data() + k, depth, tile + k * kPanel);
      }
    }
  });
  return packed;
}

void check_product(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  fastgen::Arguments("bf16_linear").reads(x, packed, bias);
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.size(1) > 0 &&
                      (x.stride(1) == 1 || x.size(1) == 1),
                  "x must be [rows, inputs] of float32, with the inputs next to each other");
  STD_TORCH_CHECK(packed.dim() == 3 && packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
                      packed.size(1) == padded(x.size(1) * kBytes) && packed.size(2) == kPanel && outputs > 0 &&
                      packed.size(0) == fastgen::quotient(outputs, kPanel),
                  "the weight was not packed for this product");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == outputs && bias->is_contiguous() &&
                            bias->scalar_type() == ScalarType::Float),
                  "the bias must be [outputs] of float32");
}

// sums[rows, kPanel] -> y[rows, count], the rows of which are `stride` apart.
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

Tensor bf16_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t outputs) {
  check_product(x, packed, bias, outputs);
  const Kernel kernel = kernel16();
  const int64_t rows = x.size(0), panels = packed.size(0), depth = packed.size(1), stride = x.stride(0);
  const float* biases = bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  Tensor y = torch::stable::new_empty(x, {rows, outputs});
  const float* from = static_cast<const float*>(x.const_data_ptr());
  const uint8_t* weights = static_cast<const uint8_t*>(packed.const_data_ptr());
  float* to = static_cast<float*>(y.mutable_data_ptr());
  std::unique_ptr<uint8_t[]> inputs(new uint8_t[rows * depth]);
  fastgen::parallel_for(0, rows, std::max<int64_t>(kGrain / depth, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* some = inputs.get() + row * depth;
      std::fill(some + depth - kLine, some + depth, 0);  // what is behind the last input
      round16(from + row * stride, x.size(1), some);
    }
  });
  // Blocks of nearly the same size, in whole tiles, so that threads have as much to do as each other.
  const int64_t blocks = (rows + kBlock - 1) / kBlock, tiles = (rows + kRows - 1) / kRows;
  const int64_t most = std::max<int64_t>(kGroupBytes / (depth * kPanel), 1);
  fastgen::parallel_for(0, panels * blocks, 1, [&](int64_t begin, int64_t end) {
    alignas(kLine) float sums[kRows * kPanel];
    int64_t configured = 0;
    for (int64_t task = begin, group = 0; task < end; task += group) {
      const int64_t start = task % panels;
      group = std::min({most, end - task, panels - start});
      const int64_t block = task / panels;
      const int64_t first = tiles * block / blocks * kRows, last = std::min(tiles * (block + 1) / blocks * kRows, rows);
      for (int64_t row = first; row < last; row += kRows) {
        const int64_t some = std::min(kRows, last - row);
        if (kernel.uses_amx && some != configured) configure(configured = some);
        for (int64_t panel = start; panel < start + group; ++panel) {
          const int64_t output = panel * kPanel, count = std::min(kPanel, outputs - output);
          kernel.multiply(inputs.get() + row * depth, depth, some, weights + panel * depth * kPanel, depth, sums);
          const float* some_biases = biases == nullptr ? nullptr : biases + output;
          finish16(sums, some, some_biases, count, to + row * outputs + output, outputs);
        }
      }
    }
    if (kernel.uses_amx) fastgen::release_tiles();
  });
  return y;
}

#endif

}  // namespace

#ifdef FASTGEN_AMX
STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("pack_bf16_linear", TORCH_BOX(&pack_bf16_linear));
  library.impl("bf16_linear", TORCH_BOX(&bf16_linear));
}
#endif
