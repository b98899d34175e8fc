// Products with the lines of a weight as it is, for one instruction set. Included by linear/kernels.h.
//   FASTGEN_OUTPUTS      outputs that are summed up at the same time; FASTGEN_WIDTH is a multiple of them
//   FASTGEN_ROW_VECTORS  vectors of rows of a tile, at most: 3 or fewer
//   FASTGEN_HALF         floats of half a vector, where that is multiplied in half the time of a whole one; otherwise 0
//   FASTGEN_REPEAT2, FASTGEN_REPEAT4  (from): so many floats over and over, as a vector
//   FASTGEN_SPREAD       lines of which four elements are loaded at a time, where `is_zen5_or_later`, in tiles with one vector
//                        of rows
//   FASTGEN_ONE_OF4, FASTGEN_TWO_OF4  (vector, i): of what FASTGEN_REPEAT4 gives, number i, or pair i, over and over
// A vector holds some rows of one input: so an element of the weight, in every place of a vector, times a vector is what
// it adds to those rows. Neither the weight is moved nor the places of a vector are added up.
//
// With one vector of rows, there would be more vectors to load than to multiply, and an AMD EPYC (Zen 5) loads no faster than
// it multiplies. So four elements of some lines are loaded at a time, and spread over a vector by a unit that does not
// multiply. On Intel's processors, the unit that spreads also multiplies. AMD's before Zen 5 multiply at half the speed.
//
// The last rows may be fewer than a vector has places. If the order of sums does not matter, such a vector holds two or four
// inputs of each row. They are multiplied with as many elements of a line, over and over, which takes no longer to load
// than one of them; the places of a row are added up in the end. Otherwise these rows have half a vector, if it holds them.

constexpr int64_t kWidth = FASTGEN_WIDTH;
constexpr int64_t kOutputs = FASTGEN_OUTPUTS;
constexpr int64_t kInputs = 4;  // of a block of x, which are multiplied at a time

typedef float HalfVector __attribute__((vector_size(FASTGEN_WIDTH / 2 * sizeof(float)), aligned(sizeof(float))));

// The vectors of a tile of rows: whole ones with a row in each place, half of one, and such with two or four inputs of a row.
struct Shape {
  int whole, half, pairs, fours;
  // Rows of one input that are next to each other.
  constexpr int64_t line() const { return kWidth * whole + kWidth / 2 * half; }
  constexpr int64_t block() const { return kInputs * line() + kWidth * (kInputs / 2 * pairs + fours); }
  constexpr int64_t lanes() const { return line() + kWidth * (pairs + fours); }
  constexpr int64_t rows() const { return line() + kWidth / 2 * pairs + kWidth / 4 * fours; }
};

// By the quarters of a vector that the rows fill. Where three are left over, there are not always registers for them.
constexpr Shape kShapes[] = {{0, 0, 0, 1}, {0, 0, 1, 0}, {1, 0, 0, 0}, {1, 0, 0, 0}, {1, 0, 0, 1}, {1, 0, 1, 0},
                             {1, 0, 1, 1}, {2, 0, 0, 0}, {2, 0, 0, 1}, {2, 0, 1, 0}, {3, 0, 0, 0}, {3, 0, 0, 0}};
// By halves of a vector, with sums in order.
constexpr Shape kShapesInOrder[] = {{0, 1, 0, 0}, {1, 0, 0, 0}, {1, 1, 0, 0}, {2, 0, 0, 0}, {2, 1, 0, 0}, {3, 0, 0, 0}};

// What is asked for while input k is multiplied: the same place of the lines from `here`, of those from `there` once k
// has come to `turn`; where it is null, nothing.
struct Ahead {
  const float *here, *there;
  int64_t turn;
};

// Some lines times a tile of rows. Of the last kSpread lines, the elements are loaded four at a time.
template <int kWhole, int kHalf, int kPairs, int kFours, int kLines, int kSpread>
struct LineTile {
  static constexpr Shape kShape = {kWhole, kHalf, kPairs, kFours};
  Vector whole[kLines][kWhole] = {}, pairs[kLines][kPairs] = {}, fours[kLines][kFours] = {};
  HalfVector half[kLines][kHalf] = {};

  // From every fourth line on, so that addresses take few registers.
  static FASTGEN_TARGET inline __attribute__((always_inline)) const float* line(const float* lines, int64_t stride, int n) {
    return lines + n / 4 * 4 * stride + n % 4 * stride;
  }

  static constexpr bool is_spread(int n) { return n >= kLines - kSpread; }

  // An input of all lines, where a row has one place: number kInput of the four that lie in `fours_of`.
  template <int kInput>
  FASTGEN_TARGET inline __attribute__((always_inline)) void add_one(const float* x, const float* lines, int64_t stride,
                                                                    const Vector* fours_of) {
    x += kInput * kShape.line();
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
        const Vector weights = is_spread(n) ? FASTGEN_ONE_OF4(fours_of[n], kInput)
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

  // Two inputs of all lines, where a row has two places: pair kPair of the four.
  template <int kPair>
  FASTGEN_TARGET inline __attribute__((always_inline)) void add_two(const float* x, const float* lines, int64_t stride,
                                                                    const Vector* fours_of) {
    const Vector rows = *reinterpret_cast<const Vector*>(x + kPair * kWidth);
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) {
      const Vector weights = is_spread(n) ? FASTGEN_TWO_OF4(fours_of[n], kPair)
                                          : FASTGEN_REPEAT2(line(lines, stride, n) + 2 * kPair);
      pairs[n][0] += weights * rows;
    }
  }

  // A block of x, of which `inputs` are there. The lines have kInputs, zeros behind those.
  FASTGEN_TARGET inline __attribute__((always_inline)) void add(const float* x, const float* lines, int64_t stride,
                                                                int64_t inputs) {
    static_assert(kInputs == 4);
    Vector fours_of[kLines];
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) {
      if (is_spread(n)) fours_of[n] = FASTGEN_REPEAT4(line(lines, stride, n));
    }
    if constexpr (kWhole + kHalf != 0) {
      add_one<0>(x, lines, stride, fours_of);
      if (inputs > 1) add_one<1>(x, lines, stride, fours_of);
      if (inputs > 2) add_one<2>(x, lines, stride, fours_of);
      if (inputs > 3) add_one<3>(x, lines, stride, fours_of);
    }
    x += kInputs * kShape.line();
    if constexpr (kPairs != 0) {
      add_two<0>(x, lines, stride, fours_of);
      add_two<1>(x, lines, stride, fours_of);
      x += kInputs / 2 * kWidth;
    }
    if constexpr (kFours != 0) {
      const Vector rows = *reinterpret_cast<const Vector*>(x);
#pragma GCC unroll 8
      for (int n = 0; n < kLines; ++n) {
        const Vector weights = is_spread(n) ? fours_of[n] : FASTGEN_REPEAT4(line(lines, stride, n));
        fours[n][0] += weights * rows;
      }
    }
  }

  // To y[kLines, lanes], of which nothing is read where there is a `start` of each line: that counts once for each row.
  FASTGEN_TARGET inline __attribute__((always_inline)) void add_to(float* y, const float* start) const {
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n, y += kShape.lanes()) {
      const float first = start != nullptr ? start[n] : 0.0f;
#pragma GCC unroll 4
      for (int v = 0; v < kWhole; ++v) add_to(reinterpret_cast<Vector*>(y) + v, whole[n][v], start != nullptr, first);
      if constexpr (kHalf != 0) {
        HalfVector* place = reinterpret_cast<HalfVector*>(y + kWhole * kWidth);
        *place = (start != nullptr ? first - HalfVector{} : *place) + half[n][0];
      }
      float* folded = y + kShape.line();
      if constexpr (kPairs != 0) add_to(reinterpret_cast<Vector*>(folded), pairs[n][0], start != nullptr, 0.0f);
      folded += kPairs * kWidth;
      if constexpr (kFours != 0) add_to(reinterpret_cast<Vector*>(folded), fours[n][0], start != nullptr, 0.0f);
    }
  }

  static FASTGEN_TARGET inline __attribute__((always_inline)) void add_to(Vector* place, const Vector& sums, bool starts,
                                                                          float first) {
    *place = (starts ? first - Vector{} : *place) + sums;
  }
};

// y[kLines, lanes of the tile] = start (y itself if null) + kLines lines of the weight times x[blocks of depth]. The products
// are summed among themselves first, in the order in which `tile` sums them: with a place for each row, the result has the
// same bits.
template <int kWhole, int kHalf, int kPairs, int kFours, int kLines, int kSpread>
FASTGEN_TARGET void add_lines(const float* x, const float* lines, int64_t stride, int64_t depth, const float* start,
                              float* y, const Ahead& ahead) {
  LineTile<kWhole, kHalf, kPairs, kFours, kLines, kSpread> tile;
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

template <const auto& kOf, int kLines, int kSpread, size_t... kNumbers>
constexpr std::array<AddLines, sizeof...(kNumbers)> make_add_lines(std::index_sequence<kNumbers...>) {
  return {&add_lines<kOf[kNumbers].whole, kOf[kNumbers].half, kOf[kNumbers].pairs, kOf[kNumbers].fours, kLines,
                     kOf[kNumbers].whole == 1 ? kSpread : 0>...};
}

// For the shapes that there are registers for: of kOutputs lines, and of one.
constexpr size_t kQuarters = 4 * FASTGEN_ROW_VECTORS, kHalves = 2 * FASTGEN_ROW_VECTORS;
constexpr auto kAddLines = make_add_lines<kShapes, kOutputs, 0>(std::make_index_sequence<kQuarters>());
constexpr auto kAddSpread = make_add_lines<kShapes, kOutputs, FASTGEN_SPREAD>(std::make_index_sequence<kQuarters>());
constexpr auto kAddLine = make_add_lines<kShapes, 1, 0>(std::make_index_sequence<kQuarters>());
constexpr auto kAddLinesInOrder = make_add_lines<kShapesInOrder, kOutputs, 0>(std::make_index_sequence<kHalves>());
constexpr auto kAddSpreadInOrder =
    make_add_lines<kShapesInOrder, kOutputs, FASTGEN_SPREAD>(std::make_index_sequence<kHalves>());
constexpr auto kAddLineInOrder = make_add_lines<kShapesInOrder, 1, 0>(std::make_index_sequence<kHalves>());

// Rows from `begin` to `end`: `x` floats of other rows are laid out in front of them for each block of inputs, and their sums
// lie behind `lanes` others of a line.
struct RowTile {
  int64_t begin, end;
  Shape shape;
  AddLines add_lines, add_line;
  int64_t x, lanes;
};

// Rows in tiles of nearly the same size.
inline std::vector<RowTile> tiles_of(int64_t rows, bool in_order) {
  std::vector<RowTile> tiles;
  const auto add = [&](int64_t begin, int64_t end, const Shape& shape, AddLines lines, AddLines line) {
    const RowTile none = {0, 0, {}, nullptr, nullptr, 0, 0}, &last = tiles.empty() ? none : tiles.back();
    tiles.push_back({begin, std::min(end, rows), shape, lines, line, last.x + last.shape.block(),
                     last.lanes + last.shape.lanes()});
  };
  if (in_order) {
    // Of whole vectors the first tiles have more: with half of one more, the last tile is not larger than any may be.
    const int64_t rest = rows % kWidth, half = rest > 0 && rest <= FASTGEN_HALF ? 1 : 0;
    const int64_t vectors = (rows + kWidth - 1) / kWidth - half;
    const int64_t count = (2 * vectors + half + kHalves - 1) / kHalves;
    const auto& lines = fastgen::is_zen5_or_later() ? kAddSpreadInOrder : kAddLinesInOrder;
    const auto begin_of = [&](int64_t i) { return (vectors * i + count - 1) / count; };
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = begin_of(i), halves = 2 * (begin_of(i + 1) - begin) + (i + 1 == count ? half : 0);
      add(begin * kWidth, begin * kWidth + halves * kWidth / 2, kShapesInOrder[halves - 1], lines[halves - 1],
          kAddLineInOrder[halves - 1]);
    }
  } else {
    const int64_t quarter = kWidth / 4, quarters = (rows + quarter - 1) / quarter;
    const int64_t count = (quarters + kQuarters - 1) / kQuarters;
    const auto& lines = fastgen::is_zen5_or_later() ? kAddSpread : kAddLines;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = quarters * i / count, end = quarters * (i + 1) / count, some = end - begin - 1;
      add(begin * quarter, end * quarter, kShapes[some], lines[some], kAddLine[some]);
    }
  }
  return tiles;
}

inline int64_t blocks_of(int64_t inputs) { return (inputs + kInputs - 1) / kInputs; }

inline int64_t floats_of_rows(int64_t rows, int64_t inputs, bool in_order) {
  const RowTile last = tiles_of(rows, in_order).back();
  return (last.x + last.shape.block()) * blocks_of(inputs);
}

// Rows of which each has one place of a vector: [inputs of a block, shape.line()] of each block.
FASTGEN_TARGET inline void lay_out_lines(const RowTile& tile, const float* x, int64_t stride, int64_t inputs, float* to) {
  const int64_t last = std::min(tile.begin + tile.shape.line(), tile.end);
  float block[kWidth * kWidth];
  for (int64_t row = tile.begin; row < last; row += kWidth) {
    float* place = to + row - tile.begin;
    const int64_t wide = std::min(kWidth, tile.begin + tile.shape.line() - row);
    for (int64_t k = 0; k < inputs; k += kWidth) {
      const int64_t some = std::min(kWidth, inputs - k);
      transpose(x + row * stride + k, stride, std::min(kWidth, last - row), some, block, kWidth, kWidth);
      for (int64_t i = 0; i < some; ++i) {
        copy(block + i * kWidth, wide,
             place + (k + i) / kInputs * tile.shape.block() + (k + i) % kInputs * tile.shape.line());
      }
    }
  }
}

// Rows from `first` on that take so many vectors of a block: each row has its next inputs side by side in each of them.
inline void lay_out_several(const RowTile& tile, const float* x, int64_t stride, int64_t first, int64_t rows,
                            int64_t inputs, int64_t vectors, float* to) {
  const int64_t together = kInputs / vectors;
  for (int64_t row = first; row < std::min(first + rows, tile.end); ++row) {
    for (int64_t k = 0; k < inputs; k += together) {
      float* place = to + k / kInputs * tile.shape.block() + k % kInputs / together * kWidth + (row - first) * together;
      std::copy_n(x + row * stride + k, std::min(together, inputs - k), place);
    }
  }
}

inline void lay_out_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, bool in_order, float* to) {
  for (const RowTile& tile : tiles_of(rows, in_order)) {
    const Shape& shape = tile.shape;
    float* place = to + tile.x * blocks_of(inputs);
    if (tile.end - tile.begin < shape.rows() || inputs % kInputs != 0) {
      std::fill_n(place, shape.block() * blocks_of(inputs), 0.0f);
    }
    lay_out_lines(tile, x, stride, inputs, place);
    const int64_t behind = tile.begin + shape.line(), pairs = kWidth / 2 * shape.pairs;
    place += kInputs * shape.line();
    if (shape.pairs != 0) lay_out_several(tile, x, stride, behind, pairs, inputs, 2, place);
    place += kInputs / 2 * kWidth * shape.pairs;
    if (shape.fours != 0) lay_out_several(tile, x, stride, behind + pairs, kWidth / 4, inputs, 1, place);
  }
}

// What kWidth groups of kOutputs outputs of all rows add up to: of each tile, [kWidth, kOutputs, lanes of the tile].
struct Sums {
  Sums(int64_t rows, bool in_order)
      : tiles(tiles_of(rows, in_order)),
        numbers((tiles.back().lanes + tiles.back().shape.lanes()) * kOutputs * kWidth) {}
  int64_t stride(const RowTile& tile) const { return kOutputs * tile.shape.lanes(); }  // from a group to the next one
  float* of(const RowTile& tile, int64_t group) const {
    return numbers.data() + tile.lanes * kOutputs * kWidth + group * stride(tile);
  }
  const std::vector<RowTile> tiles;
  const Aligned numbers;
};

// Outputs that are summed up at the same time: so many, `apart`, from `first` on.
struct Group {
  int64_t first, count, apart;
};

// All rows times the lines of a group, of kOutputs or one, as group `n` of the sums. The lines, kDepth inputs at a time,
// stay in the first-level cache until all rows have been multiplied with them. What is used kDepth inputs later is asked
// for meanwhile, from the lines that follow in the end: so all of the weight is asked for once, whatever the number of
// rows, in the order of its use.
inline void add_group(const LineProduct& product, const Group& group, const Sums& sums, int64_t n) {
  const int64_t inputs = product.inputs, distance = std::min(kDepth, inputs), to_next = product.stride - inputs;
  float start[kOutputs] = {};
  for (int64_t i = 0; i < group.count && product.bias != nullptr; ++i) {
    start[i] = product.bias[group.first + i * group.apart];
  }
  for (int64_t k = 0; k < inputs; k += kDepth) {
    const float* weight = product.weight + group.first * product.stride + k;
    Ahead ahead{weight + distance, weight + distance + to_next, inputs - distance - k};
    for (const RowTile& tile : sums.tiles) {
      const float* x = product.x + tile.x * blocks_of(inputs) + k / kInputs * tile.shape.block();
      const auto add = group.count == kOutputs ? tile.add_lines : tile.add_line;
      add(x, weight, group.apart * product.stride, std::min(kDepth, inputs - k), k == 0 ? start : nullptr,
          sums.of(tile, n), ahead);
      ahead.here = nullptr;
    }
  }
}

// What is to be done with the sums of one output of each of `some` groups, for rows from `row` on, whose lanes begin at
// `from`, those of the next group `stride` behind.
struct ToPut {
  int64_t output, some, row, rows;
  const float* from;
  int64_t stride;
};

inline void put_rows(const LineProduct& product, const ToPut& put) {
  for (int64_t r = 0; r < put.rows; r += kWidth) {
    transpose(put.from + r, put.stride, put.some, std::min(kWidth, put.rows - r),
              product.y + (put.row + r) * product.y_stride + put.output, product.y_stride, put.some);
  }
}

// The same where a row has kTogether lanes, which are added up.
template <int64_t kTogether>
FASTGEN_TARGET inline void put_folded_rows(const LineProduct& product, const ToPut& put) {
  float lanes[kWidth * kWidth];
  Vector bias = {};
  if (product.bias != nullptr) copy(product.bias + put.output, put.some, reinterpret_cast<float*>(&bias));
  transpose(put.from, put.stride, put.some, kWidth, lanes, kWidth, kWidth);
  const Vector* sums = reinterpret_cast<const Vector*>(lanes);
  for (int64_t r = 0; r < put.rows; ++r, sums += kTogether) {
    Vector sum = sums[0] + sums[1];
    if constexpr (kTogether == 4) sum += sums[2] + sums[3];
    sum += bias;
    copy(reinterpret_cast<const float*>(&sum), put.some, product.y + (put.row + r) * product.y_stride + put.output);
  }
}

// The sums of `some` groups, of which the first is this, to where they belong.
inline void put_sums(const LineProduct& product, const Group& group, int64_t some, const Sums& sums) {
  for (const RowTile& tile : sums.tiles) {
    const Shape& shape = tile.shape;
    const int64_t stride = sums.stride(tile);
    for (int64_t i = 0; i < group.count; ++i) {
      ToPut put{group.first + i * group.apart, some, tile.begin, 0, sums.of(tile, 0) + i * shape.lanes(), stride};
      const auto of_rows = [&](int64_t most) {
        put.rows = std::min(most, tile.end - put.row);
        return put;
      };
      put_rows(product, of_rows(shape.line()));
      put.row += shape.line(), put.from += shape.line();
      if (shape.pairs != 0) {
        put_folded_rows<2>(product, of_rows(kWidth / 2));
        put.row += kWidth / 2, put.from += kWidth;
      }
      if (shape.fours != 0) put_folded_rows<4>(product, of_rows(kWidth / 4));
    }
  }
}

// All rows times the outputs from `begin` to `end`. Those that are summed up at the same time are far from each other, so
// that the lines of each are a stream that the machine reads ahead by itself: lines side by side are read more slowly.
FASTGEN_TARGET inline void multiply_lines(const LineProduct& product, bool in_order, int64_t begin, int64_t end) {
  const Sums sums(product.rows, in_order);
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
