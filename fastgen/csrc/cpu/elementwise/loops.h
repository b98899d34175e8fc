// Elementwise operators and norms for one instruction set. elementwise.cpp compiles it for each with each_isa.h,
// therefore without an include guard.
//
// Everything is computed in float32, in chunks that are converted before and after.

constexpr int64_t kChunk = 256;
constexpr int64_t kLanes = 16;

// ---- conversions from and to float32

struct Float32 {
  using Number = float;
  static FASTGEN_ALWAYS float widen(float number) { return number; }
  static FASTGEN_ALWAYS float narrow(float number) { return number; }
};

struct BFloat16 {
  using Number = uint16_t;
  static FASTGEN_ALWAYS float widen(uint16_t number) { return fastgen::to_float(number); }
  static FASTGEN_ALWAYS uint16_t narrow(float number) { return fastgen::to_bfloat16(number); }
};

struct Float16 {
  using Number = uint16_t;
  static FASTGEN_ALWAYS float widen(uint16_t number) { return fastgen::float16_to_float(number); }
  static FASTGEN_ALWAYS uint16_t narrow(float number) { return fastgen::to_float16(number); }
};

template <typename Type>
FASTGEN_TARGET void widen(float* to, const Piece& piece, int64_t begin, int64_t count) {
  const auto* from = reinterpret_cast<const typename Type::Number*>(piece.data) + begin * piece.stride;
  if (piece.stride == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = Type::widen(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = Type::widen(from[i * piece.stride]);
  }
}

template <typename Type>
FASTGEN_TARGET void narrow(const Piece& piece, int64_t begin, int64_t count, const float* from) {
  auto* to = reinterpret_cast<typename Type::Number*>(piece.data) + begin * piece.stride;
  if (piece.stride == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = Type::narrow(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i * piece.stride] = Type::narrow(from[i]);
  }
}

inline bool is_direct(const Piece& piece) { return piece.type == kFloat32 && piece.stride == 1 && piece.data; }

// Returns some elements of a line; without memory, copies of `other`.
FASTGEN_TARGET inline const float* loaded(const Piece& piece, int64_t begin, int64_t count, float other,
                                          float* buffer) {
  if (is_direct(piece)) return reinterpret_cast<const float*>(piece.data) + begin;
  if (!piece.data || piece.stride == 0) {
    const uint16_t* half = reinterpret_cast<const uint16_t*>(piece.data);
    if (piece.type == kFloat32) other = piece.data ? *reinterpret_cast<const float*>(piece.data) : other;
    else if (half && piece.type == kBFloat16) other = BFloat16::widen(*half);
    else if (half) other = Float16::widen(*half);
    for (int64_t i = 0; i < count; ++i) buffer[i] = other;
  } else if (piece.type == kFloat32) {
    widen<Float32>(buffer, piece, begin, count);
  } else if (piece.type == kBFloat16) {
    widen<BFloat16>(buffer, piece, begin, count);
  } else {
    widen<Float16>(buffer, piece, begin, count);
  }
  return buffer;
}

// Returns where some elements of a result are computed.
inline float* place_of(const Piece& piece, int64_t begin, float* buffer) {
  return is_direct(piece) ? reinterpret_cast<float*>(piece.data) + begin : buffer;
}

FASTGEN_TARGET inline void store(const Piece& piece, int64_t begin, int64_t count, const float* from) {
  if (is_direct(piece)) return;
  if (piece.type == kFloat32) narrow<Float32>(piece, begin, count, from);
  else if (piece.type == kBFloat16) narrow<BFloat16>(piece, begin, count, from);
  else narrow<Float16>(piece, begin, count, from);
}

// ---- elementwise operators

template <int64_t kind>
FASTGEN_ALWAYS float computed(float a, float b) {
  switch (kind) {
    case kNegate: return -a;
    case kAdd: return a + b;
    case kSubtract: return a - b;
    case kMultiply: return a * b;
    case kRelu: return a < 0.0f ? 0.0f : a;
    case kSilu: return fastgen::silu(a);
    case kSigmoid: return fastgen::sigmoid(a);
    case kTanh: return fastgen::hyperbolic_tangent(a);
    case kGelu: return fastgen::gelu(a);
    case kGeluTanh: return fastgen::gelu_tanh(a);
    default: return a;
  }
}

template <int64_t kind>
FASTGEN_TARGET void compute(const Piece* pieces, int64_t count, const Options& options) {
  constexpr bool has_second = kind == kAdd || kind == kSubtract || kind == kMultiply;
  float buffers[3][kChunk];
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t size = std::min(kChunk, count - begin);
    const float* a = loaded(pieces[1], begin, size, 0.0f, buffers[1]);
    const float* b = a;
    if (has_second) b = loaded(pieces[2], begin, size, static_cast<float>(options.numbers[1]), buffers[2]);
    float* out = place_of(pieces[0], begin, buffers[0]);
#pragma GCC ivdep
    for (int64_t i = 0; i < size; ++i) out[i] = computed<kind>(a[i], b[i]);
    store(pieces[0], begin, size, out);
  }
}

template <typename Number>
FASTGEN_TARGET void copy_numbers(const Piece& to, const Piece& from, int64_t count) {
  auto* out = reinterpret_cast<Number*>(to.data);
  const auto* numbers = reinterpret_cast<const Number*>(from.data);
  if (to.stride == 1 && from.stride == 1) {
    std::memmove(out, numbers, count * sizeof(Number));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i * to.stride] = numbers[i * from.stride];
  }
}

FASTGEN_TARGET inline void copy(const Piece* pieces, int64_t count, const Options& options) {
  const int64_t type = pieces[0].type;
  if (type != pieces[1].type) compute<kCopy>(pieces, count, options);
  else if (type == kBytes8) copy_numbers<uint64_t>(pieces[0], pieces[1], count);
  else if (type == kFloat32 || type == kBytes4) copy_numbers<uint32_t>(pieces[0], pieces[1], count);
  else if (type == kBytes1) copy_numbers<uint8_t>(pieces[0], pieces[1], count);
  else copy_numbers<uint16_t>(pieces[0], pieces[1], count);
}

// ---- norms: a line is a row

// The sum of x - mean, or of its squares.
template <bool squares>
FASTGEN_TARGET float total(const Piece& row, int64_t width, float mean) {
  float sums[kLanes] = {}, buffer[kChunk];
  for (int64_t begin = 0; begin < width; begin += kChunk) {
    const int64_t size = std::min(kChunk, width - begin), whole = size - size % kLanes;
    const float* x = loaded(row, begin, size, 0.0f, buffer);
    for (int64_t i = 0; i < whole; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const float part = x[i + lane] - mean;
        sums[lane] += squares ? part * part : part;
      }
    }
    for (int64_t i = whole; i < size; ++i) {
      const float part = x[i] - mean;
      sums[i - whole] += squares ? part * part : part;
    }
  }
  for (int64_t step = kLanes / 2; step > 0; step /= 2) {
    for (int64_t lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  }
  return sums[0];
}

FASTGEN_TARGET inline void rms_norm(const Piece* pieces, int64_t width, const Options& options) {
  const float mean = total<true>(pieces[1], width, 0.0f) / static_cast<float>(width);
  const float scale = 1.0f / std::sqrt(mean + static_cast<float>(options.numbers[0]));
  const float offset = static_cast<float>(options.numbers[1]);
  float buffers[3][kChunk];
  for (int64_t begin = 0; begin < width; begin += kChunk) {
    const int64_t size = std::min(kChunk, width - begin);
    const float* x = loaded(pieces[1], begin, size, 0.0f, buffers[1]);
    const float* weight = loaded(pieces[2], begin, size, 1.0f, buffers[2]);
    float* out = place_of(pieces[0], begin, buffers[0]);
#pragma GCC ivdep
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * scale;
    if (options.rounds_scaled && pieces[0].type == kBFloat16) {
      for (int64_t i = 0; i < size; ++i) out[i] = BFloat16::widen(BFloat16::narrow(out[i]));
    } else if (options.rounds_scaled && pieces[0].type == kFloat16) {
      for (int64_t i = 0; i < size; ++i) out[i] = Float16::widen(Float16::narrow(out[i]));
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < size; ++i) out[i] *= weight[i] + offset;
    store(pieces[0], begin, size, out);
  }
}

FASTGEN_TARGET inline void layer_norm(const Piece* pieces, int64_t width, const Options& options) {
  const float mean = total<false>(pieces[1], width, 0.0f) / static_cast<float>(width);
  const float variance = total<true>(pieces[1], width, mean) / static_cast<float>(width);
  const float scale = 1.0f / std::sqrt(variance + static_cast<float>(options.numbers[0]));
  float buffers[4][kChunk];
  for (int64_t begin = 0; begin < width; begin += kChunk) {
    const int64_t size = std::min(kChunk, width - begin);
    const float* x = loaded(pieces[1], begin, size, 0.0f, buffers[1]);
    const float* weight = loaded(pieces[2], begin, size, 1.0f, buffers[2]);
    const float* bias = loaded(pieces[3], begin, size, 0.0f, buffers[3]);
    float* out = place_of(pieces[0], begin, buffers[0]);
#pragma GCC ivdep
    for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
    store(pieces[0], begin, size, out);
  }
}

// ---- lines

// Processes one line after the other.
template <void (*line)(const Piece*, int64_t, const Options&)>
FASTGEN_TARGET void each(const Piece* pieces, const int64_t* apart, int64_t lines, int64_t count,
                         const Options& options) {
  Piece now[] = {pieces[0], pieces[1], pieces[2], pieces[3]};
  for (int64_t i = 0; i < lines; ++i) {
    line(now, count, options);
    for (int n = 0; n < 4; ++n) {
      if (now[n].data) now[n].data += apart[n];
    }
  }
}

// `compute` for lines. If they are short, as the heads in a decode step, inspecting a line's layout takes longer than
// its computation. For contiguous float32 it is therefore inspected once for all lines.
template <int64_t kind>
FASTGEN_TARGET void compute_lines(const Piece* pieces, const int64_t* apart, int64_t lines, int64_t count,
                                  const Options& options) {
  const bool has_second = kind == kAdd || kind == kSubtract || kind == kMultiply;
  const Piece& second = pieces[has_second ? 2 : 1];
  if (!(is_direct(pieces[0]) && is_direct(pieces[1]) && is_direct(second))) {
    return each<compute<kind>>(pieces, apart, lines, count, options);
  }
  for (int64_t line = 0; line < lines; ++line) {
    auto* out = reinterpret_cast<float*>(pieces[0].data + line * apart[0]);
    const auto* a = reinterpret_cast<const float*>(pieces[1].data + line * apart[1]);
    const auto* b = reinterpret_cast<const float*>(second.data + line * apart[has_second ? 2 : 1]);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = computed<kind>(a[i], b[i]);
  }
}

inline Line line_of(int64_t kind) {
  switch (kind) {
    case kNegate: return &compute_lines<kNegate>;
    case kAdd: return &compute_lines<kAdd>;
    case kSubtract: return &compute_lines<kSubtract>;
    case kMultiply: return &compute_lines<kMultiply>;
    case kRelu: return &compute_lines<kRelu>;
    case kSilu: return &compute_lines<kSilu>;
    case kSigmoid: return &compute_lines<kSigmoid>;
    case kTanh: return &compute_lines<kTanh>;
    case kGelu: return &compute_lines<kGelu>;
    case kGeluTanh: return &compute_lines<kGeluTanh>;
    case kRmsNorm: return &each<rms_norm>;
    case kLayerNorm: return &each<layer_norm>;
    default: return &each<copy>;
  }
}
