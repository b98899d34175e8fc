// GEMM with float activations on a packed weight, for one instruction set. panels.cpp compiles it for each with
// each_isa.h, therefore without an include guard.

constexpr int64_t kMostRows = by_width(12, 12, 28);  // of a tile: its vectors of sums fit the registers

// Packs x[padded inputs, rows of the tile]: zeros follow the inputs.
template <int kRows>
FASTGEN_TARGET void pack_tile(const float* x, int64_t stride, int64_t inputs, int64_t padded, float* to) {
  int64_t k = 0;
  // In squares; the last one overlaps so that it ends with the last row.
  if constexpr (kRows >= kWidth) {
    for (; k + kWidth <= inputs; k += kWidth) {
      for (int64_t r = 0; r < kRows; r += kWidth) {
        const int64_t row = std::min<int64_t>(r, kRows - kWidth);
        transpose_block(x + row * stride + k, stride, to + k * kRows + row, kRows);
      }
    }
  }
  for (; k < inputs; ++k) {
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r) to[k * kRows + r] = x[r * stride + k];
  }
  std::fill_n(to + inputs * kRows, (padded - inputs) * kRows, 0.0f);
}

using Pack = void (*)(const float*, int64_t, int64_t, int64_t, float*);

template <size_t... kRows>
constexpr std::array<Pack, sizeof...(kRows)> make_packs(std::index_sequence<kRows...>) {
  return {&pack_tile<static_cast<int>(kRows) + 1>...};
}

// By the number of rows, less one.
using RowCounts = std::make_index_sequence<kMostRows>;
constexpr auto kPacks = make_packs(RowCounts());

// Packs all rows in tiles, one after the other.
inline void pack_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, int64_t padded, float* to) {
  const RowTiles tiles(rows, kMostRows);
  for (int64_t i = 0; i < tiles.count; ++i) {
    kPacks[tiles.size(i) - 1](x + tiles.begin(i) * stride, stride, inputs, padded, to + tiles.begin(i) * padded);
  }
}

// A 16-bit weight. A panel has a line for every two inputs, with the numbers of all its outputs, a vector wide. `load`
// returns those of one input.
struct BFloat16 {
  // The numbers of two inputs share a lane. Shifting upcasts the first, clearing the first upcasts the second.
  static FASTGEN_INLINE Vector load(const uint8_t* line, int input) {
    const Bits pairs = *reinterpret_cast<const Bits*>(line);
    return (Vector)(input == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
};

struct Float16 {
  static FASTGEN_INLINE Vector load(const uint8_t* line, int input) {
    Vector numbers;
    load_float16(numbers, reinterpret_cast<const uint16_t*>(line) + input * kWidth);
    return numbers;
  }
};

constexpr int64_t kLineInputs = 2, kLineBytes = sizeof(Vector);

// Prefetch distance in bytes, over all streams together. With less, an AMD EPYC (Zen 5) does not multiply while it
// reads memory.
constexpr int64_t kAhead = 8192;

// part[kRows][kPanels] += one input of all rows, times its weights; `input` is its index within the line.
template <class Type, int kRows, int kPanels>
FASTGEN_INLINE void add_input(const float* rows, const uint8_t* line, int64_t apart, int input,
                              Vector (&part)[kRows][kPanels]) {
  Vector weights[kPanels];
#pragma GCC unroll 4
  for (int n = 0; n < kPanels; ++n) weights[n] = Type::load(line + n * apart, input);
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kPanels; ++n) part[r][n] += rows[r] * weights[n];
  }
}

// The same for the inputs of a line, x[inputs, kRows].
template <class Type, int kRows, int kPanels>
FASTGEN_INLINE void add_line(const float* x, const uint8_t* line, int64_t apart, Vector (&part)[kRows][kPanels]) {
#pragma GCC unroll 4
  for (int n = 0; n < kPanels; ++n) __builtin_prefetch(line + n * apart + kAhead / kPanels, 0, 3);
#pragma GCC unroll 2
  for (int k = 0; k < kLineInputs; ++k) add_input<Type, kRows, kPanels>(x + k * kRows, line, apart, k, part);
}

// Panels of 16-bit weights, each as wide as a vector.
template <class Type>
struct Halves {
  static constexpr int64_t kOutputs = kWidth;
  static constexpr int vectors_at_once(int64_t rows) { return static_cast<int>(std::min<int64_t>(kMostRows / rows, 4)); }

  // sums[kRows][kPanels] += x[inputs][kRows] times kPanels panels, which are `apart`. The products of kDepth inputs are
  // summed separately first, in the same order as in GEMM on the unpacked weight: the result has the same bits.
  template <int kRows, int kPanels>
  FASTGEN_TARGET static void tile(const float* x, const Weight& weight, int64_t first, int64_t, int64_t apart, int64_t inputs,
                                  Vector* sums) {
    static_assert(kDepth % kLineInputs == 0, "sums are of whole lines");
    const uint8_t* panel = weight.qweight + first * weight.panel_bytes;
    apart *= weight.panel_bytes;
    for (int64_t begin = 0; begin < inputs; begin += kDepth) {
      const int64_t end = begin + kDepth < inputs ? begin + kDepth : inputs;
      Vector part[kRows][kPanels] = {};
      for (int64_t k = begin; k < end; k += kLineInputs, panel += kLineBytes) {
        add_line<Type, kRows, kPanels>(x + k * kRows, panel, apart, part);
      }
#pragma GCC unroll 32
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < kPanels; ++n) sums[r * kPanels + n] += part[r][n];
      }
    }
  }
};

// A weight in a group is `value * scale + least`.
struct Factors {
  Vector scale, least;
};

FASTGEN_INLINE Vector load_factor(const void* from, int64_t at, bool is_half) {
  if (!is_half) return *reinterpret_cast<const Vector*>(static_cast<const float*>(from) + at);
  Vector found;
  load_float16(found, static_cast<const uint16_t*>(from) + at);
  return found;
}

// Loads the factors of a vector of outputs, the first of which is `at`. All of this is exact, except for zeros with
// scales of many digits, which are not supported (fastgen/ops/linear/weights.py).
FASTGEN_INLINE Factors load_factors(const Weight& weight, int64_t at) {
  if (weight.block_scales != nullptr) {
    const BlockScale of = block_scale(weight, at);
    const Vector unit = load_factor(of.unit, 0, true);
    if (!weight.has_mins()) {
      const Vector scale = unit * (load_bytes(of.scale) - static_cast<float>(fastgen::kSignedZero));
      return {scale, scale * static_cast<float>(-weight.zero_point)};
    }
    return {unit * load_bytes(of.scale), load_factor(of.unit + kPanel, 0, true) * load_bytes(of.scale + kPanel)};
  }
  const Vector scale = load_factor(weight.scales, at, weight.is_half);
  if (weight.mins != nullptr) return {scale, load_factor(weight.mins, at, weight.is_half)};
  if (weight.zeros != nullptr) return {scale, scale * -load_bytes(weight.zeros + at)};
  return {scale, scale * static_cast<float>(-weight.zero_point)};
}

constexpr int64_t kPanelVectors = kPanel / kWidth;

// The locations of a tile's vectors: side by side in one panel, and in another one, `apart` panels away.
template <int kVectors>
struct Spread {
  static constexpr int64_t kBeside = kVectors < kPanelVectors ? kVectors : kPanelVectors;
  static constexpr int64_t panels(int n) { return n / kBeside; }
  static constexpr int64_t outputs(int n) { return n % kBeside * kWidth; }
};

// Loads the factors of consecutive groups, for each vector of a tile. This happens before the multiplications, which
// leave too few registers.
constexpr int64_t kMostGroups = kDepth / 8;
template <int kVectors>
FASTGEN_INLINE void load_groups(const Weight& weight, int64_t at, int64_t apart, int64_t groups,
                                Factors (&to)[kMostGroups][kVectors]) {
  for (int64_t group = 0; group < groups; ++group, at += kPanel) {
    for (int n = 0; n < kVectors; ++n) {
      using Vectors = Spread<kVectors>;
      to[group][n] = load_factors(weight, at + Vectors::panels(n) * apart + Vectors::outputs(n));
    }
  }
}

// The quantised values of a weight, in sets of lines (packed.h). A line has a word for each output of a panel: the bits
// of four inputs, or the lower nibbles of eight.
template <int kBits>
struct Values {
  static constexpr int64_t kWords = fastgen::low_lines(kBits), kInputs = fastgen::set_inputs(kBits);
  static constexpr int kFours = kBits == 8 ? 1 : 2;  // groups of four inputs in a word

  FASTGEN_INLINE static Bits load(const uint8_t* line) { return *reinterpret_cast<const Bits*>(line); }

  // Returns four inputs as bytes. `high` has their upper bits lowest, and then those of the next four.
  FASTGEN_INLINE static Bits bytes(const Bits& word, int four, Bits& high) {
    if (kBits == 8) return word;
    const Bits low = (four == 0 ? word : word >> 4) & 0x0f0f0f0fu;
    if (kBits == 4) return low;
    const Bits found = low | ((high << 4) & (kBits == 5 ? 0x10101010u : 0x30303030u));
    high >>= kBits - 4;
    return found;
  }
};

// part[kRows][kVectors] += x[inputs of a set of lines][kRows] times their weights.
template <int kBits, int kRows, int kVectors>
FASTGEN_INLINE void add_set(const float* x, const uint8_t* set, int64_t apart, const Factors (&factors)[kVectors],
                            Vector (&part)[kRows][kVectors]) {
  using Of = Values<kBits>;
  using Vectors = Spread<kVectors>;
  const auto line_of = [&](int n, int64_t line) {
    return set + Vectors::panels(n) * apart + Vectors::outputs(n) * 4 + line * kLine;
  };
  Bits high[kVectors];
#pragma GCC unroll 4
  for (int n = 0; n < kVectors; ++n) high[n] = kBits % 4 == 0 ? Bits{} : Of::load(line_of(n, Of::kWords));
#pragma GCC unroll 1
  for (int64_t word = 0; word < Of::kWords; ++word) {
    Bits words[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) words[n] = Of::load(line_of(n, word));
#pragma GCC unroll 2
    for (int four = 0; four < Of::kFours; ++four) {
      Bits bytes[kVectors];
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) bytes[n] = Of::bytes(words[n], four, high[n]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i, x += kRows) {
        Vector weights[kVectors];
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) {
          const Vector value = __builtin_convertvector((Ints)byte_of(bytes[n], i), Vector);
          weights[n] = value * factors[n].scale + factors[n].least;
        }
#pragma GCC unroll 32
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int n = 0; n < kVectors; ++n) part[r][n] += x[r] * weights[n];
        }
      }
    }
  }
}

// Panels of a weight in groups.
template <int kBits>
struct Groups {
  static constexpr int64_t kOutputs = kPanel;
  static constexpr int vectors_at_once(int64_t rows) { return rows * 4 <= kMostRows ? 4 : rows * 2 <= kMostRows ? 2 : 1; }

  // sums[kRows][kVectors] += x[inputs][kRows] times outputs of a panel, from `first` on. The products of kDepth inputs
  // are summed separately first, in the same order as in GEMM on the unpacked weight: the result has the same bits.
  template <int kRows, int kVectors>
  FASTGEN_TARGET static void tile(const float* x, const Weight& weight, int64_t panel, int64_t first, int64_t apart,
                                  int64_t inputs, Vector* sums) {
    using Vectors = Spread<kVectors>;
    constexpr int64_t kSet = Values<kBits>::kInputs, kSetBytes = kSet * kPanel * kBits / 8;
    constexpr int64_t kStreams = Vectors::panels(kVectors - 1) + 1;
    const int64_t size = weight.group_size, group_bytes = size * kPanel * kBits / 8, bytes_apart = apart * weight.panel_bytes;
    const int64_t factors_apart = apart * weight.groups * kPanel;
    const uint8_t* set = weight.qweight + panel * weight.panel_bytes + first * 4;
    int64_t at = panel * weight.groups * kPanel + first;
    for (int64_t begin = 0; begin < inputs; begin += kDepth) {
      const int64_t end = begin + kDepth < inputs ? begin + kDepth : inputs;
      const int64_t groups = (end - begin + size - 1) / size;
      Factors factors[kMostGroups][kVectors];
      load_groups<kVectors>(weight, at, factors_apart, groups, factors);
      at += groups * kPanel;
      Vector part[kRows][kVectors] = {};
      for (int64_t k = begin, group = 0; k < end; k += size, ++group) {
#pragma GCC unroll 4
        for (int n = 0; n < kStreams; ++n) {
          const uint8_t* ahead = set + n * bytes_apart + kAhead / kStreams;
          for (int64_t line = 0; line < group_bytes; line += 64) __builtin_prefetch(ahead + line, 0, 3);
        }
        const int64_t last = k + size < end ? k + size : end;
        for (int64_t i = k; i < last; i += kSet, set += kSetBytes) {
          add_set<kBits, kRows, kVectors>(x + i * kRows, set, bytes_apart, factors[group], part);
        }
      }
#pragma GCC unroll 32
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) sums[r * kVectors + n] += part[r][n];
      }
    }
  }
};

using Tile = void (*)(const float*, const Weight&, int64_t, int64_t, int64_t, int64_t, Vector*);

// The tiles of a format by the number of rows, less one: of at most kMost vectors.
template <class Format, int kMost, size_t... kRows>
constexpr std::array<Tile, sizeof...(kRows)> make_tiles(std::index_sequence<kRows...>) {
  return {&Format::template tile<static_cast<int>(kRows) + 1, std::min(Format::vectors_at_once(kRows + 1), kMost)>...};
}

// Multiplies all rows with panels of a format. A tile multiplies a part of a panel, a panel, or, if the registers allow
// more vectors, several panels that are far apart: each is a stream of memory, which continues with the next panel.
template <class Format>
struct Panels {
  static constexpr int64_t kVectors = Format::kOutputs / kWidth;  // of a panel
  static constexpr auto kTiles = make_tiles<Format, 4>(RowCounts());
  static constexpr auto kPanelTiles = make_tiles<Format, static_cast<int>(std::min<int64_t>(kVectors, 4))>(RowCounts());

  const Work& work;

  static int64_t panels_at_once(int64_t rows) { return std::max<int64_t>(Format::vectors_at_once(rows) / kVectors, 1); }

  // Multiplies a tile of rows with `vectors` of outputs, from `first` on in a panel, and in those `apart` from it.
  void multiply_tile(Tile tile, int64_t vectors, int64_t begin, int64_t rows, int64_t panel, int64_t first,
                     int64_t apart) const {
    const int64_t beside = std::min(vectors, kVectors);
    Vector sums[kMostRows];
    const auto output_of = [&](int64_t n) {
      return (panel + n / beside * apart) * Format::kOutputs + first + n % beside * kWidth;
    };
    for (int64_t n = 0; n < vectors; ++n) {
      Vector start;
      work.target.load_bias<kWidth>(output_of(n), reinterpret_cast<float*>(&start));
      for (int64_t r = 0; r < rows; ++r) sums[r * vectors + n] = start;
    }
    tile(work.x + begin * work.inputs, work.weight, panel, first, apart, work.inputs, sums);
    for (int64_t n = 0; n < vectors; ++n) {
      const float* found = reinterpret_cast<const float*>(sums + n);
      work.target.store<kWidth, false>(output_of(n), found, vectors * kWidth, work.row + begin, rows);
    }
  }

  // Multiplies all rows with `count` panels that are `apart`, from `panel` on.
  void multiply_panels(int64_t panel, int64_t count, int64_t apart) const {
    const RowTiles tiles(work.rows, kMostRows);
    for (int64_t i = 0; i < tiles.count; ++i) {
      const int64_t begin = tiles.begin(i), rows = tiles.size(i), vectors = Format::vectors_at_once(rows);
      if (count > 1 && count == panels_at_once(rows)) {
        multiply_tile(kTiles[rows - 1], vectors, begin, rows, panel, 0, apart);
        continue;
      }
      const int64_t some = std::min<int64_t>(vectors, kVectors);
      for (int64_t n = 0; n < count; ++n) {
        for (int64_t first = 0; first < Format::kOutputs; first += some * kWidth) {
          multiply_tile(kPanelTiles[rows - 1], some, begin, rows, panel + n * apart, first, 0);
        }
      }
    }
  }

  void multiply(int64_t begin, int64_t end) const {
    const int64_t count = panels_at_once(RowTiles(work.rows, kMostRows).size(0)), apart = (end - begin) / count;
    for (int64_t i = begin; i < begin + apart; ++i) multiply_panels(i, count, apart);
    for (int64_t i = begin + count * apart; i < end; ++i) multiply_panels(i, 1, 0);
  }
};

inline void multiply(const Work& work, int64_t begin, int64_t end) {
  switch (work.weight.bits) {
    case 4: return Panels<Groups<4>>{work}.multiply(begin, end);
    case 5: return Panels<Groups<5>>{work}.multiply(begin, end);
    case 6: return Panels<Groups<6>>{work}.multiply(begin, end);
    case 8: return Panels<Groups<8>>{work}.multiply(begin, end);
    default: break;
  }
  if (work.weight.is_half) return Panels<Halves<Float16>>{work}.multiply(begin, end);
  Panels<Halves<BFloat16>>{work}.multiply(begin, end);
}

constexpr Kernel kKernel = {kWidth, &pack_rows, &multiply};
