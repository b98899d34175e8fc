// Sums of products in 512-bit vectors, for one type of weights. Included once per type by cpu/quantized_linear.cpp, inside
// a namespace of its own, with these defined:
//   FASTGEN_TARGET                the attribute that lets the compiler use the instructions
//   FASTGEN_SUM                   the type of a sum
//   FASTGEN_ADD(sums, x, weight)  sums + the products of the four bytes of x and of each column of weight
// No include guard: it is meant to be included several times.

// Rows that are multiplied together: their sums, two vectors each, stay in registers.
constexpr int64_t kTogether = 8;

template <int kRows>
FASTGEN_TARGET void tile(const uint8_t* x, int64_t stride, const uint8_t* panel, int64_t depth, FASTGEN_SUM* sums) {
  __m512i total[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = _mm512_setzero_si512();
  // A tile of weights is 16 outputs wide; of the inputs, it holds a line of 64 bytes.
  for (int64_t block = 0; block < depth; block += kTileLine) {
    const uint8_t* weights = panel + block * kPanel;
    for (int64_t k = 0; k < kTileLine; k += 4) {
      const __m512i first = _mm512_loadu_si512(weights + k * kTileRows);
      const __m512i second = _mm512_loadu_si512(weights + kTileBytes + k * kTileRows);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        std::memcpy(&four, x + r * stride + block + k, 4);
        const __m512i value = _mm512_set1_epi32(four);
        total[r][0] = FASTGEN_ADD(total[r][0], value, first);
        total[r][1] = FASTGEN_ADD(total[r][1], value, second);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    _mm512_storeu_si512(sums + r * kPanel, total[r][0]);
    _mm512_storeu_si512(sums + r * kPanel + kTileRows, total[r][1]);
  }
}

template <size_t... kRows>
constexpr auto make_tiles(std::index_sequence<kRows...>) {
  return std::array{&tile<static_cast<int>(kRows) + 1>...};
}

constexpr auto kTiles = make_tiles(std::make_index_sequence<kTogether>());

inline void multiply(const uint8_t* x, int64_t stride, int64_t rows, const uint8_t* panel, int64_t depth, void* sums) {
  const int64_t tiles = (rows + kTogether - 1) / kTogether;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = rows * i / tiles, end = rows * (i + 1) / tiles;  // of nearly the same size
    kTiles[end - begin - 1](x + begin * stride, stride, panel, depth, static_cast<FASTGEN_SUM*>(sums) + begin * kPanel);
  }
}

#undef FASTGEN_TARGET
#undef FASTGEN_SUM
#undef FASTGEN_ADD
