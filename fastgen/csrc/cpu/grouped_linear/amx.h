// Products of many rows with weights in few bits, in AMX tiles. Included by cpu/grouped_linear.cpp in the
// namespace of the AVX-512 kernels (kernels.h), whose vectors and whose sums of groups it has: so results have the same bits.

#define FASTGEN_TARGET __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")))

using fastgen::kMatrixBytes;
using fastgen::kMatrixRows;

// Inputs that a register takes at a time, so that a group is a whole number of them; 0: these groups are not for registers.
inline int64_t matrix_depth(int64_t group_size) {
  return group_size % kMatrixBytes == 0 ? kMatrixBytes : group_size % 32 == 0 ? 32 : 0;
}

// Registers 0 and 1 hold sums, 2 and 3 inputs, 4 and 5 weights.
inline void set_up(int64_t depth) {
  const int64_t four = depth / 4;  // a row of weights has four inputs of each output
  fastgen::configure_tiles({kMatrixRows, kMatrixRows, kMatrixRows, kMatrixRows, four, four, four, four},
                           {kMatrixBytes, kMatrixBytes, depth, depth, kMatrixBytes, kMatrixBytes, kMatrixBytes,
                            kMatrixBytes});
}

// The numbers of a panel less the middle of their range, as signed bytes: `inputs` x 16 outputs, and behind them those of
// the other 16.
FASTGEN_TARGET inline void lay_out(const Weight& weight, int64_t panel, uint8_t* to) {
  constexpr int64_t kHalf = kLine / 2;
  const uint8_t* from = weight.numbers + panel * weight.panel_bytes;
  const int64_t half = weight.groups * weight.group_size * kMatrixRows, lines = weight.panel_bytes / kLine;
  if (weight.bits == 8) {
    const __m512i middle = _mm512_set1_epi8(-128);
    for (int64_t line = 0; line < lines; ++line, from += kLine, to += kHalf) {
      _mm512_store_si512(to, _mm512_xor_si512(_mm512_loadu_si512(from), middle));
      _mm512_store_si512(to + half, _mm512_xor_si512(_mm512_loadu_si512(from + kHalf), middle));
    }
    return;
  }
  const __m512i low = _mm512_set1_epi8(15), middle = _mm512_set1_epi8(8);
  for (int64_t line = 0; line < lines; ++line, from += kLine, to += 2 * kHalf) {
    for (int64_t side = 0; side < 2; ++side) {
      const __m512i both = _mm512_loadu_si512(from + side * kHalf);
      const __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      _mm512_store_si512(to + side * half, _mm512_sub_epi8(first, middle));
      _mm512_store_si512(to + side * half + kHalf, _mm512_sub_epi8(second, middle));
    }
  }
}

// The products of 16 rows with a group of 16 outputs, added up in a register and stored.
// The numbers of registers must be literals.
#define FASTGEN_MULTIPLY_GROUP(name, sums, rows, columns)                                                           \
  FASTGEN_TARGET inline void name(const int8_t* x, int64_t stride, const uint8_t* numbers, int64_t group_size,     \
                                  int64_t depth, int32_t* products) {                                               \
    _tile_zero(sums);                                                                                               \
    for (int64_t k = 0; k < group_size; k += depth) {                                                               \
      _tile_loadd(rows, x + k, stride);                                                                             \
      _tile_loadd(columns, numbers + k * kMatrixRows, kMatrixBytes);                                                \
      _tile_dpbssd(sums, rows, columns);                                                                            \
    }                                                                                                               \
    _tile_stored(sums, products, kMatrixBytes);                                                                     \
  }
FASTGEN_MULTIPLY_GROUP(multiply_even, 0, 2, 4)
FASTGEN_MULTIPLY_GROUP(multiply_odd, 1, 3, 5)
#undef FASTGEN_MULTIPLY_GROUP

// The sums over all inputs, in float32, of 16 rows and of 16 outputs from `first` on in a panel.
FASTGEN_TARGET inline void multiply(const Weight& weight, const Inputs& inputs, const uint8_t* numbers, int64_t row,
                                    int64_t panel, int64_t first, float* sums) {
  const int64_t size = weight.group_size, depth = matrix_depth(size);
  const int8_t* x = inputs.numbers + row * inputs.stride;
  const Group* groups = inputs.groups + row * weight.groups;
  const bool has_least = weight.has_minimums(), has_middle = has_least || weight.zeros != nullptr;
  const float middle = weight.bits == 8 ? 128.0f : 8.0f;  // what `lay_out` has taken away
  alignas(kMatrixBytes) int32_t products[2][kMatrixRows * kMatrixRows];
  Floats total[kMatrixRows];
#pragma GCC unroll 16
  for (int r = 0; r < kMatrixRows; ++r) total[r] = Floats{};
  multiply_even(x, inputs.stride, numbers, size, depth, products[0]);
  for (int64_t group = 0; group < weight.groups; ++group) {
    // The next group, while this one is added.
    x += size, numbers += size * kMatrixRows;
    if (group + 1 < weight.groups) {
      if (group % 2 == 0) {
        multiply_odd(x, inputs.stride, numbers, size, depth, products[1]);
      } else {
        multiply_even(x, inputs.stride, numbers, size, depth, products[0]);
      }
    }
    Factors factors;
    load_group(factors, weight, (panel * weight.groups + group) * kPanel + first);
    factors.middle -= middle;
#pragma GCC unroll 16
    for (int r = 0; r < kMatrixRows; ++r) {
      const Ints& sum = *reinterpret_cast<const Ints*>(products[group % 2] + r * kMatrixRows);
      add_group(total[r], sum, factors, groups[r * weight.groups + group], has_middle, has_least);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kMatrixRows; ++r) *reinterpret_cast<Floats*>(sums + r * kPanel + first) = total[r];
}

// All rows times a panel, as `panel` does it. There are inputs for whole registers: 16, 32, ... rows.
template <class Finish>
FASTGEN_TARGET void panel_in_tiles(const Weight& weight, const Inputs& inputs, int64_t rows, int64_t panel,
                                      uint8_t* numbers, const Finish& finish) {
  alignas(kMatrixBytes) float sums[kMatrixRows * kPanel];
  const int64_t half = weight.groups * weight.group_size * kMatrixRows;
  lay_out(weight, panel, numbers);
  __asm__ volatile("" : : : "memory");  // the intrinsics do not tell the compiler of all that they read
  for (int64_t row = 0; row < rows; row += kMatrixRows) {
    multiply(weight, inputs, numbers, row, panel, 0, sums);
    multiply(weight, inputs, numbers + half, row, panel, kMatrixRows, sums);
    finish(sums, row, std::min(kMatrixRows, rows - row));
  }
}

#undef FASTGEN_TARGET
