// Linear layers in float32 in the matrix registers of AMX, which multiply bfloat16. The schema is defined in
// fastgen/ops/split_linear.py.
//
// A float32 is the sum of three numbers in bfloat16, its parts: 24 bits of 8 each. Of the nine products of the parts of
// two numbers, the six largest are added up in float32. The others are below the last bit of the product (Henry, Tang and
// Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019,
// arXiv 1904.06376). The instruction takes parts, and makes sums, that are too small to be normal as zero: numbers below
// about 2**-102 lose bits, and those below 2**-126 count as zero.
//
// Some thousand rows are split at a time, into tiles. A thread splits a block of its part of the weight into its cache,
// takes these rows through that, and goes on to the next block. So a weight needs no copy. The rows are what the
// instruction takes line by line, and the weight what it takes in pairs of inputs, so that sums come out as rows.
//
// What is infinite or not a number has no parts, and parts of a sum may overflow where the sum does not. So results
// that are not finite are computed again, one by one.
#include "instruction_set.h"
#include "matrix_registers.h"
#include "parallel.h"
#include "plan.h"
#include "transpose.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>

#ifdef FASTGEN_MATRICES

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTileRows = fastgen::kMatrixRows;
constexpr int64_t kTileLine = fastgen::kMatrixBytes;
constexpr int64_t kTileBytes = kTileRows * kTileLine;
constexpr int64_t kParts = 3;
constexpr int64_t kInputs = 32;  // of a tile, in bfloat16
constexpr int64_t kStepBytes = kParts * kTileBytes;  // the parts of 16 rows, or outputs, and 32 inputs
constexpr int64_t kPair = 2 * kTileRows;  // rows, and outputs, that are multiplied in one go
// What a thread keeps in its second-level cache: of the weight, so many pairs of tiles and steps of inputs; and, where
// there are more steps, the sums of so many rows with these.
constexpr int64_t kOutputPairs = 6;
constexpr int64_t kSteps = 24;
constexpr int64_t kRows = 1280;
// Rows whose parts are in memory at a time.
constexpr int64_t kRowsAtOnce = 2048;
// How far ahead of the split a weight is asked for.
constexpr int64_t kStepsAhead = 4;
// Numbers that are split before it pays to wake another thread.
constexpr int64_t kGrain = 1 << 15;

#define FASTGEN_SPLIT __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")))

inline int64_t quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Aligned {
 public:
  explicit Aligned(int64_t bytes) : first_(static_cast<char*>(::operator new(bytes, std::align_val_t(64)))) {}
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { ::operator delete(first_, std::align_val_t(64)); }
  char* data() const { return first_; }

 private:
  char* first_;
};

FASTGEN_SPLIT __mmask16 first_of(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// The parts of 32 numbers, of which there are `count`, to lines that are `stride` bytes apart: number i next to number
// i + 16. Each part is the nearest in bfloat16 to what the parts before it leave. What is not finite has a part that is
// not a number.
FASTGEN_SPLIT void split(const float* from, int64_t count, char* to, int64_t stride) {
  __m512 low = _mm512_maskz_loadu_ps(first_of(count), from);
  __m512 high = _mm512_maskz_loadu_ps(first_of(count - 16), from + 16);
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  // Others than this one may be rounded to what is a number.
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
  low = _mm512_mask_mov_ps(low, _mm512_cmp_ps_mask(low, low, _CMP_UNORD_Q), nan);
  high = _mm512_mask_mov_ps(high, _mm512_cmp_ps_mask(high, high, _CMP_UNORD_Q), nan);
#pragma GCC unroll 3
  for (int64_t part = 0; part < kParts; ++part) {
    const __m512i first = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(low), half), upper);
    const __m512i second = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(high), half), upper);
    _mm512_store_si512(to + part * stride, _mm512_or_si512(_mm512_srli_epi32(first, 16), second));
    low = _mm512_sub_ps(low, _mm512_castsi512_ps(first));
    high = _mm512_sub_ps(high, _mm512_castsi512_ps(second));
  }
}

struct Problem {
  const float *x, *weight, *bias;
  float* y;
  int64_t rows, inputs, outputs, x_stride, weight_stride;
  int64_t steps() const { return quotient(inputs, kInputs); }
};

// Where the parts of rows are: [pairs of tiles][steps][parts][2][16 rows][32 inputs], in the order in which `multiply`
// reads them. A last tile that is alone is one of one.
struct Rows {
  int64_t tiles, steps;
  bool has_both(int64_t pair) const { return 2 * pair + 1 < tiles; }
  // Bytes from one part to the next, and from one step to the next.
  int64_t part(int64_t pair) const { return has_both(pair) ? 2 * kTileBytes : kTileBytes; }
  int64_t stride(int64_t pair) const { return kParts * part(pair); }
  int64_t begin(int64_t tile) const { return tile / 2 * 2 * steps * kStepBytes + tile % 2 * kTileBytes; }
};

// A tile of rows of x. What is behind the last row or input is zero.
FASTGEN_TARGET void split_rows(const Problem& p, const Rows& rows, int64_t tile, char* parts) {
  const int64_t part = rows.part(tile / 2), stride = rows.stride(tile / 2);
  char* line = parts + rows.begin(tile) + (kParts - 1) * part;  // the smallest part comes first
  for (int64_t row = tile * kTileRows; row < (tile + 1) * kTileRows; ++row, line += kTileLine) {
    const float* from = row < p.rows ? p.x + row * p.x_stride : nullptr;
    for (int64_t step = 0; step < rows.steps; ++step) {
      split(from ? from + step * kInputs : p.x, from ? p.inputs - step * kInputs : 0, line + step * stride, -part);
    }
  }
}

// Asks for the 32 numbers there, wherever that is. The processor itself does not follow sixteen lines of a weight.
FASTGEN_SPLIT void fetch(const float* from) {
  _mm_prefetch(from, _MM_HINT_T0);
  _mm_prefetch(from + kInputs / 2, _MM_HINT_T0);
}

// Some steps of 32 outputs of the weight: [steps][parts][2][16 pairs of inputs][16 outputs].
FASTGEN_TARGET void split_weight(const Problem& p, int64_t output, int64_t step, int64_t steps, char* to) {
  alignas(64) char lines[kStepBytes];
  for (int64_t s = step; s < step + steps; ++s, to += 2 * kStepBytes) {
    for (int64_t tile = 0; tile < 2; ++tile) {
      for (int64_t i = 0; i < kTileRows; ++i) {
        const int64_t n = output + tile * kTileRows + i;
        const float* from = n < p.outputs ? p.weight + n * p.weight_stride + s * kInputs : p.weight;
        fetch(from + kStepsAhead * kInputs);
        split(from, n < p.outputs ? p.inputs - s * kInputs : 0, lines + i * kTileLine, kTileBytes);
      }
      for (int64_t part = 0; part < kParts; ++part) {
        fastgen::transpose16(lines + part * kTileBytes, kTileLine / 4, to + (2 * part + tile) * kTileBytes,
                             kTileLine / 4);
      }
    }
  }
}

// Adds to sums[32 rows][32 outputs] the products of 32 rows, or of 16, with 32 outputs of the weight.
template <bool is_first, bool has_both>
FASTGEN_TARGET void multiply(const char* x, const char* weight, int64_t steps, float* sums) {
  constexpr int64_t kStride = kPair * sizeof(float);
  float* lower = sums + kTileRows * kPair;
  __asm__ volatile("" : : : "memory");  // the intrinsics do not tell the compiler of all that they read
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kStride);
    _tile_loadd(1, sums + kTileRows, kStride);
    if (has_both) _tile_loadd(2, lower, kStride);
    if (has_both) _tile_loadd(3, lower + kTileRows, kStride);
  }
#define FASTGEN_WEIGHTS(part)                                    \
  _tile_loadd(6, weight + 2 * (part) * kTileBytes, kTileLine);   \
  _tile_loadd(7, weight + (2 * (part) + 1) * kTileBytes, kTileLine);
#define FASTGEN_ROWS                                              \
  _tile_loadd(4, x, kTileLine);                                   \
  if (has_both) _tile_loadd(5, x + kTileBytes, kTileLine);        \
  x += has_both ? 2 * kTileBytes : kTileBytes;
#define FASTGEN_ADD                       \
  _tile_dpbf16ps(0, 4, 6);                \
  _tile_dpbf16ps(1, 4, 7);                \
  if (has_both) _tile_dpbf16ps(2, 5, 6);  \
  if (has_both) _tile_dpbf16ps(3, 5, 7);
  for (int64_t step = 0; step < steps; ++step, weight += 2 * kStepBytes) {
    // Each tile is read once, but the largest part of the weight.
    FASTGEN_WEIGHTS(0) FASTGEN_ROWS FASTGEN_ADD
    FASTGEN_ROWS FASTGEN_ADD
    FASTGEN_WEIGHTS(1) FASTGEN_ADD
    FASTGEN_ROWS FASTGEN_ADD
    FASTGEN_WEIGHTS(2) FASTGEN_ADD
    FASTGEN_WEIGHTS(0) FASTGEN_ADD
  }
#undef FASTGEN_WEIGHTS
#undef FASTGEN_ROWS
#undef FASTGEN_ADD
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kTileRows, kStride);
  if (has_both) _tile_stored(2, lower, kStride);
  if (has_both) _tile_stored(3, lower + kTileRows, kStride);
}

FASTGEN_TARGET bool has_nan(const float* from, int64_t count) {
  for (int64_t k = 0; k < count; k += 16) {
    const __m512 some = _mm512_maskz_loadu_ps(first_of(count - k), from + k);
    if (_mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q) != 0) return true;
  }
  return false;
}

// One result, in float32.
FASTGEN_TARGET float dot_product(const Problem& p, int64_t row, int64_t output) {
  const float *x = p.x + row * p.x_stride, *weight = p.weight + output * p.weight_stride;
  __m512 sums = _mm512_setzero_ps();
  for (int64_t k = 0; k < p.inputs; k += 16) {
    const __mmask16 some = first_of(p.inputs - k);
    sums = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(some, x + k), _mm512_maskz_loadu_ps(some, weight + k), sums);
  }
  return _mm512_reduce_add_ps(sums) + (p.bias ? p.bias[output] : 0.0f);
}

// Those of 16 results of a row that are not finite, again. With NaN in the row all are NaN, as they should be.
FASTGEN_TARGET void repeat(const Problem& p, int64_t row, int64_t output, __mmask16 which) {
  if (has_nan(p.x + row * p.x_stride, p.inputs)) return;
  for (int64_t n = 0; n < kTileRows; ++n) {
    if (which >> n & 1) p.y[row * p.outputs + output + n] = dot_product(p, row, output + n);
  }
}

// Sums of 32 rows and outputs, to the result.
FASTGEN_TARGET void finish(const Problem& p, const float* sums, int64_t row, int64_t output) {
  const __m512 largest = _mm512_set1_ps(std::numeric_limits<float>::max());
  for (int64_t n = output; n < std::min(output + kPair, p.outputs); n += kTileRows, sums += kTileRows) {
    const __mmask16 some = first_of(p.outputs - n);
    const __m512 start = p.bias ? _mm512_maskz_loadu_ps(some, p.bias + n) : _mm512_setzero_ps();
    for (int64_t r = row; r < std::min(row + kPair, p.rows); ++r) {
      const __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + (r - row) * kPair), start);
      _mm512_mask_storeu_ps(p.y + r * p.outputs + n, some, sum);
      const __mmask16 odd = _mm512_mask_cmp_ps_mask(some, _mm512_abs_ps(sum), largest, _CMP_NLE_UQ);
      if (odd != 0) repeat(p, r, n, odd);
    }
  }
}

// Pairs of outputs from `begin` to `end`, with all rows.
FASTGEN_TARGET void multiply_outputs(const Problem& p, const char* x, int64_t begin, int64_t end) {
  const Rows rows{quotient(p.rows, kTileRows), p.steps()};
  const int64_t pairs = quotient(rows.tiles, 2), most = std::min(kOutputPairs, end - begin);
  const bool is_in_one_go = rows.steps <= kSteps;
  const int64_t blocks = is_in_one_go ? 1 : quotient(p.rows, kRows), longest = quotient(pairs, blocks);
  const Aligned weight(most * std::min(kSteps, rows.steps) * 2 * kStepBytes);
  constexpr int64_t kSums = kPair * kPair;
  const Aligned sums((is_in_one_go ? 1 : longest * most) * kSums * sizeof(float));
  fastgen::set_up_matrices({kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows},
                           {kTileLine, kTileLine, kTileLine, kTileLine, kTileLine, kTileLine, kTileLine, kTileLine});
  for (int64_t output = begin; output < end; output += most) {
    const int64_t group = std::min(most, end - output);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = pairs * block / blocks, last = pairs * (block + 1) / blocks;
      for (int64_t step = 0; step < rows.steps; step += kSteps) {
        const int64_t some = std::min(kSteps, rows.steps - step), of_pair = some * 2 * kStepBytes;
        const bool is_last = step + some == rows.steps;
        for (int64_t n = 0; n < group; ++n) {
          split_weight(p, (output + n) * kPair, step, some, weight.data() + n * of_pair);
        }
        float* target = reinterpret_cast<float*>(sums.data());
        for (int64_t pair = first; pair < last; ++pair) {
          const char* from = x + rows.begin(2 * pair) + step * rows.stride(pair);
          const auto both = step == 0 ? &multiply<true, true> : &multiply<false, true>;
          const auto one = step == 0 ? &multiply<true, false> : &multiply<false, false>;
          const auto function = rows.has_both(pair) ? both : one;
          for (int64_t n = 0; n < group; ++n, target += is_in_one_go ? 0 : kSums) {
            function(from, weight.data() + n * of_pair, some, target);
            if (is_last) finish(p, target, pair * kPair, (output + n) * kPair);
          }
        }
      }
    }
  }
  fastgen::release_matrices();
}

// All of it, with memory for the parts of the rows.
void multiply_rows(const Problem& p, char* parts) {
  const Rows rows{quotient(p.rows, kTileRows), p.steps()};
  fastgen::parallel_for(
      0, rows.tiles, std::max<int64_t>(kGrain / (kTileRows * p.inputs), 1), [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
          split_rows(p, rows, tile, parts);
        }
      });
  fastgen::parallel_for(0, quotient(p.outputs, kPair), 1, [&](int64_t begin, int64_t end) {
    multiply_outputs(p, parts, begin, end);
  });
}

bool serves() {
  return fastgen::has_matrix_registers() && fastgen::instruction_set() == fastgen::InstructionSet::kAvx512;
}

void check(const Tensor& result, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const auto is_matrix = [](const Tensor& each) {
    return each.dim() == 2 && each.scalar_type() == ScalarType::Float && (each.stride(1) == 1 || each.size(1) == 1);
  };
  STD_TORCH_CHECK(serves(), "split_linear: this processor does not have AMX");
  STD_TORCH_CHECK(is_matrix(x) && is_matrix(weight) && x.size(1) == weight.size(1) && x.size(1) > 0,
                  "split_linear: x must be [rows, inputs] and the weight [outputs, inputs] of float32, with the inputs "
                  "next to each other");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_contiguous() &&
                            bias->scalar_type() == ScalarType::Float),
                  "split_linear: the bias must be [outputs] of float32");
  STD_TORCH_CHECK(result.dim() == 2 && result.size(0) == x.size(0) && result.size(1) == weight.size(0) &&
                      result.is_contiguous() && result.scalar_type() == ScalarType::Float,
                  "split_linear: the result must be [rows, outputs] of float32");
}

void split_linear_out(Tensor result, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  check(result, x, weight, bias);
  const Problem p{static_cast<const float*>(x.const_data_ptr()), static_cast<const float*>(weight.const_data_ptr()),
                  bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr,
                  static_cast<float*>(result.mutable_data_ptr()), x.size(0), x.size(1), weight.size(0), x.stride(0),
                  weight.stride(0)};
  if (p.rows == 0 || p.outputs == 0) return;
  const Aligned parts(quotient(std::min(p.rows, kRowsAtOnce), kTileRows) * p.steps() * kStepBytes);
  for (int64_t row = 0; row < p.rows; row += kRowsAtOnce) {
    Problem part = p;
    part.x += row * p.x_stride;
    part.y += row * p.outputs;
    part.rows = std::min(p.rows - row, kRowsAtOnce);
    multiply_rows(part, parts.data());
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("split_linear_out", FASTGEN_PLANNED(split_linear_out)); }

#endif
