// The rows of products with float activations, for one instruction set: vectors, and rows in tiles. Included at the beginning
// of the kernels (kernels.h, groups.h), which say what is to be defined, in their namespace.
// No include guard: it is meant to be included several times.

constexpr int64_t kWidth = FASTGEN_WIDTH;
constexpr int64_t kMostRows = FASTGEN_SUMS;  // of a tile

typedef float Vector __attribute__((vector_size(FASTGEN_WIDTH * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef uint32_t Bits __attribute__((vector_size(FASTGEN_WIDTH * sizeof(float)), aligned(2), may_alias));
typedef int32_t Integers __attribute__((vector_size(FASTGEN_WIDTH * sizeof(float))));

// x[padded inputs, rows of the tile]: zeros follow the inputs.
template <int kRows>
FASTGEN_TARGET void lay_out_rows(const float* x, int64_t stride, int64_t inputs, int64_t padded, float* to) {
  int64_t k = 0;
  // In squares, the last of which begins so that it ends with the last row.
  if constexpr (kRows >= kWidth) {
    for (; k + kWidth <= inputs; k += kWidth) {
      for (int64_t r = 0; r < kRows; r += kWidth) {
        const int64_t row = std::min<int64_t>(r, kRows - kWidth);
        FASTGEN_TRANSPOSE(x + row * stride + k, stride, to + k * kRows + row, kRows);
      }
    }
  }
  for (; k < inputs; ++k) {
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r) to[k * kRows + r] = x[r * stride + k];
  }
  std::fill_n(to + inputs * kRows, (padded - inputs) * kRows, 0.0f);
}

using LayOut = void (*)(const float*, int64_t, int64_t, int64_t, float*);

template <size_t... kRows>
constexpr std::array<LayOut, sizeof...(kRows)> make_lay_out(std::index_sequence<kRows...>) {
  return {&lay_out_rows<static_cast<int>(kRows) + 1>...};
}

// By the number of rows, less one.
using RowCounts = std::make_index_sequence<kMostRows>;
constexpr auto kLayOut = make_lay_out(RowCounts());

// Rows in tiles of nearly the same size.
struct RowTiles {
  explicit RowTiles(int64_t rows) : rows(rows), count((rows + kMostRows - 1) / kMostRows) {}
  int64_t begin(int64_t tile) const { return rows * tile / count; }
  int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
  int64_t rows, count;
};

// All rows in tiles, one behind the other.
inline void lay_out(const float* x, int64_t stride, int64_t rows, int64_t inputs, int64_t padded, float* to) {
  const RowTiles tiles(rows);
  for (int64_t i = 0; i < tiles.count; ++i) {
    kLayOut[tiles.size(i) - 1](x + tiles.begin(i) * stride, stride, inputs, padded, to + tiles.begin(i) * padded);
  }
}

// The first `count` numbers of a vector, most often all of them.
inline void copy(const void* from, int64_t count, void* to) {
  if (count == kWidth) {
    std::memcpy(to, from, sizeof(Vector));
  } else {
    std::memcpy(to, from, count * sizeof(float));
  }
}
