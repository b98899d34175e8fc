// GEMM with the rows of a weight, for one instruction set. gemm.cpp compiles it for each with each_isa.h, therefore
// without an include guard.
//
// A vector holds several rows of one input: an element of the weight, broadcast and multiplied by this vector, is their
// contribution. The weight is therefore not moved, and there are no horizontal sums.
//
// With one vector of rows, there would be more loads than multiplications, and an AMD EPYC (Zen 5) loads no faster than
// it multiplies. Four elements of some lines are therefore loaded at a time, and a unit that does not multiply
// broadcasts them. On Intel's processors, the broadcasting unit also multiplies. AMD's before Zen 5 multiply at half
// the speed.
//
// The last rows may be fewer than the lanes of a vector: they use half a vector, if they fit.

#include "gemm_pieces.h"

constexpr int64_t kOutputs = by_width(4, 4, 8);  // summed at the same time; kWidth is a multiple of them
constexpr int kRowVectors = by_width(2, 3, 3);   // of rows of a tile, at most: 3 or fewer
constexpr int kHalfVector = by_width(0, 0, 8);   // floats of half a vector, if that takes half the time of a whole one
constexpr int kSpreadRows = by_width(0, 0, 4);   // of the weight, loaded four elements at a time
constexpr int64_t kInputs = 4;                   // of a block of x, multiplied at a time

typedef float HalfVector __attribute__((vector_size(FASTGEN_WIDTH / 2 * sizeof(float)), aligned(sizeof(float))));

// The vectors of a tile of rows: whole ones with a row in each lane, and half of one.
struct Shape {
  int whole, half;
  // Rows, which are adjacent for each input.
  constexpr int64_t rows() const { return kWidth * whole + kWidth / 2 * half; }
  constexpr int64_t block() const { return kInputs * rows(); }
};

// By the number of half vectors that the rows fill.
constexpr Shape kShapes[] = {{0, 1}, {1, 0}, {1, 1}, {2, 0}, {2, 1}, {3, 0}};

// The prefetches while input k is multiplied: the same position of the lines from `here`, or from `there` once k has
// reached `turn`; nothing if null.
struct Ahead {
  const float *here, *there;
  int64_t turn;
};

// Some lines times a tile of rows. The elements of the last kSpread lines are loaded four at a time.
template <int kWhole, int kHalf, int kLines, int kSpread>
struct LineTile {
  static constexpr Shape kShape = {kWhole, kHalf};
  Vector whole[kLines][kWhole] = {};
  HalfVector half[kLines][kHalf] = {};

  // Relative to every fourth line, so that addresses take few registers.
  static FASTGEN_INLINE const float* line(const float* lines, int64_t stride, int n) {
    return lines + n / 4 * 4 * stride + n % 4 * stride;
  }

  static constexpr bool is_spread(int n) { return n >= kLines - kSpread; }

  // Adds one input of all lines: number kInput of the four in `fours_of`.
  template <int kInput>
  FASTGEN_INLINE void add_one(const float* x, const float* lines, int64_t stride,
                                                                    const Vector* fours_of) {
    x += kInput * kShape.rows();
    Vector rows[kWhole];
    HalfVector last[kHalf];
#pragma GCC unroll 4
    for (int v = 0; v < kWhole; ++v) rows[v] = reinterpret_cast<const Vector*>(x)[v];
    if constexpr (kHalf != 0) last[0] = *reinterpret_cast<const HalfVector*>(x + kWhole * kWidth);
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) {
      if constexpr (kWhole == 0) {
        half[n][0] += line(lines, stride, n)[kInput] * last[0];
      } else {
        // Loaded once, for the half too.
        const Vector weights = is_spread(n) ? one_of4<kInput>(fours_of[n])
                                            : line(lines, stride, n)[kInput] - Vector{};
#pragma GCC unroll 4
        for (int v = 0; v < kWhole; ++v) whole[n][v] += weights * rows[v];
        if constexpr (kHalf != 0) {
          HalfVector some;
          std::memcpy(&some, &weights, sizeof(some));
          half[n][0] += some * last[0];
        }
      }
    }
  }

  // Adds a block of x with `inputs` valid inputs. The lines have kInputs, padded with zeros.
  FASTGEN_INLINE void add(const float* x, const float* lines, int64_t stride,
                                                                int64_t inputs) {
    static_assert(kInputs == 4);
    Vector fours_of[kLines];
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) {
      if (is_spread(n)) fours_of[n] = repeat4(line(lines, stride, n));
    }
    add_one<0>(x, lines, stride, fours_of);
    if (inputs > 1) add_one<1>(x, lines, stride, fours_of);
    if (inputs > 2) add_one<2>(x, lines, stride, fours_of);
    if (inputs > 3) add_one<3>(x, lines, stride, fours_of);
  }

  // Adds to y[kLines, rows]; with a `start` for each line, overwrites y instead.
  FASTGEN_INLINE void add_to(float* y, const float* start) const {
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n, y += kShape.rows()) {
      const float first = start != nullptr ? start[n] : 0.0f;
#pragma GCC unroll 4
      for (int v = 0; v < kWhole; ++v) {
        Vector* place = reinterpret_cast<Vector*>(y) + v;
        *place = (start != nullptr ? first - Vector{} : *place) + whole[n][v];
      }
      if constexpr (kHalf != 0) {
        HalfVector* place = reinterpret_cast<HalfVector*>(y + kWhole * kWidth);
        *place = (start != nullptr ? first - HalfVector{} : *place) + half[n][0];
      }
    }
  }
};

// y[kLines, rows of the tile] = start (y itself if null) + kLines lines of the weight times x[blocks of depth]. The
// products are summed separately first, in the same order as in `tile`: the result has the same bits.
template <int kWhole, int kHalf, int kLines, int kSpread>
FASTGEN_TARGET void add_lines(const float* x, const float* lines, int64_t stride, int64_t depth, const float* start,
                              float* y, const Ahead& ahead) {
  LineTile<kWhole, kHalf, kLines, kSpread> tile;
  for (int64_t begin = 0; begin < depth; begin += kLine) {
    if (ahead.here != nullptr) {
      const float* next = (begin < ahead.turn ? ahead.here : ahead.there) + begin;
#pragma GCC unroll 8
      for (int n = 0; n < kLines; ++n) __builtin_prefetch(next + n * stride, 0, 3);
    }
    const int64_t whole = std::min(begin + kLine, depth / kInputs * kInputs);
    for (int64_t k = begin; k < whole; k += kInputs) {
      tile.add(x + k / kInputs * tile.kShape.block(), lines + k, stride, kInputs);
    }
  }
  if (const int64_t rest = depth % kInputs; rest != 0) {
    float last[kLines * kInputs] = {};
    for (int n = 0; n < kLines; ++n) std::copy_n(lines + n * stride + depth - rest, rest, last + n * kInputs);
    tile.add(x + depth / kInputs * tile.kShape.block(), last, kInputs, rest);
  }
  tile.add_to(y, start);
}

using AddLines = void (*)(const float*, const float*, int64_t, int64_t, const float*, float*, const Ahead&);

template <int kLines, int kSpread, size_t... kNumbers>
constexpr std::array<AddLines, sizeof...(kNumbers)> make_add_lines(std::index_sequence<kNumbers...>) {
  return {&add_lines<kShapes[kNumbers].whole, kShapes[kNumbers].half, kLines,
                     kShapes[kNumbers].whole == 1 ? kSpread : 0>...};
}

// For the shapes that fit the registers: of kOutputs lines, and of one.
constexpr size_t kHalves = 2 * kRowVectors;
constexpr auto kAddLines = make_add_lines<kOutputs, 0>(std::make_index_sequence<kHalves>());
constexpr auto kAddSpread = make_add_lines<kOutputs, kSpreadRows>(std::make_index_sequence<kHalves>());
constexpr auto kAddLine = make_add_lines<1, 0>(std::make_index_sequence<kHalves>());

// Rows from `begin` to `end`: `x` floats of other rows precede them in each packed block of inputs, and the sums of
// `above` other rows precede theirs.
struct RowTile {
  int64_t begin, end;
  Shape shape;
  AddLines add_lines, add_line;
  int64_t x, above;
};

// Divides rows into tiles of nearly the same size. The first tiles have more whole vectors, so that the last one does
// not exceed the limit with its additional half.
inline std::vector<RowTile> tiles_of(int64_t rows) {
  std::vector<RowTile> tiles;
  const int64_t rest = rows % kWidth, half = rest > 0 && rest <= kHalfVector ? 1 : 0;
  const int64_t vectors = (rows + kWidth - 1) / kWidth - half;
  const int64_t count = (2 * vectors + half + kHalves - 1) / kHalves;
  const auto& lines = fastgen::is_zen5_or_later() ? kAddSpread : kAddLines;
  const auto begin_of = [&](int64_t i) { return (vectors * i + count - 1) / count; };
  int64_t x = 0, above = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = begin_of(i), halves = 2 * (begin_of(i + 1) - begin) + (i + 1 == count ? half : 0);
    const Shape& shape = kShapes[halves - 1];
    tiles.push_back({begin * kWidth, std::min(begin * kWidth + shape.rows(), rows), shape, lines[halves - 1],
                     kAddLine[halves - 1], x, above});
    x += shape.block(), above += shape.rows();
  }
  return tiles;
}

inline int64_t blocks_of(int64_t inputs) { return (inputs + kInputs - 1) / kInputs; }

inline int64_t floats_of_rows(int64_t rows, int64_t inputs) {
  const RowTile last = tiles_of(rows).back();
  return (last.x + last.shape.block()) * blocks_of(inputs);
}

// Packs the rows of a tile: [inputs of a block, rows] of each block.
FASTGEN_TARGET inline void pack_tile(const RowTile& tile, const float* x, int64_t stride, int64_t inputs, float* to) {
  float block[kWidth * kWidth];
  for (int64_t row = tile.begin; row < tile.end; row += kWidth) {
    float* place = to + row - tile.begin;
    const int64_t wide = std::min(kWidth, tile.begin + tile.shape.rows() - row);
    for (int64_t k = 0; k < inputs; k += kWidth) {
      const int64_t some = std::min(kWidth, inputs - k);
      transpose(x + row * stride + k, stride, std::min(kWidth, tile.end - row), some, block, kWidth, kWidth);
      for (int64_t i = 0; i < some; ++i) {
        copy(block + i * kWidth, wide,
             place + (k + i) / kInputs * tile.shape.block() + (k + i) % kInputs * tile.shape.rows());
      }
    }
  }
}

inline void pack_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, float* to) {
  for (const RowTile& tile : tiles_of(rows)) {
    float* place = to + tile.x * blocks_of(inputs);
    if (tile.end - tile.begin < tile.shape.rows() || inputs % kInputs != 0) {
      std::fill_n(place, tile.shape.block() * blocks_of(inputs), 0.0f);
    }
    pack_tile(tile, x, stride, inputs, place);
  }
}

// The sums of kWidth groups of kOutputs outputs of all rows: for each tile, [kWidth, kOutputs, rows of the tile].
struct Sums {
  explicit Sums(int64_t rows)
      : tiles(tiles_of(rows)), numbers((tiles.back().above + tiles.back().shape.rows()) * kOutputs * kWidth) {}
  int64_t stride(const RowTile& tile) const { return kOutputs * tile.shape.rows(); }  // from one group to the next
  float* of(const RowTile& tile, int64_t group) const {
    return numbers.data() + tile.above * kOutputs * kWidth + group * stride(tile);
  }
  const std::vector<RowTile> tiles;
  const Aligned<float> numbers;
};

// Outputs that are summed at the same time: `count` of them, `apart`, from `first` on.
struct Group {
  int64_t first, count, apart;
};

// Multiplies all rows with the lines of a group, of kOutputs or one, as group `n` of the sums. The lines, kDepth inputs
// at a time, stay in the first-level cache until all rows have been multiplied with them. Meanwhile the data kDepth
// inputs later is prefetched, at the end from the following lines: all of the weight is prefetched once, for any number
// of rows, in the order of its use.
inline void add_group(const Operands& product, const Group& group, const Sums& sums, int64_t n) {
  const int64_t inputs = product.inputs, distance = std::min(kDepth, inputs), to_next = product.weight_stride - inputs;
  float start[kOutputs] = {};
  for (int64_t i = 0; i < group.count && product.bias != nullptr; ++i) {
    start[i] = product.bias[group.first + i * group.apart];
  }
  for (int64_t k = 0; k < inputs; k += kDepth) {
    const float* weight = product.weight + group.first * product.weight_stride + k;
    Ahead ahead{weight + distance, weight + distance + to_next, inputs - distance - k};
    for (const RowTile& tile : sums.tiles) {
      const float* x = product.x + tile.x * blocks_of(inputs) + k / kInputs * tile.shape.block();
      const auto add = group.count == kOutputs ? tile.add_lines : tile.add_line;
      add(x, weight, group.apart * product.weight_stride, std::min(kDepth, inputs - k), k == 0 ? start : nullptr,
          sums.of(tile, n), ahead);
      ahead.here = nullptr;
    }
  }
}

// Writes the sums of `some` groups, the first of which is `group`, to the result.
inline void put_sums(const Operands& product, const Group& group, int64_t some, const Sums& sums) {
  for (const RowTile& tile : sums.tiles) {
    for (int64_t i = 0; i < group.count; ++i) {
      const float* from = sums.of(tile, 0) + i * tile.shape.rows();
      float* to = product.y + group.first + i * group.apart;
      for (int64_t row = tile.begin; row < tile.end; row += kWidth) {
        transpose(from + row - tile.begin, sums.stride(tile), some, std::min(kWidth, tile.end - row),
                  to + row * product.outputs, product.outputs, some);
      }
    }
  }
}

// Multiplies all rows with the outputs from `begin` to `end`. The outputs summed at the same time are far apart, so
// that the lines of each are a stream that the hardware prefetcher follows: adjacent lines are read more slowly.
FASTGEN_TARGET inline void multiply_rows(const Operands& product, int64_t begin, int64_t end) {
  const Sums sums(product.rows);
  const int64_t apart = (end - begin) / kOutputs;
  const auto multiply = [&](int64_t first, int64_t count, int64_t groups) {
    for (int64_t done = 0; done < groups; done += kWidth) {
      const int64_t some = std::min(kWidth, groups - done);
      for (int64_t n = 0; n < some; ++n) add_group(product, {first + done + n, count, apart}, sums, n);
      put_sums(product, {first + done, count, apart}, some, sums);
    }
  };
  multiply(begin, kOutputs, apart);
  multiply(begin + kOutputs * apart, 1, end - begin - kOutputs * apart);
}

FASTGEN_TARGET inline void upcast(const uint16_t* from, int64_t count, bool is_half, float* to) {
  if (!is_half) {
    for (int64_t i = 0; i < count; ++i) to[i] = fastgen::to_float(from[i]);
    return;
  }
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) load_float16(*reinterpret_cast<Vector*>(to + i), from + i);
  for (; i < count; ++i) to[i] = fastgen::float16_to_float(from[i]);
}

FASTGEN_TARGET inline void downcast(const float* from, int64_t count, bool is_half, uint16_t* to) {
  if (is_half) {
    for (int64_t i = 0; i < count; ++i) to[i] = fastgen::to_float16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = fastgen::to_bfloat16(from[i]);
  }
}

constexpr Kernel kKernel = {kPanel,     &multiply,      &pack_piece, kWidth,   &floats_of_rows,
                            &pack_rows, &multiply_rows, &upcast,     &downcast};
