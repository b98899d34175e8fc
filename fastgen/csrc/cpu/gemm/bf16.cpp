// GEMM on bfloat16 weights with activations rounded to bfloat16, if the processor multiplies those faster than float32:
// in AMX tiles, or with the vector instructions of AVX-512 BF16. The schemas are defined in
// fastgen/ops/linear/__init__.py.
//
// A weight is packed in tiles of 16 outputs and 32 inputs, in the order of those instructions: a line of a tile holds
// two inputs of each of its outputs. A panel is two tiles wide. Inputs are rounded row by row, so that a row's result
// does not depend on the rest of the batch; but sums of more than 16 rows are rounded in another order than those of
// fewer.
#include "../isa.h"
#include "amx.h"
#include "operands.h"

#include <array>
#include <memory>
#include <utility>

#ifdef FASTGEN_AMX

namespace {

using namespace fastgen;

constexpr int64_t kPanel = 2 * kAmxRows;  // outputs of a panel
constexpr int64_t kRows = 2 * kAmxRows;   // rows per multiplication
// Rows that a thread multiplies with all panels before it continues: their inputs stay in the second-level cache.
constexpr int64_t kBlock = 128;
// Weights that all rows of a block use, some rows at a time: they also stay in the second-level cache.
constexpr int64_t kGroupBytes = 1 << 18;
// Bytes of weights that a decode step prefetches: two iterations of its loop ahead.
constexpr int64_t kAhead = 8 * kAmxBytes;
// Elements to round that pay for waking another thread.
constexpr int64_t kGrain = 1 << 16;

#define FASTGEN_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512bf16")))

// Rows that are multiplied together in vectors: their sums, two vectors each, stay in registers.
constexpr int64_t kTogether = 8;

template <int kCount>
FASTGEN_AVX512_BF16 void tile(const uint8_t* x, int64_t stride, const uint8_t* panel, int64_t depth, float* sums) {
  __m512 total[kCount][2];
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) total[r][0] = total[r][1] = _mm512_setzero_ps();
  // A tile of weights is 16 outputs wide, and holds 64 bytes of the inputs.
  for (int64_t block = 0; block < depth; block += kAmxLine) {
    const uint8_t* weights = panel + block * kPanel;
    for (int64_t k = 0; k < kAmxLine; k += 4) {
      const __m512i first = _mm512_loadu_si512(weights + k * kAmxRows);
      const __m512i second = _mm512_loadu_si512(weights + kAmxBytes + k * kAmxRows);
#pragma GCC unroll 8
      for (int r = 0; r < kCount; ++r) {
        int32_t two;
        std::memcpy(&two, x + r * stride + block + k, 4);
        const __m512i value = _mm512_set1_epi32(two);
        total[r][0] = _mm512_dpbf16_ps(total[r][0], (__m512bh)value, (__m512bh)first);
        total[r][1] = _mm512_dpbf16_ps(total[r][1], (__m512bh)value, (__m512bh)second);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
    _mm512_storeu_ps(sums + r * kPanel, total[r][0]);
    _mm512_storeu_ps(sums + r * kPanel + kAmxRows, total[r][1]);
  }
}

template <size_t... kCounts>
constexpr auto make_tiles(std::index_sequence<kCounts...>) {
  return std::array{&tile<static_cast<int>(kCounts) + 1>...};
}

constexpr auto kTiles = make_tiles(std::make_index_sequence<kTogether>());

void multiply_in_vectors(const uint8_t* x, int64_t stride, int64_t rows, const uint8_t* panel, int64_t depth, float* sums) {
  const RowTiles tiles(rows, kTogether);
  for (int64_t i = 0; i < tiles.count; ++i) {
    kTiles[tiles.size(i) - 1](x + tiles.begin(i) * stride, stride, panel, depth, sums + tiles.begin(i) * kPanel);
  }
}

// Configures the tiles of this thread for this many rows.
void configure(int64_t count) {
  const int64_t upper = std::min(count, kAmxRows), lower = count > kAmxRows ? count - kAmxRows : count;
  configure_tiles({upper, upper, lower, lower, upper, lower, kAmxRows, kAmxRows},
                           {kAmxLine, kAmxLine, kAmxLine, kAmxLine, kAmxLine, kAmxLine, kAmxLine, kAmxLine});
}

// Tiles 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights. Up to 16 rows: the sums of alternate lines of inputs are
// separate, so that an instruction need not wait for the previous one. More rows: tiles 2, 3 and 5 have the rows from
// the 17th on.
__attribute__((target("amx-tile,amx-bf16,avx512f"))) void multiply_in_tiles(const uint8_t* x, int64_t stride, int64_t rows,
                                                                            const uint8_t* panel, int64_t depth,
                                                                            float* sums) {
  constexpr int64_t kStride = kPanel * sizeof(float);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (rows > kAmxRows) {
    const uint8_t* below = x + kAmxRows * stride;
    for (int64_t k = 0; k < depth; k += kAmxLine, panel += 2 * kAmxBytes) {
      _tile_loadd(4, x + k, stride);
      _tile_loadd(6, panel, kAmxLine);
      _tile_loadd(7, panel + kAmxBytes, kAmxLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, below + k, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + kAmxRows, kStride);
    _tile_stored(2, sums + kAmxRows * kPanel, kStride);
    _tile_stored(3, sums + kAmxRows * kPanel + kAmxRows, kStride);
    return;
  }
  int64_t k = 0;
  for (; k + kAmxLine < depth; k += 2 * kAmxLine, panel += 4 * kAmxBytes) {
    for (int64_t i = 0; i < 4 * kAmxBytes; i += kAmxLine) __builtin_prefetch(panel + kAhead + i, 0, 2);
    _tile_loadd(4, x + k, stride);
    _tile_loadd(6, panel, kAmxLine);
    _tile_loadd(7, panel + kAmxBytes, kAmxLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + k + kAmxLine, stride);
    _tile_loadd(6, panel + 2 * kAmxBytes, kAmxLine);
    _tile_loadd(7, panel + 3 * kAmxBytes, kAmxLine);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  if (k < depth) {
    _tile_loadd(4, x + k, stride);
    _tile_loadd(6, panel, kAmxLine);
    _tile_loadd(7, panel + kAmxBytes, kAmxLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  alignas(kAmxLine) float odd[kAmxRows * kPanel];
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kAmxRows, kStride);
  _tile_stored(2, odd, kStride);
  _tile_stored(3, odd + kAmxRows, kStride);
  for (int64_t i = 0; i < rows * kPanel; ++i) sums[i] += odd[i];
}

void check_processor() {
  STD_TORCH_CHECK(has_avx512_bf16(), "bf16_gemm: this processor does not have AVX-512 BF16");
}

// Rounds a row to bfloat16.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) void round_row(const float* x, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 some = first16(count - i);
    const __m256i values = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, x + i));
    _mm256_mask_storeu_epi16(to + 2 * i, some, values);
  }
}

// Bytes of a row in bfloat16, in whole lines of a tile.
int64_t depth_of(int64_t inputs) { return quotient(inputs * 2, kAmxLine) * kAmxLine; }

Tensor pack_bf16(Tensor weight) {
  Arguments("pack_bf16").reads(weight);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::Float && weight.size(0) > 0 &&
                      weight.size(1) > 0,
                  "the weight must be [outputs, inputs] of float32");
  check_processor();
  const int64_t outputs = weight.size(0), inputs = weight.size(1), panels = quotient(outputs, kPanel);
  const int64_t depth = depth_of(inputs);
  Tensor packed = torch::stable::new_empty(weight, {panels, depth, kPanel}, ScalarType::Byte);
  const void* from = weight.const_data_ptr();
  uint8_t* to = numbers_of<uint8_t>(packed);
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    const Aligned<uint8_t> lines(kAmxRows * depth);  // of a tile's outputs; zeros after the last input
    std::fill_n(lines.data(), kAmxRows * depth, uint8_t{0});
    std::vector<float> row(inputs);
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t side = 0; side < 2; ++side) {
        const int64_t first = panel * kPanel + side * kAmxRows;
        for (int64_t n = 0; n < kAmxRows; ++n) {
          uint8_t* line = lines.data() + n * depth;
          if (first + n < outputs) {
            read_line(from, (first + n) * weight.stride(0), inputs, weight.stride(1), nullptr, ScalarType::Float,
                               row.data());
            round_row(row.data(), inputs, line);
          } else {
            std::fill_n(line, depth, uint8_t{0});
          }
        }
        uint8_t* tile = to + panel * depth * kPanel + side * kAmxBytes;
        for (int64_t k = 0; k < depth; k += kAmxLine) {
          transpose16(lines.data() + k, depth / 4, tile + k * kPanel, kAmxLine / 4);
        }
      }
    }
  });
  return packed;
}

void check(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  Arguments("bf16_gemm").reads(x, packed, bias);
  check_x("bf16_gemm", x, x.scalar_type() == ScalarType::Float);
  STD_TORCH_CHECK(packed.dim() == 3 && packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
                      packed.size(1) == depth_of(x.size(1)) && packed.size(2) == kPanel && outputs > 0 &&
                      packed.size(0) == quotient(outputs, kPanel),
                  "bf16_gemm: the weight was not packed for this product");
  check_bias("bf16_gemm", bias, outputs, !bias || bias->scalar_type() == ScalarType::Float);
  check_processor();
}

// sums[rows, kPanel] -> y[rows, count], the rows of which are `stride` apart.
FASTGEN_AVX512 void store(const float* sums, int64_t rows, const float* bias, int64_t count, float* y, int64_t stride) {
  for (int64_t n = 0; n < count; n += 16) {
    const __mmask16 some = first16(count - n);
    const __m512 start = bias != nullptr ? _mm512_maskz_loadu_ps(some, bias + n) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; ++r) {
      _mm512_mask_storeu_ps(y + r * stride + n, some, _mm512_add_ps(_mm512_loadu_ps(sums + r * kPanel + n), start));
    }
  }
}

// Returns x in bfloat16, [rows, depth bytes], padded with zeros.
std::unique_ptr<uint8_t[]> rounded(const Tensor& x, int64_t depth) {
  const int64_t rows = x.size(0), inputs = x.size(1), stride = x.stride(0);
  const float* from = numbers_of<const float>(x);
  std::unique_ptr<uint8_t[]> to(new uint8_t[rows * depth]);
  parallel_for(0, rows, std::max<int64_t>(kGrain / depth, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* line = to.get() + row * depth;
      std::fill(line + depth - kAmxLine, line + depth, 0);
      round_row(from + row * stride, inputs, line);
    }
  });
  return to;
}

Tensor bf16_gemm(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t outputs) {
  check(x, packed, bias, outputs);
  const bool in_tiles = has_amx();
  const int64_t rows = x.size(0), panels = packed.size(0), depth = packed.size(1);
  const float* biases = bias ? numbers_of<const float>(*bias) : nullptr;
  Tensor y = torch::stable::new_empty(x, {rows, outputs});
  const std::unique_ptr<uint8_t[]> inputs = rounded(x, depth);
  const uint8_t* weights = numbers_of<const uint8_t>(packed);
  float* to = numbers_of<float>(y);
  const auto multiply = in_tiles ? &multiply_in_tiles : &multiply_in_vectors;
  // Blocks of nearly the same size, in whole tiles, so that threads have equal work.
  const int64_t blocks = quotient(rows, kBlock), tiles = quotient(rows, kRows);
  const int64_t most = std::max<int64_t>(kGroupBytes / (depth * kPanel), 1);
  parallel_for(0, panels * blocks, 1, [&](int64_t begin, int64_t end) {
    alignas(kAmxLine) float sums[kRows * kPanel];
    int64_t configured = 0;
    for (int64_t task = begin, group = 0; task < end; task += group) {
      const int64_t start = task % panels, block = task / panels;
      group = std::min({most, end - task, panels - start});
      const int64_t first = tiles * block / blocks * kRows, last = std::min(tiles * (block + 1) / blocks * kRows, rows);
      for (int64_t row = first; row < last; row += kRows) {
        const int64_t some = std::min(kRows, last - row);
        if (in_tiles && some != configured) configure(configured = some);
        for (int64_t panel = start; panel < start + group; ++panel) {
          const int64_t output = panel * kPanel, count = std::min(kPanel, outputs - output);
          multiply(inputs.get() + row * depth, depth, some, weights + panel * depth * kPanel, depth, sums);
          store(sums, some, biases == nullptr ? nullptr : biases + output, count, to + row * outputs + output, outputs);
        }
      }
    }
    if (in_tiles) release_tiles();
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("pack_bf16", TORCH_BOX(&pack_bf16));
  library.impl("bf16_gemm", TORCH_BOX(&bf16_gemm));
}

#endif
