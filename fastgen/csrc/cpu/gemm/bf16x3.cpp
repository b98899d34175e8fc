// GEMM in float32 in AMX tiles, which multiply bfloat16. The schema is defined in fastgen/ops/linear/__init__.py.
//
// A float32 is the sum of three bfloat16 parts: 24 bits of 8 each. Of the nine products of the parts of two numbers,
// the six largest are added up in float32. The others are below the last bit of the product (Henry, Tang and Heinecke,
// "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019, arXiv
// 1904.06376). The instruction flushes denormal parts and sums to zero: numbers below about 2**-102 lose bits, and
// those below 2**-126 count as zero.
//
// A thread splits a block of rows into its second-level cache. It multiplies the weight with it, some outputs at a
// time, which it also splits. Nothing is therefore copied, and no thread reads data that another one has split. The
// instruction reads the weight line by line. It reads the rows in pairs of inputs, so that they are transposed when
// they are split, and sums are transposed at the end.
//
// Infinity and NaN have no parts, and parts of a sum may overflow although the sum does not. Results that are not
// finite are therefore computed again, one by one.
#include "../isa.h"
#include "amx.h"
#include "operands.h"

#include <limits>

#ifdef FASTGEN_AMX

namespace {

using namespace fastgen;
using Operands = fastgen::Operands<float>;

constexpr int64_t kParts = 3;
constexpr int64_t kInputs = 32;  // of a tile, in bfloat16
constexpr int64_t kStepBytes = kParts * kAmxBytes;  // the parts of 16 rows, or outputs, and 32 inputs
constexpr int64_t kPair = 2 * kAmxRows;  // rows, and outputs, per multiplication
// The data in a thread's second-level cache: this many pairs of tiles of rows, groups of outputs and steps of inputs.
constexpr int64_t kPairs = 8;
constexpr int64_t kGroup = 4;
constexpr int64_t kSteps = 24;
// If there are more steps, the sums of these rows with this many pairs of outputs are also kept: 1 MiB, which is then
// read from beyond this cache once for all steps.
constexpr int64_t kOutputPairs = 32;
// How far ahead of the split a weight is prefetched.
constexpr int64_t kStepsAhead = 4;
#define FASTGEN_SPLIT __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")))

// Splits 32 numbers, `count` of them valid, into lines that are `stride` bytes apart: number i next to number i + 16.
// Each part is the bfloat16 nearest to what the previous parts leave. A number that is not finite has a NaN part.
FASTGEN_SPLIT void split(const float* from, int64_t count, char* to, int64_t stride) {
  __m512 low = _mm512_maskz_loadu_ps(first16(count), from);
  __m512 high = _mm512_maskz_loadu_ps(first16(count - 16), from + 16);
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  // Other NaNs may be rounded to a number.
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
  low = _mm512_mask_mov_ps(low, _mm512_cmp_ps_mask(low, low, _CMP_UNORD_Q), nan);
  high = _mm512_mask_mov_ps(high, _mm512_cmp_ps_mask(high, high, _CMP_UNORD_Q), nan);
#pragma GCC unroll 3
  for (int64_t part = 0; part < kParts; ++part) {
    const __m512i first = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(low), half), upper);
    const __m512i second = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(high), half), upper);
    _mm512_store_si512(to + part * stride, _mm512_or_si512(_mm512_srli_epi32(first, 16), second));
    if (part == kParts - 1) break;
    low = _mm512_sub_ps(low, _mm512_castsi512_ps(first));
    high = _mm512_sub_ps(high, _mm512_castsi512_ps(second));
  }
}

// Tiles of inputs.
int64_t steps_of(const Operands& p) { return quotient(p.inputs, kInputs); }

// The layout of a block of rows' parts: [pairs of tiles][steps][parts][2][16 pairs of inputs][16 rows]. A last, single
// tile forms a pair of one.
struct Block {
  int64_t row, tiles, step, steps;
  int64_t pairs() const { return quotient(tiles, 2); }
  bool has_both(int64_t pair) const { return 2 * pair + 1 < tiles; }
  // Bytes from one part to the next, and from one step to the next.
  int64_t part(int64_t pair) const { return has_both(pair) ? 2 * kAmxBytes : kAmxBytes; }
  int64_t stride(int64_t pair) const { return kParts * part(pair); }
  int64_t begin(int64_t pair) const { return 2 * pair * steps * kStepBytes; }
};

// Splits a tile of rows of x. Pads with zeros after the last row or input.
FASTGEN_TARGET void split_rows(const Operands& p, const Block& block, int64_t tile, char* parts) {
  const int64_t pair = tile / 2, part = block.part(pair), row = block.row + tile * kAmxRows;
  char* to = parts + block.begin(pair) + tile % 2 * kAmxBytes;
  alignas(64) char lines[kStepBytes];
  for (int64_t s = block.step; s < block.step + block.steps; ++s, to += block.stride(pair)) {
    for (int64_t i = 0; i < kAmxRows; ++i) {
      const bool is_there = row + i < p.rows;
      const float* from = is_there ? p.x + (row + i) * p.x_stride + s * kInputs : p.x;
      split(from, is_there ? p.inputs - s * kInputs : 0, lines + i * kAmxLine, kAmxBytes);
    }
    for (int64_t n = 0; n < kParts; ++n) {
      transpose16(lines + n * kAmxBytes, kAmxLine / 4, to + n * part, kAmxLine / 4);
    }
  }
}

// Prefetches 32 numbers at any address. The processor's own prefetcher does not follow sixteen lines of a weight.
FASTGEN_SPLIT void fetch(const float* from) {
  _mm_prefetch(from, _MM_HINT_T0);
  _mm_prefetch(from + kInputs / 2, _MM_HINT_T0);
}

// Splits some steps of 32 outputs of the weight: [steps][parts, the smallest first][2][16 outputs][32 inputs].
FASTGEN_TARGET void split_weight(const Operands& p, int64_t output, int64_t step, int64_t steps, char* to) {
  constexpr int64_t kPart = 2 * kAmxBytes;
  for (int64_t s = step; s < step + steps; ++s, to += 2 * kStepBytes) {
    for (int64_t i = 0; i < kPair; ++i) {
      const int64_t n = output + i;
      const float* from = n < p.outputs ? p.weight + n * p.weight_stride + s * kInputs : p.weight;
      fetch(from + kStepsAhead * kInputs);
      split(from, n < p.outputs ? p.inputs - s * kInputs : 0, to + (kParts - 1) * kPart + i * kAmxLine, -kPart);
    }
  }
}

// Adds to sums[32 outputs][32 rows] the products of 32 outputs of the weight with 32 rows, or with 16.
template <bool is_first, bool has_both>
FASTGEN_TARGET void multiply(const char* x, const char* weight, int64_t steps, float* sums) {
  constexpr int64_t kStride = kPair * sizeof(float);
  float* lower = sums + kAmxRows * kPair;
  __asm__ volatile("" : : : "memory");  // the intrinsics do not declare all that they read
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kStride);
    if (has_both) _tile_loadd(1, sums + kAmxRows, kStride);
    _tile_loadd(2, lower, kStride);
    if (has_both) _tile_loadd(3, lower + kAmxRows, kStride);
  }
  constexpr int64_t kTiles = has_both ? 2 : 1;
#define FASTGEN_ROWS(part)                                     \
  _tile_loadd(6, x + kTiles * (part) * kAmxBytes, kAmxLine); \
  if (has_both) _tile_loadd(7, x + (kTiles * (part) + 1) * kAmxBytes, kAmxLine);
#define FASTGEN_WEIGHTS                           \
  _tile_loadd(4, weight, kAmxLine);              \
  _tile_loadd(5, weight + kAmxBytes, kAmxLine); \
  weight += 2 * kAmxBytes;
#define FASTGEN_ADD                      \
  _tile_dpbf16ps(0, 4, 6);               \
  _tile_dpbf16ps(2, 5, 6);               \
  if (has_both) _tile_dpbf16ps(1, 4, 7); \
  if (has_both) _tile_dpbf16ps(3, 5, 7);
  for (int64_t step = 0; step < steps; ++step, x += kTiles * kStepBytes) {
    // Reads each tile once, except the largest part of the rows.
    FASTGEN_ROWS(0) FASTGEN_WEIGHTS FASTGEN_ADD
    FASTGEN_WEIGHTS FASTGEN_ADD
    FASTGEN_ROWS(1) FASTGEN_ADD
    FASTGEN_WEIGHTS FASTGEN_ADD
    FASTGEN_ROWS(2) FASTGEN_ADD
    FASTGEN_ROWS(0) FASTGEN_ADD
  }
#undef FASTGEN_WEIGHTS
#undef FASTGEN_ROWS
#undef FASTGEN_ADD
  _tile_stored(0, sums, kStride);
  if (has_both) _tile_stored(1, sums + kAmxRows, kStride);
  _tile_stored(2, lower, kStride);
  if (has_both) _tile_stored(3, lower + kAmxRows, kStride);
}

FASTGEN_TARGET bool has_nan(const float* from, int64_t count) {
  for (int64_t k = 0; k < count; k += 16) {
    const __m512 some = _mm512_maskz_loadu_ps(first16(count - k), from + k);
    if (_mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q) != 0) return true;
  }
  return false;
}

// Computes one result, in float32.
FASTGEN_TARGET float dot_product(const Operands& p, int64_t row, int64_t output) {
  const float *x = p.x + row * p.x_stride, *weight = p.weight + output * p.weight_stride;
  __m512 sums = _mm512_setzero_ps();
  for (int64_t k = 0; k < p.inputs; k += 16) {
    const __mmask16 some = first16(p.inputs - k);
    sums = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(some, x + k), _mm512_maskz_loadu_ps(some, weight + k), sums);
  }
  return _mm512_reduce_add_ps(sums) + (p.bias ? p.bias[output] : 0.0f);
}

// Recomputes those of 16 results of a row that are not finite. If the row has NaN, all are NaN, as they should be.
FASTGEN_TARGET void repeat(const Operands& p, int64_t row, int64_t output, __mmask16 which) {
  if (has_nan(p.x + row * p.x_stride, p.inputs)) return;
  for (int64_t n = 0; n < kAmxRows; ++n) {
    if (which >> n & 1) p.y[row * p.outputs + output + n] = dot_product(p, row, output + n);
  }
}

// Writes the sums of 32 rows and some pairs of outputs to the result: row by row, because rows are far apart.
FASTGEN_TARGET void finish(const Operands& p, const float* sums, int64_t row, int64_t output, int64_t outputs) {
  const __m512 largest = _mm512_set1_ps(std::numeric_limits<float>::max());
  const int64_t end = std::min(output + outputs, p.outputs);
  alignas(64) float lines[kGroup * kPair * kAmxRows];
  for (int64_t half = row; half < std::min(row + kPair, p.rows); half += kAmxRows, sums += kAmxRows) {
    for (int64_t n = 0; n < outputs; n += kAmxRows) {
      transpose16(sums + n * kPair, kPair, lines + n * kAmxRows, kAmxRows);
    }
    const float* from = lines;
    for (int64_t r = half; r < std::min(half + kAmxRows, p.rows); ++r, from += kAmxRows) {
      for (int64_t n = output; n < end; n += kAmxRows) {
        const __mmask16 some = first16(end - n);
        const __m512 start = p.bias ? _mm512_maskz_loadu_ps(some, p.bias + n) : _mm512_setzero_ps();
        const __m512 sum = _mm512_add_ps(_mm512_load_ps(from + (n - output) * kAmxRows), start);
        _mm512_mask_storeu_ps(p.y + r * p.outputs + n, some, sum);
        const __mmask16 odd = _mm512_mask_cmp_ps_mask(some, _mm512_abs_ps(sum), largest, _CMP_NLE_UQ);
        if (odd != 0) repeat(p, r, n, odd);
      }
    }
  }
}

// Multiplies all steps of a block of rows with pairs of outputs from `begin` to `end`.
FASTGEN_TARGET void multiply_block(const Operands& p, int64_t row, int64_t pairs, int64_t begin, int64_t end) {
  const int64_t tiles = std::min(2 * pairs, quotient(p.rows - row, kAmxRows)), most = std::min(kSteps, steps_of(p));
  const bool is_in_one_go = most == steps_of(p);
  const int64_t x_bytes = tiles * most * kStepBytes, weight_bytes = 2 * most * kStepBytes;
  constexpr int64_t kSums = kPair * kPair;
  const int64_t sums_count = is_in_one_go ? kGroup : pairs * (end - begin);
  char* x = scratch(x_bytes + kGroup * weight_bytes + sums_count * kSums * static_cast<int64_t>(sizeof(float)));
  char* weight = x + x_bytes;
  float* sums = reinterpret_cast<float*>(weight + kGroup * weight_bytes);
  for (int64_t step = 0; step < steps_of(p); step += kSteps) {
    const Block block{row, tiles, step, std::min(kSteps, steps_of(p) - step)};
    for (int64_t tile = 0; tile < tiles; ++tile) split_rows(p, block, tile, x);
    const bool is_last = step + block.steps == steps_of(p);
    const auto both = step == 0 ? &multiply<true, true> : &multiply<false, true>;
    const auto one = step == 0 ? &multiply<true, false> : &multiply<false, false>;
    float* target = sums;
    for (int64_t output = begin; output < end; output += kGroup) {
      const int64_t group = std::min(kGroup, end - output);
      for (int64_t n = 0; n < group; ++n) {
        split_weight(p, (output + n) * kPair, step, block.steps, weight + n * weight_bytes);
      }
      for (int64_t pair = 0; pair < pairs; ++pair, target += is_in_one_go ? 0 : group * kSums) {
        const auto function = block.has_both(pair) ? both : one;
        for (int64_t n = 0; n < group; ++n) {
          function(x + block.begin(pair), weight + n * weight_bytes, block.steps, target + n * kSums);
        }
        if (is_last) finish(p, target, row + pair * kPair, output * kPair, group * kPair);
      }
    }
  }
}

// Multiplies everything: threads share blocks of rows with pairs of outputs, one block after the other.
void multiply_all(const Operands& p) {
  const int64_t pairs = quotient(p.rows, kPair), blocks = quotient(pairs, kPairs), outputs = quotient(p.outputs, kPair);
  const int64_t at_once = steps_of(p) <= kSteps ? outputs : kOutputPairs;
  parallel_for(0, blocks * outputs, 1, [&](int64_t begin, int64_t end) {
    const WholeTiles tiles;
    for (int64_t next = begin; next < end;) {
      const int64_t block = next / outputs, output = next % outputs;
      const int64_t some = std::min({end - next, outputs - output, at_once});
      const int64_t first = pairs * block / blocks, last = pairs * (block + 1) / blocks;
      multiply_block(p, first * kPair, last - first, output, output + some);
      next += some;
    }
  });
}

void bf16x3_gemm_out(Tensor y, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  Arguments("bf16x3_gemm").writes(y).reads(x, weight, bias);
  STD_TORCH_CHECK(has_amx() && instruction_set() == InstructionSet::kAvx512,
                  "bf16x3_gemm: this processor does not have AMX");
  check_x("bf16x3_gemm", x, x.scalar_type() == ScalarType::Float);
  const Operands p = checked<float>("bf16x3_gemm", y, x, weight, bias, &are_inputs_adjacent);
  if (p.rows > 0 && p.outputs > 0) multiply_all(p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("bf16x3_gemm_out", FASTGEN_PLANNED(bf16x3_gemm_out)); }

#endif
