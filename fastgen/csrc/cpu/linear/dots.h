// Products of very few rows for one instruction set, as dot products with the lines of the weight as it is. Included by
// cpu/linear.cpp like tiles.h, behind it, inside the same namespaces.

// y[r][o] for kRows rows and kOutputs outputs, whose lines of the weight are `stride` apart. Meanwhile what lies `ahead`
// of each line is asked for: the weight is one stream, too short in one output for the machine to run ahead by itself.
template <int kRows, int kOutputs>
FASTGEN_TARGET void dots(const float* x, int64_t x_stride, const float* weight, int64_t stride, int64_t inputs,
                         int64_t ahead, const float* bias, float* y, int64_t y_stride) {
  Vector sums[kOutputs][kRows] = {};
  const int64_t whole = inputs / FASTGEN_WIDTH * FASTGEN_WIDTH;
  for (int64_t k = 0; k < whole; k += FASTGEN_WIDTH) {
    Vector values[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) values[r] = *reinterpret_cast<const Vector*>(x + r * x_stride + k);
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      const float* line = weight + o * stride + k;
      __builtin_prefetch(line + ahead, 0, 3);
      const Vector w = *reinterpret_cast<const Vector*>(line);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[o][r] += w * values[r];
    }
  }
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      float sum = 0;
      for (int i = 0; i < FASTGEN_WIDTH; ++i) sum += sums[o][r][i];
      for (int64_t k = whole; k < inputs; ++k) sum += weight[o * stride + k] * x[r * x_stride + k];
      y[r * y_stride + o] = sum + (bias != nullptr ? bias[o] : 0.0f);
    }
  }
}

// The first `rows` rows, at most 4, times `outputs` lines of the weight.
template <int kRows>
FASTGEN_TARGET void all_dots(const float* x, int64_t x_stride, const float* weight, int64_t stride, int64_t inputs,
                             int64_t outputs, const float* bias, float* y, int64_t y_stride) {
  constexpr int kOutputs = kRows == 1 ? 8 : 4;
  int64_t o = 0;
  for (; o + kOutputs <= outputs; o += kOutputs) {
    dots<kRows, kOutputs>(x, x_stride, weight + o * stride, stride, inputs, kOutputs * stride, bias ? bias + o : nullptr,
                          y + o, y_stride);
  }
  for (; o < outputs; ++o) {
    dots<kRows, 1>(x, x_stride, weight + o * stride, stride, inputs, 0, bias ? bias + o : nullptr, y + o, y_stride);
  }
}

#undef FASTGEN_TARGET
#undef FASTGEN_WIDTH
#undef FASTGEN_VECTORS
#undef FASTGEN_ROWS
#undef FASTGEN_TRANSPOSE
