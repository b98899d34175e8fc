// GEMV: dot products with the rows of a weight, for one instruction set. gemv.cpp compiles it for each with each_isa.h,
// therefore without an include guard.

// A type of numbers, with its vector multiplication. `Number` is the weight's type, `Result` that of the result and the
// bias. `Input` is what the kernels read of x: a `Result`, or the output of `prepare` for it. A step multiplies `kStep`
// inputs, as `kParts` vectors of `Values` one after the other.
struct Float32 {
  using Number = float;
  using Result = float;
  using Input = float;
  using Values = Vector;
  static constexpr int64_t kStep = kWidth;
  static constexpr int kParts = 1;
  // Rows multiplied at the same time with kOutputs outputs, and with kTallOutputs (multiply), as many as fit the
  // registers.
  static constexpr int kRows = by_width(4, 4, 6), kTallRows = by_width(4, 4, 9);
  static FASTGEN_INLINE float upcast(float number) { return number; }
  static FASTGEN_INLINE float downcast(float number) { return number; }
  static FASTGEN_INLINE Values load(const float* x, int) { return *reinterpret_cast<const Vector*>(x); }
  static FASTGEN_INLINE Values load_weight(const float* weight, int) { return load(weight, 0); }
  static FASTGEN_INLINE void add(Vector& sums, const Values& x, const Values& weight) { sums += x * weight; }
};

// 16-bit numbers that are multiplied as float32: those of a weight are upcast in the registers, x before. A step has two
// parts, because a struct of two vectors would be spilled to the stack.
struct Upcast : Float32 {
  using Number = uint16_t;
  using Result = uint16_t;
  static constexpr int64_t kStep = 2 * kWidth;
  static constexpr int kParts = 2;
  static FASTGEN_INLINE Values load(const float* x, int part) {
    return *reinterpret_cast<const Vector*>(x + part * kWidth);
  }
};

#ifdef FASTGEN_HAS_BF16

struct BFloat16 {
  using Number = uint16_t;
  using Result = uint16_t;
  using Input = uint16_t;
  using Values = Bits;
  static constexpr int64_t kStep = 2 * kWidth;
  static constexpr int kParts = 1, kRows = Float32::kRows, kTallRows = Float32::kTallRows;
  static FASTGEN_INLINE float upcast(uint16_t number) { return fastgen::to_float(number); }
  static FASTGEN_INLINE uint16_t downcast(float number) { return fastgen::to_bfloat16(number); }
  static FASTGEN_INLINE Values load(const uint16_t* x, int) { return *reinterpret_cast<const Bits*>(x); }
  static FASTGEN_INLINE Values load_weight(const uint16_t* weight, int) { return load(weight, 0); }
  static FASTGEN_INLINE void add(Vector& sums, const Values& x, const Values& weight) {
    sums = (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)weight);
  }
};

#else

// Two of them are in one lane. Shifting upcasts the first, clearing the first upcasts the second; in x, the first of
// all pairs are in one vector, the second in another.
struct BFloat16 : Upcast {
  static FASTGEN_INLINE float upcast(float number) { return number; }
  static FASTGEN_INLINE float upcast(uint16_t number) { return fastgen::to_float(number); }
  static FASTGEN_INLINE uint16_t downcast(float number) { return fastgen::to_bfloat16(number); }
  static FASTGEN_INLINE Values load_weight(const uint16_t* weight, int part) {
    const Bits pairs = *reinterpret_cast<const Bits*>(weight);
    return (Vector)(part == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
  static FASTGEN_INLINE void prepare(const uint16_t* x, float* to) {
    for (int64_t i = 0; i < kWidth; ++i) {
      to[i] = upcast(x[2 * i]);
      to[kWidth + i] = upcast(x[2 * i + 1]);
    }
  }
};

#endif

struct Float16 : Upcast {
  static FASTGEN_INLINE float upcast(float number) { return number; }
  static FASTGEN_INLINE float upcast(uint16_t number) { return fastgen::float16_to_float(number); }
  static FASTGEN_INLINE uint16_t downcast(float number) { return fastgen::to_float16(number); }
  static FASTGEN_INLINE Values load_weight(const uint16_t* weight, int part) {
    Vector numbers;
    load_float16(numbers, weight + part * kWidth);
    return numbers;
  }
  static FASTGEN_INLINE void prepare(const uint16_t* x, float* to) {
    for (int part = 0; part < kParts; ++part) *reinterpret_cast<Vector*>(to + part * kWidth) = load_weight(x, part);
  }
};

// Upcasts x to float32, in the order in which the numbers of a weight of this type are upcast.
template <class Type>
FASTGEN_TARGET void prepare(const uint16_t* x, int64_t inputs, float* to) {
  const int64_t whole = inputs / Type::kStep * Type::kStep;
  for (int64_t k = 0; k < whole; k += Type::kStep) Type::prepare(x + k, to + k);
  for (int64_t k = whole; k < inputs; ++k) to[k] = Type::upcast(x[k]);
}

// A vector of fewer floats.
template <int kLanes>
struct Lanes {
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float))));
};

// Adds halves until one number is left.
template <int kLanes>
FASTGEN_INLINE float total(const typename Lanes<kLanes>::Vector& sums) {
  if constexpr (kLanes == 4) {
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  } else {
    typename Lanes<kLanes / 2>::Vector halves[2];
    std::memcpy(halves, &sums, sizeof(sums));
    return total<kLanes / 2>(halves[0] + halves[1]);
  }
}

// Computes `total` of several sums. With few inputs, one sum after the other would take as long as all multiplications.
template <int kCount>
FASTGEN_INLINE void totals(const Vector* sums, float* to) {
#if FASTGEN_WIDTH == 16
  // For 16 sums at a time, puts halves next to each other and adds them: the same additions.
#pragma GCC unroll 2
  for (int first = 0; first < kCount; first += 16) {
    __m512 some[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) some[i] = first + i < kCount ? (__m512)sums[first + i] : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      some[i] = _mm512_shuffle_f32x4(some[2 * i], some[2 * i + 1], 0x44) +
                _mm512_shuffle_f32x4(some[2 * i], some[2 * i + 1], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      some[i] = _mm512_shuffle_f32x4(some[2 * i], some[2 * i + 1], 0x88) +
                _mm512_shuffle_f32x4(some[2 * i], some[2 * i + 1], 0xdd);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      some[i] = _mm512_shuffle_ps(some[2 * i], some[2 * i + 1], 0x44) +
                _mm512_shuffle_ps(some[2 * i], some[2 * i + 1], 0xee);
    }
    float found[16];
    _mm512_storeu_ps(found, _mm512_shuffle_ps(some[0], some[1], 0x88) + _mm512_shuffle_ps(some[0], some[1], 0xdd));
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (first + i < kCount) to[first + i] = found[i % 4 * 4 + i / 4];
    }
  }
#else
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) to[i] = total<kWidth>(sums[i]);
#endif
}

// The operands of the kernels: `x` and `y` for some rows, `weight` and `bias` for some outputs. Outputs that are summed
// at the same time are `apart`: each has its own consecutive lines. The processor therefore sees as many streams, each
// in different pages, and its prefetcher reads the next data. Adjacent lines are read more slowly.
template <class Type>
struct Product {
  const typename Type::Input* x;
  const typename Type::Number* weight;
  const typename Type::Result* bias;
  typename Type::Result* y;
  int64_t x_stride, weight_stride, y_stride, inputs, apart;
  bool is_near;  // how the next data is prefetched (add_part)
};

// The inputs that are multiplied before the next ones: their part of the lines stays in the first-level cache.
struct Part {
  int64_t begin, end;
};

// One of the `turns` of multiplying a part of the inputs: each covers some of the rows. `next` is where the lines
// continue after the part.
template <class Type>
struct Turn {
  const typename Type::Number* next;
  int64_t turn, turns;
};

// Prefetch distance in bytes along a line: into the first-level cache, and into the second-level cache, which then has
// the data in time for the first (add_part).
constexpr int64_t kNear = 256, kFar = 3072;

// Prefetches every `turns`-th of kOutputs addresses that are `apart`, from number `turn` on. kLevels: how near the
// cache is, up to 3.
template <int kLevels, int kOutputs, class Number>
FASTGEN_INLINE void prefetch(const Number* first, int64_t apart, int64_t turn, int64_t turns) {
  if (turns == 1) {
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) __builtin_prefetch(first + o * apart, 0, kLevels);
  } else {
    for (int64_t o = turn; o < kOutputs; o += turns) __builtin_prefetch(first + o * apart, 0, kLevels);
  }
}

// Adds a part of the inputs of kRows rows and kOutputs outputs to `sums`. Meanwhile prefetches the next data: the
// weight is one stream, which the processor cannot know. With kIsNear it prefetches a short distance ahead and, for
// more than three rows, each turn's share a long distance ahead. Otherwise it prefetches the next part of the lines.
template <class Type, int kRows, int kOutputs, bool kIsNear>
FASTGEN_TARGET void add_part(const Product<Type>& product, int64_t row, int64_t output, Part part, Vector* sums,
                             const Turn<Type>& turn) {
  const typename Type::Input* x = product.x + row * product.x_stride;
  const typename Type::Number* weight = product.weight + output * product.weight_stride;
  const int64_t apart = product.apart * product.weight_stride;
  const int64_t turns = kRows > Type::kRows ? 1 : turn.turns;  // a compile-time constant if registers are few
  Vector kept[kOutputs * kRows];
#pragma GCC unroll 32
  for (int i = 0; i < kOutputs * kRows; ++i) kept[i] = part.begin == 0 ? Vector{} : sums[i];
  for (int64_t k = part.begin; k < part.end; k += Type::kStep) {
    const typename Type::Number* line = weight + k;
    if constexpr (kIsNear) {
      prefetch<3, kOutputs>(line + kNear / sizeof(*line), apart, 0, 1);
      if constexpr (kRows > 3) prefetch<2, kOutputs>(line + kFar / sizeof(*line), apart, turn.turn, turns);
    } else {
      prefetch<3, kOutputs>(turn.next + k - part.begin, apart, turn.turn, turns);
    }
#pragma GCC unroll 2
    for (int p = 0; p < Type::kParts; ++p) {
      typename Type::Values w[kOutputs];
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) w[o] = Type::load_weight(line + o * apart, p);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const typename Type::Values values = Type::load(x + r * product.x_stride + k, p);
#pragma GCC unroll 8
        for (int o = 0; o < kOutputs; ++o) Type::add(kept[o * kRows + r], values, w[o]);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kOutputs * kRows; ++i) sums[i] = kept[i];
}

// Adds the products of the inputs after the last whole step to a sum. A separate function, so that any compiler
// computes sums with a 16-bit weight exactly as those with a float32 weight.
inline FASTGEN_TARGET __attribute__((noinline)) float with_rest(float sum, const float* line, const float* x,
                                                                int64_t count) {
  for (int64_t k = 0; k < count; ++k) sum += line[k] * x[k];
  return sum;
}

// Computes y[r][o] from the sums of all whole steps.
template <class Type, int kRows, int kOutputs>
FASTGEN_TARGET void finish(const Product<Type>& product, int64_t row, int64_t output, int64_t whole,
                           const Vector* sums) {
  const typename Type::Input* x = product.x + row * product.x_stride;
  float found[kOutputs * kRows] = {};
  if (whole != 0) totals<kOutputs * kRows>(sums, found);
#pragma GCC unroll 8
  for (int64_t o = 0; o < kOutputs; ++o) {
    const int64_t place = output + o * product.apart;
    const typename Type::Number* line = product.weight + place * product.weight_stride;
    const int64_t rest = product.inputs - whole;
    float values[Type::kStep];
    if constexpr (std::is_same_v<typename Type::Result, float>) {
      for (int64_t k = 0; k < rest; ++k) values[k] = Type::upcast(line[whole + k]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      float sum = found[o * kRows + r];
      if constexpr (std::is_same_v<typename Type::Result, float>) {
        if (rest != 0) sum = with_rest(sum, values, x + r * product.x_stride + whole, rest);
      } else {
        for (int64_t k = whole; k < product.inputs; ++k) {
          sum += Type::upcast(line[k]) * Type::upcast(x[r * product.x_stride + k]);
        }
      }
      if (product.bias != nullptr) sum += Type::upcast(product.bias[place]);
      product.y[(row + r) * product.y_stride + place] = Type::downcast(sum);
    }
  }
}

// `add_part` and `finish` in one, if all inputs are one part: the sums stay in registers.
template <class Type, int kRows, int kOutputs, bool kIsNear>
FASTGEN_TARGET __attribute__((flatten)) void at_once(const Product<Type>& product, int64_t row, int64_t output,
                                                     Part part, const Turn<Type>& turn) {
  Vector sums[kOutputs * kRows];
  add_part<Type, kRows, kOutputs, kIsNear>(product, row, output, part, sums, turn);
  finish<Type, kRows, kOutputs>(product, row, output, part.end, sums);
}

// The functions above for one number of rows. The second of two prefetches nearby.
template <class Type>
struct Tile {
  void (*at_once[2])(const Product<Type>&, int64_t, int64_t, Part, const Turn<Type>&);
  void (*add[2])(const Product<Type>&, int64_t, int64_t, Part, Vector*, const Turn<Type>&);
  void (*end)(const Product<Type>&, int64_t, int64_t, int64_t, const Vector*);
};

template <class Type, int kRows, int kOutputs>
constexpr Tile<Type> kTile = {{&at_once<Type, kRows, kOutputs, false>, &at_once<Type, kRows, kOutputs, true>},
                              {&add_part<Type, kRows, kOutputs, false>, &add_part<Type, kRows, kOutputs, true>},
                              &finish<Type, kRows, kOutputs>};

// From kFewest rows on.
template <class Type, int kOutputs, int kFewest, size_t... kMore>
constexpr std::array<Tile<Type>, sizeof...(kMore)> make_tiles(std::index_sequence<kMore...>) {
  return {kTile<Type, kFewest + static_cast<int>(kMore), kOutputs>...};
}

// Rows whose sums are kept from one part of the inputs to the next, and bytes of a line in such a part: the parts of
// all kOutputs lines, and of the prefetched lines, fit into the first-level cache.
constexpr int64_t kRowsAtOnce = 24;
constexpr int64_t kPartBytes = 3072;

// Multiplies all rows with kOutputs outputs, in turns of kFewest to kMost rows. The following lines come next.
template <class Type, int kOutputs, int kFewest, int kMost>
FASTGEN_TARGET void group(const Product<Type>& product, int64_t rows, int64_t output) {
  static constexpr auto kTiles =
      make_tiles<Type, kOutputs, kFewest>(std::make_index_sequence<kMost - kFewest + 1>());
  const int64_t steps = product.inputs / Type::kStep, whole = steps * Type::kStep;
  const int64_t bytes = whole * static_cast<int64_t>(sizeof(typename Type::Number));
  // A single row needs each line only once.
  const int64_t parts = kMost == 1 ? 1 : std::max<int64_t>((bytes + kPartBytes - 1) / kPartBytes, 1);
  const int64_t depth = (steps + parts - 1) / parts * Type::kStep;
  const typename Type::Number* lines = product.weight + output * product.weight_stride;
  Vector sums[(kRowsAtOnce + kMost - 1) / kMost][kMost * kOutputs];
  for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
    const int64_t last = std::min(first + kRowsAtOnce, rows), turns = (last - first + kMost - 1) / kMost;
    const int64_t each = (last - first + turns - 1) / turns;
    const auto tile = [&](int64_t row) -> const Tile<Type>& { return kTiles[std::min(last - row, each) - kFewest]; };
    if (parts == 1) {
      Turn<Type> turn{lines + product.weight_stride, 0, turns};
      for (int64_t row = first; turn.turn < turns; ++turn.turn, row += each) {
        tile(row).at_once[product.is_near](product, row, output, {0, whole}, turn);
      }
      continue;
    }
    for (int64_t begin = 0; begin < whole; begin += depth) {
      const Part part{begin, std::min(begin + depth, whole)};
      Turn<Type> turn{part.end < whole ? lines + part.end : lines + product.weight_stride, 0, turns};
      for (int64_t row = first; turn.turn < turns; ++turn.turn, row += each) {
        tile(row).add[product.is_near](product, row, output, part, sums[turn.turn], turn);
      }
    }
    for (int64_t turn = 0, row = first; turn < turns; ++turn, row += each) {
      tile(row).end(product, row, output, whole, sums[turn]);
    }
  }
}

// Computes all outputs in groups of kOutputs; returns their number.
template <class Type, int kOutputs, int kFewest, int kMost>
FASTGEN_TARGET int64_t groups(Product<Type>& product, int64_t rows, int64_t outputs) {
  product.apart = outputs / kOutputs;
  for (int64_t i = 0; i < product.apart; ++i) group<Type, kOutputs, kFewest, kMost>(product, rows, i);
  return product.apart * kOutputs;
}

template <class Type>
FASTGEN_TARGET void multiply(const Operands<void>& given, int64_t first, int64_t some) {
  using Number = typename Type::Number;
  using Result = typename Type::Result;
  Product<Type> product{static_cast<const typename Type::Input*>(given.x),
                        static_cast<const Number*>(given.weight) + first * given.weight_stride,
                        given.bias == nullptr ? nullptr : static_cast<const Result*>(given.bias) + first,
                        static_cast<Result*>(given.y) + first,
                        given.x_stride,
                        given.weight_stride,
                        given.outputs,
                        given.inputs,
                        0,
                        fastgen::prefetches_nearby()};
  constexpr int kOutputs = by_width(3, 3, 4), kTallOutputs = 3;
  int64_t done = 0;
  if (given.rows == 1) {  // the registers allow more outputs
    done = groups<Type, 8, 1, 1>(product, 1, some);
  } else if (given.rows <= Type::kRows || given.rows > Type::kTallRows) {
    done = groups<Type, kOutputs, 1, Type::kRows>(product, given.rows, some);
  } else if constexpr (Type::kRows < Type::kTallRows) {
    done = groups<Type, kTallOutputs, Type::kRows + 1, Type::kTallRows>(product, given.rows, some);
  }
  for (int64_t output = done; output < some; ++output) group<Type, 1, 1, Type::kRows>(product, given.rows, output);
}

#include "gemv_columns.h"

inline Kernel kernel(ScalarType type, bool by_outputs) {
  if (type == ScalarType::Float) return {by_outputs ? &add_columns<Float32Columns> : &multiply<Float32>, nullptr};
  if (by_outputs) {
    if (type == ScalarType::BFloat16) return {&add_columns<BFloat16Columns>, &upcast<BFloat16Columns>};
    return {&add_columns<Float16Columns>, &upcast<Float16Columns>};
  }
#ifdef FASTGEN_HAS_BF16
  if (type == ScalarType::BFloat16) return {&multiply<BFloat16>, nullptr};
#else
  if (type == ScalarType::BFloat16) return {&multiply<BFloat16>, &prepare<BFloat16>};
#endif
  return {&multiply<Float16>, &prepare<Float16>};
}
