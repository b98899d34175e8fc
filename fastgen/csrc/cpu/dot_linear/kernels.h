// Dot products with the lines of a weight, for one instruction set. Included once per instruction set by
// cpu/dot_linear.cpp, inside a namespace of its own, with these defined:
//   FASTGEN_TARGET    the attribute that lets the compiler use the instruction set
//   FASTGEN_WIDTH     floats of a vector
//   FASTGEN_OUTPUTS   outputs that are summed up at the same time for some rows: as many as there are registers for
//   FASTGEN_ROWS      these rows, at the most, of numbers that are multiplied as they are; of others it is four
//   FASTGEN_FLOAT16   what loads a vector of float16 (float16.h)
//   FASTGEN_ADD_PAIRS (sums, x, weight): sums of two products of bfloat16 each, where there is an instruction for it
// No include guard: it is meant to be included several times.

#define FASTGEN_INLINE FASTGEN_TARGET inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(FASTGEN_WIDTH * sizeof(float)), aligned(sizeof(float))));
typedef uint32_t Pairs __attribute__((vector_size(FASTGEN_WIDTH * sizeof(float)), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(FASTGEN_WIDTH * sizeof(float))));
typedef uint16_t Halves __attribute__((vector_size(FASTGEN_WIDTH * sizeof(uint16_t)), aligned(2), may_alias));

// A type of numbers: how a vector of them is multiplied. `Number` is that of the weight, `Result` that of the result
// and the bias. `Input` is what the kernels read of x: such a result, or what `prepare` has made of one. `kStep` inputs
// are multiplied at a time.
struct Float32 {
  using Number = float;
  using Result = float;
  using Input = float;
  using Values = Vector;  // kStep inputs of a row
  static constexpr int64_t kStep = FASTGEN_WIDTH;
  static constexpr int kRows = FASTGEN_ROWS;  // that are multiplied at the same time
  static FASTGEN_INLINE float widen(float number) { return number; }
  static FASTGEN_INLINE float narrow(float number) { return number; }
  static FASTGEN_INLINE void load(Values& to, const float* x) { to = *reinterpret_cast<const Vector*>(x); }
  static FASTGEN_INLINE void load_weight(Values& to, const float* weight) { load(to, weight); }
  static FASTGEN_INLINE void add(Vector& sums, const Values& x, const Values& weight) { sums += x * weight; }
};

// The same with a weight of 16 bits, whose numbers are widened in the registers. The result is that of the widened
// weight, to the last bit.
struct Float32OfBFloat16 : Float32 {
  using Number = uint16_t;
  using Float32::widen;
  static FASTGEN_INLINE float widen(uint16_t number) { return fastgen::to_float(number); }
  static FASTGEN_INLINE void load_weight(Values& to, const uint16_t* weight) {
    to = (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(weight), Bits) << 16);
  }
};

struct Float32OfFloat16 : Float32 {
  using Number = uint16_t;
  using Float32::widen;
  static FASTGEN_INLINE float widen(uint16_t number) { return fastgen::float16_to_float(number); }
  static FASTGEN_INLINE void load_weight(Values& to, const uint16_t* weight) { FASTGEN_FLOAT16::load(to, weight); }
};

// Numbers of 16 bits that are multiplied as float32: those of a weight are widened in the registers, x before.
struct Widened {
  using Number = uint16_t;
  using Result = uint16_t;
  using Input = float;
  struct Values {
    Vector first, second;
  };
  static constexpr int64_t kStep = 2 * FASTGEN_WIDTH;
  static constexpr int kRows = 4;
  static FASTGEN_INLINE void load(Values& to, const float* x) { std::memcpy(&to, x, sizeof(to)); }
  static FASTGEN_INLINE void add(Vector& sums, const Values& x, const Values& weight) {
    sums += x.first * weight.first;
    sums += x.second * weight.second;
  }
};

#ifdef FASTGEN_ADD_PAIRS

struct BFloat16 {
  using Number = uint16_t;
  using Result = uint16_t;
  using Input = uint16_t;
  using Values = Pairs;
  static constexpr int64_t kStep = 2 * FASTGEN_WIDTH;
  static constexpr int kRows = FASTGEN_ROWS;
  static FASTGEN_INLINE float widen(uint16_t number) { return fastgen::to_float(number); }
  static FASTGEN_INLINE uint16_t narrow(float number) { return fastgen::to_bfloat16(number); }
  static FASTGEN_INLINE void load(Values& to, const uint16_t* x) { to = *reinterpret_cast<const Pairs*>(x); }
  static FASTGEN_INLINE void load_weight(Values& to, const uint16_t* weight) { load(to, weight); }
  static FASTGEN_INLINE void add(Vector& sums, const Values& x, const Values& weight) {
    sums = FASTGEN_ADD_PAIRS(sums, x, weight);
  }
};

#else

// Two of them lie in the place of a float. The first becomes one when it is shifted, the second when the first is
// cleared; of x, the first of all pairs lie in one vector, the second in another.
struct BFloat16 : Widened {
  static FASTGEN_INLINE float widen(float number) { return number; }
  static FASTGEN_INLINE float widen(uint16_t number) { return fastgen::to_float(number); }
  static FASTGEN_INLINE uint16_t narrow(float number) { return fastgen::to_bfloat16(number); }
  static FASTGEN_INLINE void load_weight(Values& to, const uint16_t* weight) {
    const Pairs pairs = *reinterpret_cast<const Pairs*>(weight);
    to.first = (Vector)(pairs << 16);
    to.second = (Vector)(pairs & 0xffff0000u);
  }
  static FASTGEN_INLINE void prepare(const uint16_t* x, float* to) {
    for (int64_t i = 0; i < FASTGEN_WIDTH; ++i) {
      to[i] = widen(x[2 * i]);
      to[FASTGEN_WIDTH + i] = widen(x[2 * i + 1]);
    }
  }
};

#endif

struct Float16 : Widened {
  static FASTGEN_INLINE float widen(float number) { return number; }
  static FASTGEN_INLINE float widen(uint16_t number) { return fastgen::float16_to_float(number); }
  static FASTGEN_INLINE uint16_t narrow(float number) { return fastgen::to_float16(number); }
  static FASTGEN_INLINE void load_weight(Values& to, const uint16_t* weight) {
    FASTGEN_FLOAT16::load(to.first, weight);
    FASTGEN_FLOAT16::load(to.second, weight + FASTGEN_WIDTH);
  }
  static FASTGEN_INLINE void prepare(const uint16_t* x, float* to) {
    Values values;
    load_weight(values, x);
    std::memcpy(to, &values, sizeof(values));
  }
};

// x in float32, in the order in which the numbers of a weight of this type are widened.
template <class Type>
FASTGEN_TARGET void prepare(const uint16_t* x, int64_t inputs, float* to) {
  const int64_t whole = inputs / Type::kStep * Type::kStep;
  for (int64_t k = 0; k < whole; k += Type::kStep) Type::prepare(x + k, to + k);
  for (int64_t k = whole; k < inputs; ++k) to[k] = Type::widen(x[k]);
}

// A vector of fewer floats.
template <int kLanes>
struct Lanes {
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float))));
};

// Halves are added until one is left.
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

// `total` of each of some sums. With few inputs this takes as long as all of the multiplications, one sum after the other.
template <int kCount>
FASTGEN_INLINE void totals(const Vector* sums, float* to) {
#if FASTGEN_WIDTH == 16
  // Of 16 sums at a time, halves are put next to each other and added: the same additions.
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
  for (int i = 0; i < kCount; ++i) to[i] = total<FASTGEN_WIDTH>(sums[i]);
#endif
}

// What the kernels multiply: `x` and `y` are of some rows, `weight` and `bias` of some outputs. Outputs that are summed up
// at the same time are `apart`: each has lines of its own, which follow one another. So the machine sees as many streams,
// each in other pages, and what it reads ahead by itself is what comes next. Lines side by side are read more slowly.
template <class Type>
struct Product {
  const typename Type::Input* x;
  const typename Type::Number* weight;
  const typename Type::Result* bias;
  typename Type::Result* y;
  int64_t x_stride, weight_stride, y_stride, inputs, apart;
  int64_t ahead;  // numbers of a line that are asked for before they are multiplied; 0: those of the next line are
};

// The inputs that are multiplied before the next ones: their part of the lines stays in the first-level cache.
struct Part {
  int64_t begin, end;
};

// A part of the inputs of kRows rows and kOutputs outputs, added to `sums`. Meanwhile every `turns`-th line of what comes
// `next` is asked for, from number `turn` on: the weight is one stream, but the machine cannot know that by itself.
template <class Type, int kRows, int kOutputs>
FASTGEN_TARGET void add_part(const Product<Type>& product, int64_t row, int64_t output, Part part, Vector* sums,
                             const typename Type::Number* next, int64_t turn, int64_t turns) {
  const typename Type::Input* x = product.x + row * product.x_stride;
  const typename Type::Number* weight = product.weight + output * product.weight_stride;
  const int64_t apart = product.apart * product.weight_stride;
  Vector kept[kOutputs * kRows];
#pragma GCC unroll 32
  for (int i = 0; i < kOutputs * kRows; ++i) kept[i] = part.begin == 0 ? Vector{} : sums[i];
  for (int64_t k = part.begin; k < part.end; k += Type::kStep) {
    const typename Type::Number* asked = next + turn * apart + k - part.begin;
    if (turns == 1) {
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) __builtin_prefetch(asked + o * apart, 0, 3);
    } else {
      for (int64_t o = turn; o < kOutputs; o += turns, asked += turns * apart) __builtin_prefetch(asked, 0, 3);
    }
    typename Type::Values values[kRows], w;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) Type::load(values[r], x + r * product.x_stride + k);
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      Type::load_weight(w, weight + o * apart + k);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) Type::add(kept[o * kRows + r], values[r], w);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kOutputs * kRows; ++i) sums[i] = kept[i];
}

// A sum with the products of the inputs behind the last whole step. A function of its own: whatever a compiler makes of
// the loop, sums with a weight of 16 bits are those with a weight in float32.
inline FASTGEN_TARGET __attribute__((noinline)) float with_rest(float sum, const float* line, const float* x,
                                                                int64_t count) {
  for (int64_t k = 0; k < count; ++k) sum += line[k] * x[k];
  return sum;
}

// y[r][o] from the sums of all whole steps.
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
    float widened[Type::kStep];
    if constexpr (std::is_same_v<typename Type::Result, float>) {
      for (int64_t k = 0; k < rest; ++k) widened[k] = Type::widen(line[whole + k]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      float sum = found[o * kRows + r];
      if constexpr (std::is_same_v<typename Type::Result, float>) {
        if (rest != 0) sum = with_rest(sum, widened, x + r * product.x_stride + whole, rest);
      } else {
        for (int64_t k = whole; k < product.inputs; ++k) {
          sum += Type::widen(line[k]) * Type::widen(x[r * product.x_stride + k]);
        }
      }
      if (product.bias != nullptr) sum += Type::widen(product.bias[place]);
      product.y[(row + r) * product.y_stride + place] = Type::narrow(sum);
    }
  }
}

// `add_part` and `finish` for one to Type::kRows rows.
template <class Type, int kOutputs>
struct Rows {
  static FASTGEN_TARGET void add(const Product<Type>& product, int64_t row, int64_t some, int64_t output, Part part,
                                 Vector* sums, const typename Type::Number* next, int64_t turn, int64_t turns) {
    if constexpr (Type::kRows > 4) {
      if (some == 6) return add_part<Type, 6, kOutputs>(product, row, output, part, sums, next, turn, turns);
      if (some == 5) return add_part<Type, 5, kOutputs>(product, row, output, part, sums, next, turn, turns);
    }
    switch (some) {
      case 4: return add_part<Type, 4, kOutputs>(product, row, output, part, sums, next, turn, turns);
      case 3: return add_part<Type, 3, kOutputs>(product, row, output, part, sums, next, turn, turns);
      case 2: return add_part<Type, 2, kOutputs>(product, row, output, part, sums, next, turn, turns);
      default: return add_part<Type, 1, kOutputs>(product, row, output, part, sums, next, turn, turns);
    }
  }
  static FASTGEN_TARGET void end(const Product<Type>& product, int64_t row, int64_t some, int64_t output,
                                 int64_t whole, const Vector* sums) {
    if constexpr (Type::kRows > 4) {
      if (some == 6) return finish<Type, 6, kOutputs>(product, row, output, whole, sums);
      if (some == 5) return finish<Type, 5, kOutputs>(product, row, output, whole, sums);
    }
    switch (some) {
      case 4: return finish<Type, 4, kOutputs>(product, row, output, whole, sums);
      case 3: return finish<Type, 3, kOutputs>(product, row, output, whole, sums);
      case 2: return finish<Type, 2, kOutputs>(product, row, output, whole, sums);
      default: return finish<Type, 1, kOutputs>(product, row, output, whole, sums);
    }
  }
};

// Rows whose sums are kept from one part of the inputs to the next, and bytes of a line in such a part: the parts of all
// kOutputs lines, and of the lines that are asked for meanwhile, fit into the first-level cache.
constexpr int64_t kRowsAtOnce = 16;
constexpr int64_t kPartBytes = 3072;

// All rows times kOutputs outputs. The following lines come next.
template <class Type, int kOutputs>
FASTGEN_TARGET void group(const Product<Type>& product, int64_t rows, int64_t output) {
  const int64_t steps = product.inputs / Type::kStep, whole = steps * Type::kStep;
  const int64_t bytes = whole * static_cast<int64_t>(sizeof(typename Type::Number));
  const int64_t parts = std::max<int64_t>((bytes + kPartBytes - 1) / kPartBytes, 1);
  const int64_t depth = (steps + parts - 1) / parts * Type::kStep;
  const typename Type::Number* lines = product.weight + output * product.weight_stride;
  Vector sums[(kRowsAtOnce + Type::kRows - 1) / Type::kRows][Type::kRows * kOutputs];
  for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
    const int64_t last = std::min(first + kRowsAtOnce, rows), turns = (last - first + Type::kRows - 1) / Type::kRows;
    const int64_t each = (last - first + turns - 1) / turns;
    for (int64_t begin = 0; begin < whole; begin += depth) {
      const Part part{begin, std::min(begin + depth, whole)};
      const typename Type::Number* next = part.end < whole ? lines + part.end : lines + product.weight_stride;
      if (product.ahead != 0 && turns == 1) next = lines + begin + product.ahead;
      for (int64_t turn = 0; turn < turns; ++turn) {
        const int64_t row = first + each * turn, some = std::min<int64_t>(last - row, each);
        Rows<Type, kOutputs>::add(product, row, some, output, part, sums[turn], next, turn, turns);
      }
    }
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t row = first + each * turn, some = std::min<int64_t>(last - row, each);
      Rows<Type, kOutputs>::end(product, row, some, output, whole, sums[turn]);
    }
  }
}

template <class Type>
FASTGEN_TARGET void multiply(const Arguments& given, int64_t first, int64_t some) {
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
                        fastgen::bytes_ahead() / static_cast<int64_t>(sizeof(Number))};
  constexpr int64_t kSingle = 8, kOutputs = FASTGEN_OUTPUTS;
  if (given.rows == 1) {  // there are registers for more outputs, and each line is read once
    const int64_t whole = product.inputs / Type::kStep * Type::kStep;
    product.apart = some / kSingle;
    for (int64_t output = 0; output < product.apart; ++output) {
      Vector sums[kSingle];
      const Number* next = product.weight + output * given.weight_stride;
      next += product.ahead != 0 ? product.ahead : given.weight_stride;
      add_part<Type, 1, kSingle>(product, 0, output, {0, whole}, sums, next, 0, 1);
      finish<Type, 1, kSingle>(product, 0, output, whole, sums);
    }
  } else {
    product.apart = some / kOutputs;
    for (int64_t output = 0; output < product.apart; ++output) group<Type, kOutputs>(product, given.rows, output);
  }
  const int64_t done = product.apart * (given.rows == 1 ? kSingle : kOutputs);
  for (int64_t output = done; output < some; ++output) group<Type, 1>(product, given.rows, output);
}

// The same in float32 for a weight of which the outputs are next to each other: multiples of its lines, kLines at a
// time, are added to a part of the result, which stays in the first-level cache.
inline FASTGEN_TARGET void add_lines(const Arguments& given, int64_t first, int64_t some) {
  constexpr int64_t kLines = 8, kPart = 512;
  const float *x = static_cast<const float*>(given.x), *bias = static_cast<const float*>(given.bias);
  for (int64_t begin = first; begin < first + some; begin += kPart) {
    const int64_t width = std::min(kPart, first + some - begin), whole = width / FASTGEN_WIDTH * FASTGEN_WIDTH;
    const float* weight = static_cast<const float*>(given.weight) + begin;
    float* y = static_cast<float*>(given.y) + begin;
    for (int64_t r = 0; r < given.rows; ++r) {
      for (int64_t o = 0; o < width; ++o) y[r * given.outputs + o] = bias == nullptr ? 0.0f : bias[begin + o];
    }
    int64_t k = 0;
    for (; k + kLines <= given.inputs; k += kLines) {
      const float* lines = weight + k * given.weight_stride;
      for (int64_t o = 0; o < whole; o += FASTGEN_WIDTH) {
        Vector w[kLines];
#pragma GCC unroll 8
        for (int64_t i = 0; i < kLines; ++i) {
          w[i] = *reinterpret_cast<const Vector*>(lines + i * given.weight_stride + o);
          __builtin_prefetch(lines + (i + kLines) * given.weight_stride + o, 0, 3);
        }
        for (int64_t r = 0; r < given.rows; ++r) {
          Vector& sums = *reinterpret_cast<Vector*>(y + r * given.outputs + o);
          Vector added = sums;
#pragma GCC unroll 8
          for (int64_t i = 0; i < kLines; ++i) added += x[r * given.x_stride + k + i] * w[i];
          sums = added;
        }
      }
    }
    // What is left: the outputs behind the last vector, and all outputs of the inputs behind the last kLines.
    const int64_t rest = k;
    for (k = 0; k < given.inputs; ++k) {
      const float* line = weight + k * given.weight_stride;
      for (int64_t r = 0; r < given.rows; ++r) {
        const float factor = x[r * given.x_stride + k];
        for (int64_t o = k < rest ? whole : 0; o < width; ++o) y[r * given.outputs + o] += factor * line[o];
      }
    }
  }
}

#undef FASTGEN_INLINE
#undef FASTGEN_TARGET
#undef FASTGEN_WIDTH
#undef FASTGEN_OUTPUTS
#undef FASTGEN_ROWS
#undef FASTGEN_FLOAT16
#undef FASTGEN_ADD_PAIRS
