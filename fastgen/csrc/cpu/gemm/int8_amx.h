// GEMM of many quantised rows with weights in groups, in AMX tiles. Included by int8.cpp in the namespace of the
// AVX-512 kernels (int8_kernels.h), whose vectors and group sums it uses: results therefore have the same bits.

#define FASTGEN_TARGET __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")))

using fastgen::kAmxLine;
using fastgen::kAmxRows;

// Inputs that a tile holds, so that a group is a whole number of them; 0: groups that tiles do not support.
inline int64_t matrix_depth(int64_t group_size) {
  return group_size % kAmxLine == 0 ? kAmxLine : group_size % 32 == 0 ? 32 : 0;
}

// Tiles 0 and 1 hold sums, 2 and 3 inputs, 4 and 5 weights.
inline void set_up(int64_t depth) {
  const int64_t four = depth / 4;  // a row of weights has four inputs of each output
  fastgen::configure_tiles({kAmxRows, kAmxRows, kAmxRows, kAmxRows, four, four, four, four},
                           {kAmxLine, kAmxLine, depth, depth, kAmxLine, kAmxLine, kAmxLine,
                            kAmxLine});
}

// Unpacks a panel's values less their zero point, as signed bytes: `inputs` x 16 outputs, followed by the other 16.
FASTGEN_TARGET inline void pack_tiles(const Weight& weight, int64_t panel, uint8_t* to) {
  constexpr int64_t kHalf = kLine / 2;
  const uint8_t* from = weight.qweight + panel * weight.panel_bytes;
  const int64_t half = weight.groups * weight.group_size * kAmxRows, lines = weight.panel_bytes / kLine;
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

// Sums the products of 16 rows with a group of 16 outputs in a tile, and stores them. The numbers of tiles must be
// literals.
#define FASTGEN_MULTIPLY_GROUP(name, sums, rows, columns)                                                           \
  FASTGEN_TARGET inline void name(const int8_t* x, int64_t stride, const uint8_t* numbers, int64_t group_size,     \
                                  int64_t depth, int32_t* products) {                                               \
    _tile_zero(sums);                                                                                               \
    for (int64_t k = 0; k < group_size; k += depth) {                                                               \
      _tile_loadd(rows, x + k, stride);                                                                             \
      _tile_loadd(columns, numbers + k * kAmxRows, kAmxLine);                                                \
      _tile_dpbssd(sums, rows, columns);                                                                            \
    }                                                                                                               \
    _tile_stored(sums, products, kAmxLine);                                                                     \
  }
FASTGEN_MULTIPLY_GROUP(multiply_even, 0, 2, 4)
FASTGEN_MULTIPLY_GROUP(multiply_odd, 1, 3, 5)
#undef FASTGEN_MULTIPLY_GROUP

// Sums over all inputs, in float32, for 16 rows and 16 outputs from `first` on in a panel.
FASTGEN_TARGET inline void multiply(const Weight& weight, const Inputs& inputs, const uint8_t* numbers, int64_t row,
                                    int64_t panel, int64_t first, float* sums) {
  const int64_t size = weight.group_size, depth = matrix_depth(size);
  const int8_t* x = inputs.values + row * inputs.stride;
  const Group* groups = inputs.groups + row * weight.groups;
  const bool has_least = weight.has_mins(), has_zero = has_least || weight.zeros != nullptr;
  const float middle = weight.bits == 8 ? 128.0f : 8.0f;  // subtracted by `pack_tiles`
  alignas(kAmxLine) int32_t products[2][kAmxRows * kAmxRows];
  Vector total[kAmxRows];
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; ++r) total[r] = Vector{};
  multiply_even(x, inputs.stride, numbers, size, depth, products[0]);
  for (int64_t group = 0; group < weight.groups; ++group) {
    // Multiplies the next group, while this one is added.
    x += size, numbers += size * kAmxRows;
    if (group + 1 < weight.groups) {
      if (group % 2 == 0) {
        multiply_odd(x, inputs.stride, numbers, size, depth, products[1]);
      } else {
        multiply_even(x, inputs.stride, numbers, size, depth, products[0]);
      }
    }
    Factors factors;
    load_group(factors, weight, (panel * weight.groups + group) * kPanel + first);
    factors.zero -= middle;
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) {
      const Ints& sum = *reinterpret_cast<const Ints*>(products[group % 2] + r * kAmxRows);
      add_group(total[r], sum, factors, groups[r * weight.groups + group], has_zero, has_least);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; ++r) *reinterpret_cast<Vector*>(sums + r * kPanel + first) = total[r];
}

// Multiplies all rows with a panel, as `multiply_panel` does. The inputs fill whole tiles: 16, 32, ... rows. `memory`
// is for the bytes of a panel.
FASTGEN_TARGET inline void multiply_panel_in_tiles(const Product& product, const Inputs& inputs, int64_t rows, int64_t panel,
                                                   uint8_t* memory) {
  const Weight& weight = product.weight;
  alignas(kAmxLine) float sums[kAmxRows * kPanel];
  const int64_t half = weight.groups * weight.group_size * kAmxRows;
  pack_tiles(weight, panel, memory);
  __asm__ volatile("" : : : "memory");  // the intrinsics do not declare all that they read
  for (int64_t row = 0; row < rows; row += kAmxRows) {
    multiply(weight, inputs, memory, row, panel, 0, sums);
    multiply(weight, inputs, memory + half, row, panel, kAmxRows, sums);
    product.target.store<kPanel, true>(panel * kPanel, sums, kPanel, row, std::min(kAmxRows, rows - row));
  }
}

#undef FASTGEN_TARGET
