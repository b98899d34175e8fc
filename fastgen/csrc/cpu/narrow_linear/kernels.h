// Products with panels of a weight in 16 bits, for one instruction set. Included once per instruction set by
// cpu/narrow_linear.cpp, inside a namespace of its own, with these defined:
//   FASTGEN_TARGET   the attribute that lets the compiler use the instruction set
//   FASTGEN_WIDTH    floats of a vector, which are the outputs of a panel
//   FASTGEN_SUMS     vectors of sums that there are registers for
//   FASTGEN_FLOAT16  what loads a vector of float16 (float16.h)
//   FASTGEN_TRANSPOSE  (from, stride, to, stride): FASTGEN_WIDTH lines of as many floats, transposed
// No include guard: it is meant to be included several times.

#define FASTGEN_INLINE FASTGEN_TARGET inline __attribute__((always_inline))

#include "rows.h"

// What a weight may be of. A panel has a line for every two inputs, with their numbers for all of its outputs. `load` returns
// those of one input.
struct BFloat16 {
  // The numbers of two inputs lie in the place of a float. The first becomes one when it is shifted, the second when the
  // first is cleared.
  static int64_t place(int64_t input, int64_t output) { return 2 * output + input; }
  static FASTGEN_INLINE Vector load(const uint8_t* line, int input) {
    const Bits pairs = *reinterpret_cast<const Bits*>(line);
    return (Vector)(input == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
};

struct Float16 {
  static int64_t place(int64_t input, int64_t output) { return input * kWidth + output; }
  static FASTGEN_INLINE Vector load(const uint8_t* line, int input) {
    Vector numbers;
    FASTGEN_FLOAT16::load(numbers, reinterpret_cast<const uint16_t*>(line) + input * kWidth);
    return numbers;
  }
};

constexpr int64_t kLineInputs = 2, kLineBytes = sizeof(Vector);

// Bytes that are asked for ahead of what is multiplied: the panels that are multiplied at the same time have equal shares. With
// fewer bytes, an AMD EPYC (Zen 5) does not multiply while it reads memory.
constexpr int64_t kAhead = 8192;

// part[kRows][kPanels] += one input of all rows, times its weights; `input` is its number within the line.
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

// sums[kRows][kPanels] += x[inputs][kRows] times kPanels panels, which are `apart`. The products of some inputs are summed
// among themselves first, in the order in which GEMM on the unpacked weight sums them: the result has the same bits.
template <class Type, int kRows, int kPanels>
FASTGEN_TARGET void tile(const float* x, const uint8_t* panel, int64_t apart, int64_t inputs, Vector* sums) {
  static_assert(kDepth % kLineInputs == 0, "sums are of whole lines");
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

// Panels that a tile multiplies at the same time.
constexpr int panels_at_once(int64_t rows) { return static_cast<int>(std::min<int64_t>(kMostRows / rows, 4)); }

using Tile = void (*)(const float*, const uint8_t*, int64_t, int64_t, Vector*);

// The functions above by the number of rows, less one.
template <class Type, size_t... kRows>
constexpr std::array<Tile, sizeof...(kRows)> make_tiles(std::index_sequence<kRows...>) {
  return {&tile<Type, static_cast<int>(kRows) + 1, panels_at_once(kRows + 1)>...};
}
template <class Type, size_t... kRows>
constexpr std::array<Tile, sizeof...(kRows)> make_single_tiles(std::index_sequence<kRows...>) {
  return {&tile<Type, static_cast<int>(kRows) + 1, 1>...};
}
template <class Type>
constexpr auto kTiles = make_tiles<Type>(RowCounts());
template <class Type>
constexpr auto kSingleTiles = make_single_tiles<Type>(RowCounts());

// A tile of rows times `count` panels that are `apart`, from `first` on: one, or as many as it multiplies at the same time.
template <class Type>
void multiply_tile(const PanelProduct& product, const RowTiles& tiles, int64_t tile, int64_t first, int64_t count,
                   int64_t apart) {
  const int64_t rows = tiles.size(tile), row = tiles.begin(tile);
  const int64_t size = product.inputs / kLineInputs * kLineBytes;
  Vector sums[kMostRows];
  const auto of_panel = [&](int64_t n, auto work) {
    const int64_t output = (first + n * apart) * kWidth;
    work(output, std::min(kWidth, product.outputs - output));
  };
  for (int64_t n = 0; n < count; ++n) {
    of_panel(n, [&](int64_t output, int64_t valid) {
      Vector start = {};
      if (product.bias != nullptr) copy(product.bias + output, valid, &start);
      for (int64_t r = 0; r < rows; ++r) sums[r * count + n] = start;
    });
  }
  const Tile multiply = count == 1 ? kSingleTiles<Type>[rows - 1] : kTiles<Type>[rows - 1];
  multiply(product.x + row * product.inputs, product.weight + first * size, apart * size, product.inputs, sums);
  for (int64_t n = 0; n < count; ++n) {
    of_panel(n, [&](int64_t output, int64_t valid) {
      float* y = product.y + row * product.outputs + output;
      for (int64_t r = 0; r < rows; ++r) copy(&sums[r * count + n], valid, y + r * product.outputs);
    });
  }
}

// All rows times `count` panels that are `apart`, from `first` on.
template <class Type>
void multiply_some(const PanelProduct& product, int64_t first, int64_t count, int64_t apart) {
  const RowTiles tiles(product.rows);
  for (int64_t i = 0; i < tiles.count; ++i) {
    if (count == panels_at_once(tiles.size(i))) {
      multiply_tile<Type>(product, tiles, i, first, count, apart);
    } else {
      for (int64_t n = 0; n < count; ++n) multiply_tile<Type>(product, tiles, i, first + n * apart, 1, 0);
    }
  }
}

// All rows times the panels from `begin` to `end`. Those that are multiplied at the same time are far from each other: each
// is a stream of memory, which goes on with the panel behind it.
template <class Type>
void multiply(const PanelProduct& product, int64_t begin, int64_t end) {
  const int64_t most = panels_at_once(RowTiles(product.rows).size(0));
  const int64_t apart = (end - begin) / most;
  for (int64_t i = 0; i < apart; ++i) multiply_some<Type>(product, begin + i, most, apart);
  for (int64_t i = begin + most * apart; i < end; ++i) multiply_some<Type>(product, i, 1, 0);
}

// The panels from `begin` to `end` of a weight, [outputs, inputs], its lines `stride` apart; behind the last output and
// the last input there are zeros.
template <class Type>
void pack(const uint16_t* weight, int64_t stride, int64_t outputs, int64_t inputs, int64_t begin, int64_t end,
          uint16_t* to) {
  const int64_t pairs = (inputs + 1) / 2;
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t valid = std::min(kWidth, outputs - panel * kWidth);
    uint16_t* at = to + panel * pairs * 2 * kWidth;
    if (valid < kWidth || inputs % 2 != 0) std::fill_n(at, pairs * 2 * kWidth, uint16_t{0});
    for (int64_t k = 0; k < inputs; ++k) {
      for (int64_t o = 0; o < valid; ++o) {
        at[k / 2 * 2 * kWidth + Type::place(k % 2, o)] = weight[(panel * kWidth + o) * stride + k];
      }
    }
  }
}

template <class Type>
constexpr Kernel kernel_of() {
  return {kWidth, &lay_out, &multiply<Type>};
}
// By `Format`.
constexpr Kernel kKernels[] = {kernel_of<BFloat16>(), kernel_of<Float16>()};

#undef FASTGEN_INLINE
#undef FASTGEN_TARGET
#undef FASTGEN_WIDTH
#undef FASTGEN_SUMS
#undef FASTGEN_FLOAT16
#undef FASTGEN_TRANSPOSE
