// GEMV on a weight that is stored by inputs: adds multiples of its columns to the result, in float32. Included by
// gemv_kernels.h. No include guard: it is meant to be included several times.

// The numbers of such a weight, in their order; x is float32.
struct Float32Columns : Float32 {
  static FASTGEN_INLINE Vector load_outputs(const float* weight) { return load_weight(weight, 0); }
};

struct BFloat16Columns : BFloat16 {
  static FASTGEN_INLINE Vector load_outputs(const uint16_t* weight) {
    return (Vector)(__builtin_convertvector(*reinterpret_cast<const FewWords*>(weight), Bits) << 16);
  }
};

struct Float16Columns : Float16 {
  static FASTGEN_INLINE Vector load_outputs(const uint16_t* weight) { return load_weight(weight, 0); }
};

template <class Type>
FASTGEN_TARGET void upcast(const uint16_t* x, int64_t inputs, float* to) {
  for (int64_t k = 0; k < inputs; ++k) to[k] = Type::upcast(x[k]);
}

// Adds kLines lines times kVectors vectors of outputs from `output` on to the sums of all rows, whose lines are `stride`
// apart. `factors`, [rows, kLines], are from x.
template <class Type, int kVectors, int kLines>
FASTGEN_INLINE void add_multiples(const typename Type::Number* lines, int64_t line_stride, int64_t output,
                                  const float* factors, int64_t rows, float* sums, int64_t stride) {
  Vector w[kLines][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
    const typename Type::Number* line = lines + i * line_stride + output;
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      w[i][v] = Type::load_outputs(line + v * kWidth);
      __builtin_prefetch(line + kLines * line_stride + v * kWidth, 0, 3);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    Vector* of_row = reinterpret_cast<Vector*>(sums + r * stride + output);
    Vector added[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) added[v] = of_row[v];
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) added[v] += factors[r * kLines + i] * w[i][v];
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) of_row[v] = added[v];
  }
}

// Multiplies all rows with `width` outputs from `begin` on, to `sums`, whose lines are `stride` apart. `factors` is
// scratch memory.
template <class Type, int kVectors, int kLines>
FASTGEN_TARGET void sum_multiples(const Operands<void>& given, const float* x, int64_t rows, int64_t begin, int64_t width,
                                  float* factors, float* sums, int64_t stride) {
  using Number = typename Type::Number;
  const Number* weight = static_cast<const Number*>(given.weight) + begin;
  const Number* bias = given.bias == nullptr ? nullptr : static_cast<const Number*>(given.bias) + begin;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < width; ++o) sums[r * stride + o] = bias == nullptr ? 0.0f : Type::upcast(bias[o]);
  }
  const int64_t whole = width / kWidth * kWidth, steps = given.inputs / kLines * kLines;
  for (int64_t k = 0; k < steps; k += kLines) {
    const Number* lines = weight + k * given.weight_stride;
    for (int64_t r = 0; r < rows; ++r) std::copy_n(x + r * given.x_stride + k, kLines, factors + r * kLines);
    int64_t o = 0;
    for (; o + kVectors * kWidth <= whole; o += kVectors * kWidth) {
      add_multiples<Type, kVectors, kLines>(lines, given.weight_stride, o, factors, rows, sums, stride);
    }
    if (o < whole) add_multiples<Type, 1, kLines>(lines, given.weight_stride, o, factors, rows, sums, stride);
  }
  // The rest: the outputs after the last vector, and all outputs of the inputs after the last kLines.
  for (int64_t k = 0; k < given.inputs; ++k) {
    const Number* line = weight + k * given.weight_stride;
    for (int64_t r = 0; r < rows; ++r) {
      const float factor = x[r * given.x_stride + k];
      for (int64_t o = k < steps ? whole : 0; o < width; ++o) sums[r * stride + o] += factor * Type::upcast(line[o]);
    }
  }
}

// Multiplies all rows with such a weight. A part of the result is summed in separate memory: lines of a result and of x
// are often multiples of 4,096 bytes apart, and the first-level cache holds only as many of these as it has ways, which
// may be fewer than the rows.
template <class Type>
FASTGEN_TARGET void add_columns(const Operands<void>& given, int64_t first, int64_t some) {
  constexpr int64_t kLines = 8, kRows = 24;
  constexpr int kVectors = FASTGEN_WIDTH == 16 ? 2 : 1;  // that fit the registers
  // Outputs of a part: half as many with more rows, so that their sums stay in the cache. kSpare separates two rows.
  constexpr int64_t kMost = 512, kSpare = 16;
  const int64_t part = given.rows > 16 ? kMost / 2 : kMost, stride = part + kSpare;
  alignas(64) float sums[kRows * (kMost + kSpare)], factors[kRows * kLines];
  for (int64_t begin = first; begin < first + some; begin += part) {
    const int64_t width = std::min(part, first + some - begin);
    for (int64_t row = 0; row < given.rows; row += kRows) {
      const int64_t rows = std::min(kRows, given.rows - row);
      const float* x = static_cast<const float*>(given.x) + row * given.x_stride;
      sum_multiples<Type, kVectors, kLines>(given, x, rows, begin, width, factors, sums, stride);
      typename Type::Number* y = static_cast<typename Type::Number*>(given.y) + row * given.outputs + begin;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < width; ++o) y[r * given.outputs + o] = Type::downcast(sums[r * stride + o]);
      }
    }
  }
}
