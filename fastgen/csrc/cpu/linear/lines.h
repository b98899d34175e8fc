// Products with the lines of a weight as it is, for one instruction set. Included by linear/kernels.h.
//   FASTGEN_OUTPUTS      outputs that are summed up at the same time; FASTGEN_WIDTH is a multiple of them
//   FASTGEN_ROW_VECTORS  vectors of rows of a tile, at most
//   FASTGEN_HALF         floats of half a vector, where that is multiplied in half the time of a whole one; otherwise 0
// A vector holds some rows of one input: so an element of the weight, in every place of a vector, times a vector is what
// it adds to those rows. Neither the weight is moved nor the places of a vector are added up.

constexpr int64_t kWidth = FASTGEN_WIDTH;
constexpr int64_t kOutputs = FASTGEN_OUTPUTS;

// For the last rows, where they fill no more than half a vector.
typedef float HalfVector __attribute__((vector_size(FASTGEN_WIDTH / 2 * sizeof(float)), aligned(sizeof(float))));

// Rows in tiles of nearly the same size; `rows` may end inside the last one, and that may end with half a vector. Tile i
// lies at x + begin(i) * inputs, as [inputs, end(i) - begin(i)].
struct RowTiles {
  explicit RowTiles(int64_t rows)
      : half(rows % kWidth > 0 && rows % kWidth <= FASTGEN_HALF ? FASTGEN_HALF : 0),
        vectors((rows - half + kWidth - 1) / kWidth),
        count((lanes() + kMostLanes - 1) / kMostLanes) {}
  // Of whole vectors the first tiles have more: with half of one more, the last tile is not larger than any may be.
  int64_t begin(int64_t tile) const { return (vectors * tile + count - 1) / count * kWidth; }
  int64_t end(int64_t tile) const { return tile + 1 < count ? begin(tile + 1) : lanes(); }
  int64_t lanes() const { return vectors * kWidth + half; }
  static constexpr int64_t kMostLanes = FASTGEN_ROW_VECTORS * kWidth;
  int64_t half, vectors, count;
};

inline int64_t floats_of_rows(int64_t rows, int64_t inputs) { return RowTiles(rows).lanes() * inputs; }

inline void lay_out_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, float* to) {
  const RowTiles tiles(rows);
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    const int64_t begin = tiles.begin(tile), width = tiles.end(tile) - begin;
    lay_out({x + begin * stride, stride, 1}, std::min(width, rows - begin), inputs, width, to + begin * inputs);
  }
}

// What is asked for while input k is multiplied: the same place of the lines from `here`, of those from `there` once k
// has come to `turn`; where it is null, nothing.
struct Ahead {
  const float *here, *there;
  int64_t turn;
};

// Some lines times a tile of rows: kVectors whole vectors of rows, and with kHalf half of one.
template <int kVectors, int kHalf, int kLines>
struct LineTile {
  Vector whole[kLines][kVectors] = {};
  HalfVector half[kLines][kHalf] = {};

  static constexpr int64_t kLanes = kVectors * kWidth + kHalf * kWidth / 2;

  // An input of all lines. Two inputs at a time for each output take 8 % longer on Zen 4.
  FASTGEN_TARGET inline __attribute__((always_inline)) void add(const float* x, const float* lines, int64_t stride) {
    Vector rows[kVectors];
    HalfVector last[kHalf];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) rows[v] = reinterpret_cast<const Vector*>(x)[v];
    if constexpr (kHalf != 0) last[0] = *reinterpret_cast<const HalfVector*>(x + kVectors * kWidth);
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) {
      // From every fourth line on, so that addresses take few registers.
      const float weight = (lines + n / 4 * 4 * stride)[n % 4 * stride];
      if constexpr (kVectors == 0) {
        half[n][0] += weight * last[0];
      } else {
        const Vector weights = weight - Vector{};  // loaded once, for the half too
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) whole[n][v] += weights * rows[v];
        if constexpr (kHalf != 0) {
          HalfVector some;
          std::memcpy(&some, &weights, sizeof(some));
          half[n][0] += some * last[0];
        }
      }
    }
  }

  FASTGEN_TARGET inline __attribute__((always_inline)) void add_to(float* y) const {
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) reinterpret_cast<Vector*>(y + n * kLanes)[v] += whole[n][v];
      if constexpr (kHalf != 0) *reinterpret_cast<HalfVector*>(y + n * kLanes + kVectors * kWidth) += half[n][0];
    }
  }
};

// y[kLines, lanes of the tile] += kLines lines of the weight times x[depth, lanes of the tile]. The products are summed among
// themselves first, in the order in which `tile` sums them: the result has the same bits.
template <int kVectors, int kHalf, int kLines>
FASTGEN_TARGET void add_lines(const float* x, const float* lines, int64_t stride, int64_t depth, float* y,
                              const Ahead& ahead) {
  LineTile<kVectors, kHalf, kLines> tile;
  for (int64_t begin = 0; begin < depth; begin += kLine) {
    if (ahead.here != nullptr) {
      const float* next = (begin < ahead.turn ? ahead.here : ahead.there) + begin;
#pragma GCC unroll 8
      for (int n = 0; n < kLines; ++n) __builtin_prefetch(next + n * stride, 0, 3);
    }
    const int64_t end = std::min(begin + kLine, depth);
    for (int64_t k = begin; k < end; ++k) tile.add(x + k * tile.kLanes, lines + k, stride);
  }
  tile.add_to(y);
}

using AddLines = void (*)(const float*, const float*, int64_t, int64_t, float*, const Ahead&);

template <int kLines, size_t... kHalves>
constexpr std::array<AddLines, sizeof...(kHalves)> make_add_lines(std::index_sequence<kHalves...>) {
  return {&add_lines<static_cast<int>(kHalves + 1) / 2, static_cast<int>(kHalves + 1) % 2, kLines>...};
}

// By the number of half vectors, less one: for kOutputs lines, and for one.
constexpr auto kAddLines = make_add_lines<FASTGEN_OUTPUTS>(std::make_index_sequence<2 * FASTGEN_ROW_VECTORS>());
constexpr auto kAddLine = make_add_lines<1>(std::make_index_sequence<2 * FASTGEN_ROW_VECTORS>());

// What kWidth groups of kOutputs outputs of all rows add up to: of each tile, [kWidth, kOutputs, rows of the tile].
struct Sums {
  explicit Sums(int64_t rows) : tiles(rows), numbers(tiles.lanes() * kOutputs * kWidth) {}
  int64_t width(int64_t tile) const { return tiles.end(tile) - tiles.begin(tile); }
  int64_t stride(int64_t tile) const { return kOutputs * width(tile); }  // from a group to the next one
  float* of(int64_t tile, int64_t group) const {
    return numbers.data() + tiles.begin(tile) * kOutputs * kWidth + group * stride(tile);
  }
  const RowTiles tiles;
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
  const auto& add = group.count == kOutputs ? kAddLines : kAddLine;
  const int64_t inputs = product.inputs, distance = std::min(kDepth, inputs), to_next = product.stride - inputs;
  for (int64_t tile = 0; tile < sums.tiles.count; ++tile) {
    const int64_t width = sums.width(tile);
    for (int64_t i = 0; i < group.count; ++i) {
      const float start = product.bias == nullptr ? 0.0f : product.bias[group.first + i * group.apart];
      std::fill_n(sums.of(tile, n) + i * width, width, start);
    }
  }
  for (int64_t k = 0; k < inputs; k += kDepth) {
    const float* weight = product.weight + group.first * product.stride + k;
    Ahead ahead{weight + distance, weight + distance + to_next, inputs - distance - k};
    for (int64_t tile = 0; tile < sums.tiles.count; ++tile) {
      const int64_t width = sums.width(tile);
      const float* x = product.x + sums.tiles.begin(tile) * inputs + k * width;
      const int64_t depth = std::min(kDepth, inputs - k);
      add[2 * width / kWidth - 1](x, weight, group.apart * product.stride, depth, sums.of(tile, n), ahead);
      ahead.here = nullptr;
    }
  }
}

// The sums of `some` groups, of which the first is this, to where they belong.
inline void put_sums(const LineProduct& product, const Group& group, int64_t some, const Sums& sums) {
  for (int64_t tile = 0; tile < sums.tiles.count; ++tile) {
    const int64_t begin = sums.tiles.begin(tile), last = std::min(sums.tiles.end(tile), product.rows);
    for (int64_t i = 0; i < group.count; ++i) {
      for (int64_t row = begin; row < last; row += kWidth) {
        transpose(sums.of(tile, 0) + i * sums.width(tile) + row - begin, sums.stride(tile), some,
                  std::min(kWidth, last - row), product.y + row * product.y_stride + group.first + i * group.apart,
                  product.y_stride, some);
      }
    }
  }
}

// All rows times the outputs from `begin` to `end`. Those that are summed up at the same time are far from each other, so
// that the lines of each are a stream that the machine reads ahead by itself: lines side by side are read more slowly.
FASTGEN_TARGET inline void multiply_lines(const LineProduct& product, int64_t begin, int64_t end) {
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
