// Dot products with the lines of a weight, for one instruction set. Included once per instruction set by
// cpu/dot_linear.cpp, inside a namespace of its own, with these defined:
//   FASTGEN_TARGET    the attribute that lets the compiler use the instruction set
//   FASTGEN_WIDTH     floats of a vector
//   FASTGEN_ADD_PAIRS (sums, x, weight): sums of two products of bfloat16 each, where there is an instruction for it
// No include guard: it is meant to be included several times.

#define FASTGEN_INLINE FASTGEN_TARGET inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(FASTGEN_WIDTH * sizeof(float)), aligned(sizeof(float))));
typedef uint32_t Pairs __attribute__((vector_size(FASTGEN_WIDTH * sizeof(float)), aligned(2), may_alias));

// A type of numbers: how a vector of them is multiplied. `Input` is what the kernels read of x: numbers of that type, or
// what `prepare` has made of them. `kStep` inputs are multiplied at a time.
struct Float32 {
  using Number = float;
  using Input = float;
  using Values = Vector;  // kStep inputs of a row
  static constexpr int64_t kStep = FASTGEN_WIDTH;
  static FASTGEN_INLINE float widen(float number) { return number; }
  static FASTGEN_INLINE float narrow(float number) { return number; }
  static FASTGEN_INLINE void load(Values& to, const float* x) { to = *reinterpret_cast<const Vector*>(x); }
  static FASTGEN_INLINE void load_weight(Values& to, const float* weight) { load(to, weight); }
  static FASTGEN_INLINE void add(Vector& sums, const Values& x, const Values& weight) { sums += x * weight; }
};

#ifdef FASTGEN_ADD_PAIRS

struct BFloat16 {
  using Number = uint16_t;
  using Input = uint16_t;
  using Values = Pairs;
  static constexpr int64_t kStep = 2 * FASTGEN_WIDTH;
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
struct BFloat16 {
  using Number = uint16_t;
  using Input = float;
  struct Values {
    Vector first, second;
  };
  static constexpr int64_t kStep = 2 * FASTGEN_WIDTH;
  static FASTGEN_INLINE float widen(float number) { return number; }
  static FASTGEN_INLINE float widen(uint16_t number) { return fastgen::to_float(number); }
  static FASTGEN_INLINE uint16_t narrow(float number) { return fastgen::to_bfloat16(number); }
  static FASTGEN_INLINE void load(Values& to, const float* x) {
    to.first = *reinterpret_cast<const Vector*>(x);
    to.second = *reinterpret_cast<const Vector*>(x + FASTGEN_WIDTH);
  }
  static FASTGEN_INLINE void load_weight(Values& to, const uint16_t* weight) {
    const Pairs pairs = *reinterpret_cast<const Pairs*>(weight);
    to.first = (Vector)(pairs << 16);
    to.second = (Vector)(pairs & 0xffff0000u);
  }
  static FASTGEN_INLINE void add(Vector& sums, const Values& x, const Values& weight) {
    sums += x.first * weight.first;
    sums += x.second * weight.second;
  }
};

#endif

template <class Type>
FASTGEN_TARGET void prepare(const typename Type::Number* x, int64_t inputs, typename Type::Input* to) {
  const int64_t whole = inputs / Type::kStep * Type::kStep;
  for (int64_t k = 0; k < whole; k += Type::kStep) {
    for (int64_t i = 0; i < FASTGEN_WIDTH; ++i) {
      to[k + i] = Type::widen(x[k + 2 * i]);
      to[k + FASTGEN_WIDTH + i] = Type::widen(x[k + 2 * i + 1]);
    }
  }
  for (int64_t k = whole; k < inputs; ++k) to[k] = Type::widen(x[k]);
}

// Halves are added until one is left.
FASTGEN_INLINE float total(const Vector& sums) {
  float lanes[FASTGEN_WIDTH];
  std::memcpy(lanes, &sums, sizeof(lanes));
#pragma GCC unroll 8
  for (int step = FASTGEN_WIDTH / 2; step > 0; step /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

// What the kernels multiply: `x` and `y` are of some rows, `weight` and `bias` of some outputs.
template <class Type>
struct Product {
  const typename Type::Input* x;
  const typename Type::Number *weight, *bias;
  typename Type::Number* y;
  int64_t x_stride, weight_stride, y_stride, inputs;
};

// y[r][o] for kRows rows and kOutputs outputs. Meanwhile what lies `ahead` of each line of the weight is asked for: the
// weight is one stream, too short in one output for the machine to run ahead by itself.
template <class Type, int kRows, int kOutputs>
FASTGEN_TARGET void dots(const Product<Type>& product, int64_t row, int64_t output, int64_t ahead) {
  const typename Type::Input* x = product.x + row * product.x_stride;
  const typename Type::Number* weight = product.weight + output * product.weight_stride;
  const int64_t inputs = product.inputs, whole = inputs / Type::kStep * Type::kStep;
  Vector sums[kOutputs][kRows] = {};
  for (int64_t k = 0; k < whole; k += Type::kStep) {
    typename Type::Values values[kRows], w;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) Type::load(values[r], x + r * product.x_stride + k);
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      const typename Type::Number* line = weight + o * product.weight_stride + k;
      __builtin_prefetch(line + ahead, 0, 3);
      Type::load_weight(w, line);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) Type::add(sums[o][r], values[r], w);
    }
  }
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o) {
    const typename Type::Number* line = weight + o * product.weight_stride;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      float sum = total(sums[o][r]);
      for (int64_t k = whole; k < inputs; ++k) sum += Type::widen(line[k]) * Type::widen(x[r * product.x_stride + k]);
      if (product.bias != nullptr) sum += Type::widen(product.bias[output + o]);
      product.y[(row + r) * product.y_stride + output + o] = Type::narrow(sum);
    }
  }
}

// All rows times kOutputs outputs, whose lines stay in the cache from the first rows on.
template <class Type, int kOutputs>
FASTGEN_TARGET void group(const Product<Type>& product, int64_t rows, int64_t output, int64_t ahead) {
  for (int64_t row = 0; row < rows; row += 4) {
    const int64_t asked = row == 0 ? ahead : 0;
    switch (std::min<int64_t>(rows - row, 4)) {
      case 4: dots<Type, 4, kOutputs>(product, row, output, asked); break;
      case 3: dots<Type, 3, kOutputs>(product, row, output, asked); break;
      case 2: dots<Type, 2, kOutputs>(product, row, output, asked); break;
      default: dots<Type, 1, kOutputs>(product, row, output, asked);
    }
  }
}

template <class Type>
FASTGEN_TARGET void multiply(const Arguments& given, int64_t first, int64_t some) {
  using Number = typename Type::Number;
  const Product<Type> product{static_cast<const typename Type::Input*>(given.x),
                              static_cast<const Number*>(given.weight) + first * given.weight_stride,
                              given.bias == nullptr ? nullptr : static_cast<const Number*>(given.bias) + first,
                              static_cast<Number*>(given.y) + first,
                              given.x_stride,
                              given.weight_stride,
                              given.outputs,
                              given.inputs};
  int64_t output = 0;
  if (given.rows == 1) {
    for (; output + 8 <= some; output += 8) dots<Type, 1, 8>(product, 0, output, 8 * given.weight_stride);
  }
  for (; output + 4 <= some; output += 4) group<Type, 4>(product, given.rows, output, 4 * given.weight_stride);
  for (; output < some; ++output) group<Type, 1>(product, given.rows, output, 0);
}

#undef FASTGEN_INLINE
#undef FASTGEN_TARGET
#undef FASTGEN_WIDTH
#undef FASTGEN_ADD_PAIRS
