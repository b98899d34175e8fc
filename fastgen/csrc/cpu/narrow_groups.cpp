// Linear layers on weights in groups whose activations stay floats. The schemas are those of cpu/grouped_linear.cpp.
//
// The codes of a weight become floats in the registers, exactly those of the unpacked weight, and are multiplied with all rows
// of a tile, which are laid out as in cpu/narrow_linear.cpp. So few rows wait for memory alone, and many rows for multiply-adds
// alone. The result is that of GEMM on the unpacked weight to the last bit, whatever the number of rows.
#include "float16.h"
#include "grouped_linear/products.h"
#include "grouped_linear/target.h"
#include "instruction_set.h"
#include "parallel.h"
#include "transpose.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

// Vectors as a language extension: gcc and clang.
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#ifdef FASTGEN_X86
#include <immintrin.h>
#endif

namespace {

using fastgen::kLine;
using fastgen::kPanel;
using fastgen::Place;
using fastgen::place;
using fastgen::Products;
using fastgen::Rows;
using fastgen::ScalarType;
using fastgen::Target;
using fastgen::Weight;

// Rows that are laid out at a time: more of them leave the cache before the next panel reads them again.
constexpr int64_t kRowsAtOnce = 224;

namespace portable {
typedef uint8_t FewBytes __attribute__((vector_size(4), aligned(1), may_alias));
#define FASTGEN_TARGET
#define FASTGEN_WIDTH 4
#define FASTGEN_SUMS 12
#define FASTGEN_FLOAT16 fastgen::Float16<FASTGEN_WIDTH>
#define FASTGEN_TRANSPOSE fastgen::transpose4
#define FASTGEN_WIDEN(from) __builtin_convertvector(*reinterpret_cast<const FewBytes*>(from), Vector)
#define FASTGEN_BYTE(bits, i) ((bits) >> (8 * (i)) & 255u)
#include "narrow_linear/groups.h"
}  // namespace portable

#ifdef FASTGEN_X86

// In each lane, byte i of the lane, then nothing.
constexpr int64_t lanes_of_byte(int i) {
  return static_cast<int64_t>((0x80808000ull | static_cast<uint64_t>(i)) | (0x80808000ull | static_cast<uint64_t>(4 + i)) << 32);
}
constexpr int64_t upper_lanes_of_byte(int i) { return lanes_of_byte(i) + 0x0000000800000008ll; }

namespace avx2 {
__attribute__((target("avx2"), always_inline)) inline __m256i byte_of(__m256i bits, int i) {
  if (i == 0) return _mm256_and_si256(bits, _mm256_set1_epi32(255));
  if (i == 3) return _mm256_srli_epi32(bits, 24);
  const int64_t low = lanes_of_byte(i), high = upper_lanes_of_byte(i);
  return _mm256_shuffle_epi8(bits, _mm256_set_epi64x(high, low, high, low));
}
#define FASTGEN_TARGET __attribute__((target("avx2,fma,f16c")))
#define FASTGEN_WIDTH 8
#define FASTGEN_SUMS 12
#define FASTGEN_FLOAT16 fastgen::Float16F16c<FASTGEN_WIDTH>
#define FASTGEN_TRANSPOSE fastgen::transpose8
#define FASTGEN_WIDEN(from) (Vector)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from))))
#define FASTGEN_BYTE(bits, i) (Bits)byte_of((__m256i)(bits), i)
#include "narrow_linear/groups.h"
}  // namespace avx2

namespace avx512 {
__attribute__((target("avx512f,avx512bw"), always_inline)) inline __m512i byte_of(__m512i bits, int i) {
  if (i == 0) return _mm512_and_si512(bits, _mm512_set1_epi32(255));
  if (i == 3) return _mm512_srli_epi32(bits, 24);
  const int64_t low = lanes_of_byte(i), high = upper_lanes_of_byte(i);
  return _mm512_shuffle_epi8(bits, _mm512_set4_epi64(high, low, high, low));
}
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,fma")))
#define FASTGEN_WIDTH 16
#define FASTGEN_SUMS 28
#define FASTGEN_FLOAT16 fastgen::Float16Avx512<FASTGEN_WIDTH>
#define FASTGEN_TRANSPOSE fastgen::transpose16
#define FASTGEN_WIDEN(from) (Vector)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from))))
#define FASTGEN_BYTE(bits, i) (Bits)byte_of((__m512i)(bits), i)
#include "narrow_linear/groups.h"
}  // namespace avx512

#endif

// Lays out some rows, from `first` on, as floats in the order of the weight's inputs, with zeros behind them.
void lay_out(const Rows& x, int64_t first, int64_t rows, int64_t padded, float* to) {
#define FASTGEN_LAY_OUT(SET) &SET::lay_out
  const auto lay_out_floats = FASTGEN_CHOOSE(FASTGEN_LAY_OUT);
#undef FASTGEN_LAY_OUT
  if (x.type == ScalarType::Float && x.order == nullptr) {
    return lay_out_floats(static_cast<const float*>(x.data) + first * x.stride, x.stride, rows, x.inputs, padded, to);
  }
  const std::unique_ptr<float[]> floats(new float[rows * x.inputs]);
  for (int64_t r = 0; r < rows; ++r) {
    fastgen::read_line(x.data, (first + r) * x.stride, x.inputs, 1, x.order, x.type, floats.get() + r * x.inputs);
  }
  lay_out_floats(floats.get(), x.inputs, rows, x.inputs, padded, to);
}

void multiply(const float* x, const Weight& weight, const Target& target, int64_t row, int64_t rows, int64_t inputs,
              int64_t begin, int64_t end) {
#define FASTGEN_MULTIPLY(SET) SET::multiply(SET::Work{x, weight, target, row, rows, inputs}, begin, end)
  FASTGEN_CHOOSE(FASTGEN_MULTIPLY);
#undef FASTGEN_MULTIPLY
}

}  // namespace

namespace fastgen {

// The panels of all products together are shared out among the threads. Each lays out the rows for itself: what another one has
// just written takes long to fetch.
void multiply_floats(const Products& products) {
  const Rows& x = products.x;
  std::vector<Target> targets;
  std::vector<int64_t> panels;  // of each product
  int64_t all = 0, set = 1;
  for (const Product& each : products.each) {
    targets.emplace_back(each.result);
    panels.push_back((each.result.outputs + kPanel - 1) / kPanel);
    all += panels.back();
    set = set_inputs(each.weight.bits);
  }
  if (x.rows == 0 || all == 0) return;
  const int64_t padded = (x.inputs + set - 1) / set * set, most = std::min(x.rows, kRowsAtOnce);
  parallel_for(0, all, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> laid_out(new float[most * padded]);  // not filled with zeros first
    for (int64_t row = 0; row < x.rows; row += most) {
      const int64_t rows = std::min(most, x.rows - row);
      lay_out(x, row, rows, padded, laid_out.get());
      int64_t first = 0;  // panel of this product, among those of all
      for (size_t i = 0; i < panels.size(); first += panels[i++]) {
        const int64_t from = std::max(begin - first, int64_t{0}), to = std::min(end - first, panels[i]);
        if (from < to) multiply(laid_out.get(), products.each[i].weight, targets[i], row, rows, padded, from, to);
      }
    }
  });
}

}  // namespace fastgen

#else

namespace fastgen {
void multiply_floats(const Products&) {}
}  // namespace fastgen

#endif
