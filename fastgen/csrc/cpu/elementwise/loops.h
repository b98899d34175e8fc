// Elementwise operators for one instruction set. Included once per instruction set by cpu/elementwise.cpp, inside a
// namespace of its own, with FASTGEN_TARGET defined: the attribute that lets the compiler use the instruction set.
// No include guard: it is meant to be included several times.

#define FASTGEN_INLINE FASTGEN_TARGET inline __attribute__((always_inline))

FASTGEN_INLINE float widen(float number) { return number; }
FASTGEN_INLINE float widen(uint16_t number) { return fastgen::to_float(number); }
FASTGEN_INLINE void write(float* to, float value) { *to = value; }
FASTGEN_INLINE void write(uint16_t* to, float value) { *to = fastgen::to_bfloat16(value); }

template <int64_t kind, typename Number>
FASTGEN_INLINE void compute(Number* out, Number a, Number b) {
  switch (kind) {
    case kNegate: write(out, -widen(a)); break;
    case kAdd: write(out, widen(a) + widen(b)); break;
    case kSubtract: write(out, widen(a) - widen(b)); break;
    case kMultiply: write(out, widen(a) * widen(b)); break;
    default: *out = a;
  }
}

// The usual strides have loops of their own, in which the compiler uses vectors.
template <int64_t kind, typename Number>
FASTGEN_TARGET void line(Number* out, int64_t out_stride, const Number* a, int64_t a_stride, const Number* b,
                         int64_t b_stride, int64_t count) {
  if (out_stride == 1 && a_stride == 1 && b_stride == 1) {
    for (int64_t i = 0; i < count; ++i) compute<kind>(out + i, a[i], b[i]);
  } else if (out_stride == 1 && a_stride == 1 && b_stride == 0) {
    const Number same = *b;
    for (int64_t i = 0; i < count; ++i) compute<kind>(out + i, a[i], same);
  } else if (out_stride == 1 && a_stride == 0 && b_stride == 1) {
    const Number same = *a;
    for (int64_t i = 0; i < count; ++i) compute<kind>(out + i, same, b[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) compute<kind>(out + i * out_stride, a[i * a_stride], b[i * b_stride]);
  }
}

// The last dimension in a loop of its own, the others one after the other.
template <typename Number, int64_t kind>
FASTGEN_TARGET void all(const Operands& operands, const Sizes& sizes, int64_t dim, std::array<int64_t, 3> offsets) {
  if (dim + 1 < sizes.dims) {
    for (int64_t i = 0; i < sizes.of[dim]; ++i) {
      all<Number, kind>(operands, sizes, dim + 1, offsets);
      for (int n = 0; n < 3; ++n) offsets[n] += operands[n].strides[dim];
    }
    return;
  }
  const auto first = [&](int n) { return static_cast<Number*>(operands[n].data) + offsets[n]; };
  line<kind, Number>(first(0), operands[0].strides[dim], first(1), operands[1].strides[dim], first(2),
                     operands[2].strides[dim], sizes.of[dim]);
}

template <typename Number>
Run run_of_type(int64_t kind) {
  switch (kind) {
    case kNegate: return &all<Number, kNegate>;
    case kAdd: return &all<Number, kAdd>;
    case kSubtract: return &all<Number, kSubtract>;
    case kMultiply: return &all<Number, kMultiply>;
    default: return &all<Number, kCopy>;
  }
}

inline Run run_of(int64_t kind, int64_t itemsize) {
  return itemsize == 4 ? run_of_type<float>(kind) : run_of_type<uint16_t>(kind);
}

#undef FASTGEN_INLINE
#undef FASTGEN_TARGET
