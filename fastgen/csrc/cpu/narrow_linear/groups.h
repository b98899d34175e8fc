// Products with a weight in groups (cpu/grouped_linear/products.h), whose activations stay floats, for one instruction set.
// Included once per instruction set by cpu/narrow_groups.cpp, inside a namespace of its own, with these defined:
//   FASTGEN_TARGET, FASTGEN_WIDTH, FASTGEN_SUMS, FASTGEN_FLOAT16, FASTGEN_TRANSPOSE  as for kernels.h
//   FASTGEN_WIDEN    (from): a vector of floats from unsigned bytes
//   FASTGEN_BYTE     (bits, i): byte i of each lane, for a constant i
// No include guard: it is meant to be included several times.

#define FASTGEN_INLINE FASTGEN_TARGET inline __attribute__((always_inline))

#include "rows.h"

// A number of a group is `code * scale + least`.
struct Factors {
  Vector scale, least;
};

FASTGEN_INLINE Vector load_factor(const void* from, int64_t at, bool is_half) {
  if (!is_half) return *reinterpret_cast<const Vector*>(static_cast<const float*>(from) + at);
  Vector found;
  FASTGEN_FLOAT16::load(found, static_cast<const uint16_t*>(from) + at);
  return found;
}

// Those of a vector of outputs, `at` the first of them. All of it is exact, but for zeros with scales of many digits, which
// are not served (fastgen/ops/linear/grouped.py).
FASTGEN_INLINE Factors load_factors(const Weight& weight, int64_t at) {
  if (weight.multiples != nullptr) {
    const Place of = place(weight, at);
    const Vector unit = load_factor(of.unit, 0, true);
    if (!weight.has_minimums()) {
      const Vector scale = unit * (FASTGEN_WIDEN(of.scale) - static_cast<float>(fastgen::kSignedMiddle));
      return {scale, scale * static_cast<float>(-weight.middle)};
    }
    return {unit * FASTGEN_WIDEN(of.scale), load_factor(of.unit + kPanel, 0, true) * FASTGEN_WIDEN(of.scale + kPanel)};
  }
  const Vector scale = load_factor(weight.scales, at, weight.are_half);
  if (weight.minimums != nullptr) return {scale, load_factor(weight.minimums, at, weight.are_half)};
  if (weight.zeros != nullptr) return {scale, scale * -FASTGEN_WIDEN(weight.zeros + at)};
  return {scale, scale * static_cast<float>(-weight.middle)};
}

// Vectors of a panel that a tile multiplies at the same time; if there are registers for more, it takes two panels.
constexpr int kMostVectors = 4;
constexpr int vectors_at_once(int64_t rows) {
  return rows * 4 <= kMostRows ? 4 : rows * 2 <= kMostRows ? 2 : 1;
}
constexpr int64_t kPanelVectors = kPanel / kWidth;

// Where the vectors of a tile are: of one panel, side by side, and of another one, `apart` panels away.
template <int kVectors>
struct Spread {
  static constexpr int64_t kBeside = kVectors < kPanelVectors ? kVectors : kPanelVectors;
  static constexpr int64_t panels(int n) { return n / kBeside; }
  static constexpr int64_t outputs(int n) { return n % kBeside * kWidth; }
};

// Those of some groups in a row, for each vector of a tile. Before these are multiplied: there would be too few registers for
// the sums meanwhile.
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

// The codes of a weight, which lie in sets of lines (grouped_linear/lines.h). A line has a word for each output of a panel:
// the bits of four inputs, or the lower halves of eight.
template <int kBits>
struct Codes {
  static constexpr int64_t kWords = fastgen::low_lines(kBits), kInputs = fastgen::set_inputs(kBits);
  static constexpr int kFours = kBits == 8 ? 1 : 2;  // of inputs in a word

  FASTGEN_INLINE static Bits load(const uint8_t* line) { return *reinterpret_cast<const Bits*>(line); }

  // Four inputs as bytes. `high` has their upper bits lowest, and then those of the next four.
  FASTGEN_INLINE static Bits bytes(const Bits& word, int four, Bits& high) {
    if (kBits == 8) return word;
    const Bits low = (four == 0 ? word : word >> 4) & 0x0f0f0f0fu;
    if (kBits == 4) return low;
    const Bits found = low | ((high << 4) & (kBits == 5 ? 0x10101010u : 0x30303030u));
    high >>= kBits - 4;
    return found;
  }
};

// Bytes that are asked for ahead of what is multiplied, by all streams together.
constexpr int64_t kAhead = 8192;

// part[kRows][kVectors] += x[inputs of a set of lines][kRows] times the weights of these.
template <int kBits, int kRows, int kVectors>
FASTGEN_INLINE void add_set(const float* x, const uint8_t* set, int64_t apart, const Factors (&factors)[kVectors],
                            Vector (&part)[kRows][kVectors]) {
  using Of = Codes<kBits>;
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
          const Vector code = __builtin_convertvector((Integers)FASTGEN_BYTE(bytes[n], i), Vector);
          weights[n] = code * factors[n].scale + factors[n].least;
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

// sums[kRows][kVectors] += x[inputs][kRows] times outputs of a panel, from `first` on. The products of some inputs are summed
// among themselves first, in the order in which GEMM on the unpacked weight sums them: the result has the same bits.
template <int kBits, int kRows, int kVectors>
FASTGEN_TARGET void tile(const float* x, const Weight& weight, int64_t panel, int64_t first, int64_t apart, int64_t inputs,
                         Vector* sums) {
  using Vectors = Spread<kVectors>;
  constexpr int64_t kSet = Codes<kBits>::kInputs, kSetBytes = kSet * kPanel * kBits / 8;
  constexpr int64_t kStreams = Vectors::panels(kVectors - 1) + 1;
  const int64_t size = weight.group_size, group_bytes = size * kPanel * kBits / 8, bytes_apart = apart * weight.panel_bytes;
  const int64_t factors_apart = apart * weight.groups * kPanel;
  const uint8_t* set = weight.numbers + panel * weight.panel_bytes + first * 4;
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

using Tile = void (*)(const float*, const Weight&, int64_t, int64_t, int64_t, int64_t, Vector*);

// By the number of rows, less one; of one panel alone, and as many vectors as there are registers for.
template <int kBits, int kMost, size_t... kRows>
constexpr std::array<Tile, sizeof...(kRows)> make_tiles(std::index_sequence<kRows...>) {
  return {&tile<kBits, static_cast<int>(kRows) + 1, std::min(vectors_at_once(kRows + 1), kMost)>...};
}
template <int kBits>
constexpr auto kTiles = make_tiles<kBits, kMostVectors>(RowCounts());
template <int kBits>
constexpr auto kPanelTiles = make_tiles<kBits, std::min<int>(kMostVectors, kPanelVectors)>(RowCounts());

// What is multiplied: x as `lay_out` makes it, and where results go, of which these rows begin at `row`.
struct Work {
  const float* x;
  const Weight& weight;
  const Target& target;
  int64_t row, rows, inputs;
};

// A tile of rows times outputs of a panel, from `first` on, and of the one that is `apart`, if the tile takes so many vectors.
inline void multiply_tile(const Work& work, Tile multiply, int64_t vectors, int64_t begin, int64_t rows, int64_t panel,
                          int64_t first, int64_t apart) {
  const int64_t beside = std::min(vectors, kPanelVectors);
  Vector sums[kMostRows];
  const auto output_of = [&](int64_t n) { return (panel + n / beside * apart) * kPanel + first + n % beside * kWidth; };
  for (int64_t n = 0; n < vectors; ++n) {
    const Vector start = *reinterpret_cast<const Vector*>(work.target.bias(output_of(n)));
    for (int64_t r = 0; r < rows; ++r) sums[r * vectors + n] = start;
  }
  multiply(work.x + begin * work.inputs, work.weight, panel, first, apart, work.inputs, sums);
  for (int64_t n = 0; n < vectors; ++n) {
    const float* found = reinterpret_cast<const float*>(sums + n);
    work.target.store<false>(output_of(n), kWidth, found, vectors * kWidth, work.row + begin, rows);
  }
}

// All rows times a panel, and the one that is `apart` panels behind it, if there is one.
template <int kBits>
void multiply_panels(const Work& work, int64_t panel, int64_t apart) {
  const RowTiles tiles(work.rows);
  for (int64_t i = 0; i < tiles.count; ++i) {
    const int64_t begin = tiles.begin(i), rows = tiles.size(i), vectors = vectors_at_once(rows);
    if (apart > 0 && vectors > kPanelVectors) {
      multiply_tile(work, kTiles<kBits>[rows - 1], vectors, begin, rows, panel, 0, apart);
      continue;
    }
    const int64_t some = std::min(vectors, kPanelVectors);
    for (int64_t each = panel; each <= panel + apart; each += std::max<int64_t>(apart, 1)) {
      for (int64_t first = 0; first < kPanel; first += some * kWidth) {
        multiply_tile(work, kPanelTiles<kBits>[rows - 1], some, begin, rows, each, first, 0);
      }
    }
  }
}

// All rows times the panels from `begin` to `end`. Two that are multiplied at the same time are far from each other: each is a
// stream of memory, which goes on with the panel behind it.
template <int kBits>
void multiply(const Work& work, int64_t begin, int64_t end) {
  const bool in_pairs = vectors_at_once(RowTiles(work.rows).size(0)) > kPanelVectors;
  const int64_t apart = in_pairs ? (end - begin) / 2 : 0;
  for (int64_t i = 0; i < apart; ++i) multiply_panels<kBits>(work, begin + i, apart);
  for (int64_t i = begin + 2 * apart; i < end; ++i) multiply_panels<kBits>(work, i, 0);
}

inline void multiply(const Work& work, int64_t begin, int64_t end) {
  switch (work.weight.bits) {
    case 4: return multiply<4>(work, begin, end);
    case 5: return multiply<5>(work, begin, end);
    case 6: return multiply<6>(work, begin, end);
    default: return multiply<8>(work, begin, end);
  }
}

#undef FASTGEN_INLINE
#undef FASTGEN_TARGET
#undef FASTGEN_WIDTH
#undef FASTGEN_SUMS
#undef FASTGEN_FLOAT16
#undef FASTGEN_TRANSPOSE
#undef FASTGEN_WIDEN
#undef FASTGEN_BYTE
