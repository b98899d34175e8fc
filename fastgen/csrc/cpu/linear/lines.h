// Products with the lines of a weight as it is, for one instruction set. Included by linear/kernels.h.
//   FASTGEN_OUTPUTS      outputs that are summed up at the same time; FASTGEN_WIDTH is a multiple of them
//   FASTGEN_ROW_VECTORS  vectors of rows of a tile, at most
// A vector holds some rows of one input: so an element of the weight, in every place of a vector, times a vector is what
// it adds to those rows. Neither the weight is moved nor the places of a vector are added up.

constexpr int64_t kWidth = FASTGEN_WIDTH;
constexpr int64_t kOutputs = FASTGEN_OUTPUTS;

// Rows in tiles of nearly the same size; `rows` may end inside the last one. Tile i lies at x + begin(i) * inputs, as
// [inputs, end(i) - begin(i)].
struct RowTiles {
  explicit RowTiles(int64_t rows)
      : vectors((rows + kWidth - 1) / kWidth), count((vectors + FASTGEN_ROW_VECTORS - 1) / FASTGEN_ROW_VECTORS) {}
  int64_t begin(int64_t tile) const { return vectors * tile / count * kWidth; }
  int64_t end(int64_t tile) const { return begin(tile + 1); }
  int64_t vectors, count;
};

inline int64_t floats_of_rows(int64_t rows, int64_t inputs) { return RowTiles(rows).vectors * kWidth * inputs; }

// kDepth inputs at a time of a tile are one task.
inline int64_t tasks_of_rows(int64_t rows, int64_t inputs) {
  return RowTiles(rows).count * ((inputs + kDepth - 1) / kDepth);
}

inline void lay_out_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, int64_t task, float* to) {
  const RowTiles tiles(rows);
  const int64_t tile = task % tiles.count, k = task / tiles.count * kDepth;
  const int64_t begin = tiles.begin(tile), width = tiles.end(tile) - begin;
  lay_out({x + begin * stride + k, stride, 1}, std::min(width, rows - begin), std::min(kDepth, inputs - k), width,
          to + begin * inputs + k * width);
}

// What is asked for while input k is multiplied: the same place of the lines from `here`, of those from `there` once k
// has come to `turn`; where it is null, nothing.
struct Ahead {
  const float *here, *there;
  int64_t turn;
};

// kInputs inputs of kLines outputs times kVectors vectors of rows.
template <int kVectors, int kLines, int kInputs>
FASTGEN_TARGET inline __attribute__((always_inline)) void add_inputs(const float* x, const float* lines, int64_t stride,
                                                                     Vector (&sums)[kLines][kVectors]) {
  Vector rows[kInputs][kVectors];
#pragma GCC unroll 2
  for (int k = 0; k < kInputs; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) rows[k][v] = reinterpret_cast<const Vector*>(x)[k * kVectors + v];
  }
#pragma GCC unroll 8
  for (int n = 0; n < kLines; ++n) {
    // From every fourth line on, so that addresses take few registers.
    const float* line = lines + n / 4 * 4 * stride;
#pragma GCC unroll 2
    for (int k = 0; k < kInputs; ++k) {
      const float weight = line[n % 4 * stride + k];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[n][v] += weight * rows[k][v];
    }
  }
}

// y[kLines, kVectors vectors] += kLines lines of the weight times x[depth, kVectors vectors]. The products are summed among
// themselves first, in the order in which `tile` sums them: the result has the same bits.
template <int kVectors, int kLines>
FASTGEN_TARGET void add_lines(const float* x, const float* lines, int64_t stride, int64_t depth, float* y,
                              const Ahead& ahead) {
  constexpr int kInputs = kVectors == 1 ? 2 : 1;  // at a time
  Vector sums[kLines][kVectors] = {};
  for (int64_t begin = 0; begin < depth; begin += kLine) {
    if (ahead.here != nullptr) {
      const float* next = (begin < ahead.turn ? ahead.here : ahead.there) + begin;
#pragma GCC unroll 8
      for (int n = 0; n < kLines; ++n) __builtin_prefetch(next + n * stride, 0, 3);
    }
    const int64_t end = std::min(begin + kLine, depth);
    int64_t k = begin;
    for (; k + kInputs <= end; k += kInputs) {
      add_inputs<kVectors, kLines, kInputs>(x + k * kVectors * kWidth, lines + k, stride, sums);
    }
    for (; k < end; ++k) add_inputs<kVectors, kLines, 1>(x + k * kVectors * kWidth, lines + k, stride, sums);
  }
#pragma GCC unroll 8
  for (int n = 0; n < kLines; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) reinterpret_cast<Vector*>(y)[n * kVectors + v] += sums[n][v];
  }
}

using AddLines = void (*)(const float*, const float*, int64_t, int64_t, float*, const Ahead&);

template <int kLines, size_t... kVectors>
constexpr std::array<AddLines, sizeof...(kVectors)> make_add_lines(std::index_sequence<kVectors...>) {
  return {&add_lines<static_cast<int>(kVectors) + 1, kLines>...};
}

// By the number of vectors, less one: for kOutputs lines, and for one.
constexpr auto kAddLines = make_add_lines<FASTGEN_OUTPUTS>(std::make_index_sequence<FASTGEN_ROW_VECTORS>());
constexpr auto kAddLine = make_add_lines<1>(std::make_index_sequence<FASTGEN_ROW_VECTORS>());

// What kWidth outputs of all rows add up to: of each tile, [kWidth, rows of the tile].
struct Sums {
  explicit Sums(int64_t rows) : tiles(rows), numbers(tiles.vectors * kWidth * kWidth) {}
  int64_t width(int64_t tile) const { return tiles.end(tile) - tiles.begin(tile); }
  float* of(int64_t tile, int64_t output) const {
    return numbers.data() + tiles.begin(tile) * kWidth + output * width(tile);
  }
  const RowTiles tiles;
  const Aligned numbers;
};

// All rows times the lines of some outputs from `output` on, `kLines` or one, added to the sums from number `n` on. The
// lines, kDepth inputs at a time, stay in the first-level cache until all rows have been multiplied with them. What is
// used kDepth inputs later is asked for meanwhile, from the lines of the `next` outputs on in the end: so all of the
// weight is asked for once, whatever the number of rows, in the order of its use.
inline void add_outputs(const LineProduct& product, int64_t output, int64_t lines, int64_t next, const Sums& sums,
                        int64_t n) {
  const auto& add = lines == kOutputs ? kAddLines : kAddLine;
  const int64_t inputs = product.inputs, distance = std::min(kDepth, inputs);
  const int64_t to_next = (next - output) * product.stride - inputs;
  for (int64_t tile = 0; tile < sums.tiles.count; ++tile) {
    for (int64_t i = 0; i < lines; ++i) {
      std::fill_n(sums.of(tile, n + i), sums.width(tile), product.bias == nullptr ? 0.0f : product.bias[output + i]);
    }
  }
  for (int64_t k = 0; k < inputs; k += kDepth) {
    const float* weight = product.weight + output * product.stride + k;
    Ahead ahead{weight + distance, weight + distance + to_next, inputs - distance - k};
    for (int64_t tile = 0; tile < sums.tiles.count; ++tile) {
      const int64_t width = sums.width(tile);
      const float* x = product.x + sums.tiles.begin(tile) * inputs + k * width;
      add[width / kWidth - 1](x, weight, product.stride, std::min(kDepth, inputs - k), sums.of(tile, n), ahead);
      ahead.here = nullptr;
    }
  }
}

// All rows times the outputs from `begin` to `end`.
FASTGEN_TARGET inline void multiply_lines(const LineProduct& product, int64_t begin, int64_t end) {
  const Sums sums(product.rows);
  for (int64_t output = begin; output < end; output += kWidth) {
    const int64_t valid = std::min(kWidth, end - output);
    for (int64_t n = 0, lines = 0; n < valid; n += lines) {
      lines = n + kOutputs <= valid ? kOutputs : 1;
      const int64_t first = output + n, next = first + 2 * lines <= end ? first + lines : first;
      add_outputs(product, first, lines, next, sums, n);
    }
    for (int64_t tile = 0; tile < sums.tiles.count; ++tile) {
      const int64_t last = std::min(sums.tiles.end(tile), product.rows);
      for (int64_t row = sums.tiles.begin(tile); row < last; row += kWidth) {
        transpose(sums.of(tile, 0) + row - sums.tiles.begin(tile), sums.width(tile), valid, std::min(kWidth, last - row),
                  product.y + row * product.y_stride + output, product.y_stride, valid);
      }
    }
  }
}
