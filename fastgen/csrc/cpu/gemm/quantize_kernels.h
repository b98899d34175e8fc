// Quantises rows and weights, for one instruction set. quantize.cpp compiles it for each with each_isa.h, therefore
// without an include guard.

// Computes sums and differences of pairs, the sums first, of numbers times a factor: log2(kSize) repetitions multiply x
// by the Hadamard matrix. Each number only results from additions, in the same order in every instruction set.
template <int64_t kSize, bool kScaled>
FASTGEN_TARGET inline void add_pairs(const float* __restrict__ x, float factor, float* __restrict__ to) {
#pragma GCC unroll 1  // unrolled, it would not be vectorised
  for (int64_t i = 0; i < kSize / 2; ++i) {
    const float first = kScaled ? x[2 * i] * factor : x[2 * i], second = kScaled ? x[2 * i + 1] * factor : x[2 * i + 1];
    to[i] = first + second;
    to[i + kSize / 2] = first - second;
  }
}

template <int64_t kSize>
FASTGEN_TARGET inline void rotate_groups(const float* x, int64_t count, float factor, float* to) {
  alignas(64) float memory[2][kSize];
  for (const float* end = x + count; x < end; x += kSize, to += kSize) {
    add_pairs<kSize, true>(x, factor, memory[0]);
    int64_t from = 0;
    for (int64_t pairs = kSize / 2; pairs > 2; pairs /= 2, from = 1 - from) {
      add_pairs<kSize, false>(memory[from], factor, memory[1 - from]);
    }
    add_pairs<kSize, false>(memory[from], factor, to);
  }
}

// Multiplies whole groups, `count` numbers, by the Hadamard matrix of their size, which is 32, 64 or 128, and a factor.
FASTGEN_TARGET inline void rotate(const float* x, int64_t count, int64_t group_size, float factor, float* to) {
  switch (group_size) {
    case 32: return rotate_groups<32>(x, count, factor, to);
    case 64: return rotate_groups<64>(x, count, factor, to);
    default: return rotate_groups<128>(x, count, factor, to);
  }
}

// Quantises a row to signed bytes, group by group: multiples of a 127th of the group's largest number. A number that is
// not finite makes the group's scale NaN. The row is one of `some` in a tile (packed.h).
FASTGEN_TARGET inline void quantize(const float* x, int64_t inputs, int64_t group_size, int64_t some, int8_t* to,
                                    Group* groups) {
  alignas(64) int8_t numbers[kMaxGroup];
  for (int64_t begin = 0; begin < inputs; begin += group_size, groups += some, to += group_size * some) {
    const int64_t count = std::min(group_size, inputs - begin);
    uint32_t largest = 0;  // as bits, which are ordered by magnitude
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t size = fastgen::bits_of(x[begin + i]) & 0x7fffffffu;
      largest = largest > size ? largest : size;
    }
    const float size = fastgen::of_bits(largest);
    const bool is_finite = largest < 0x7f800000u;
    // The smallest numbers, whose inverse is not finite, become 0.
    const float factor = is_finite && size > 1e-30f ? 127.0f / size : 0.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float shifted = (is_finite ? x[begin + i] : 0.0f) * factor + kRounding;
      const int32_t number = static_cast<int32_t>(fastgen::bits_of(shifted) - fastgen::bits_of(kRounding));
      numbers[i] = static_cast<int8_t>(number);
      sum += number;
    }
    for (int64_t i = count; i < group_size; ++i) numbers[i] = 0;
    if (some == 1) {
      std::memcpy(to, numbers, group_size);
    } else {
      for (int64_t i = 0; i < group_size; i += 4) std::memcpy(to + i * some, numbers + i, 4);
    }
    *groups = {is_finite ? (factor == 0.0f ? 0.0f : size / 127.0f) : kNaN, sum};
  }
}

// The functions that quantise a row (packed.h). For AVX-512, quantize_avx512.h has them.
#if FASTGEN_WIDTH == 16
#include "quantize_avx512.h"
#else
FASTGEN_TARGET inline void quantize_rows(const float* x, int64_t inputs, int64_t group_size, int64_t some, int8_t* to,
                                         Group* groups) {
  quantize(x, inputs, group_size, some, to, groups);
}

FASTGEN_TARGET inline void rotate_and_quantize_rows(const float* x, int64_t count, int64_t group_size, int64_t some,
                                                    int8_t* to, Group* groups, float* memory) {
  rotate(x, count, group_size, 1.0f / static_cast<float>(group_size), memory);
  quantize(memory, count, group_size, some, to, groups);
}
#endif

// Finds the smallest and the largest number of each group and 0; both are NaN if one of the numbers is.
FASTGEN_TARGET inline void find_extremes(const float* x, int64_t inputs, int64_t group_size, float* least, float* most) {
  for (int64_t begin = 0; begin < inputs; begin += group_size, ++least, ++most) {
    const int64_t end = std::min(begin + group_size, inputs);
    int32_t below = 0, above = 0;  // magnitudes as bits, in the same order; numbers of the other sign are negative
    for (int64_t i = begin; i < end; ++i) {
      const int32_t bits = static_cast<int32_t>(fastgen::bits_of(x[i]));
      const int32_t turned = static_cast<int32_t>(static_cast<uint32_t>(bits) ^ 0x80000000u);
      above = above > bits ? above : bits;
      below = below > turned ? below : turned;
    }
    const bool is_known = std::max(below, above) <= 0x7f800000;
    *least = is_known ? -fastgen::of_bits(static_cast<uint32_t>(below)) : kNaN;
    *most = is_known ? fastgen::of_bits(static_cast<uint32_t>(above)) : kNaN;
  }
}

// Rounds the inputs of an output to multiples of their groups' scales, as numbers from 0 on; `zero_point` stands for 0.
FASTGEN_TARGET inline void round_line(const float* x, int64_t inputs, int64_t group_size, const float* scales,
                                      int32_t zero_point, uint8_t* to) {
  const float least = static_cast<float>(-zero_point), most = static_cast<float>(zero_point - 1);
  for (int64_t begin = 0; begin < inputs; begin += group_size, ++scales) {
    const int64_t end = std::min(begin + group_size, inputs);
    const float factor = *scales == 0.0f ? 0.0f : 1.0f / *scales;
    for (int64_t i = begin; i < end; ++i) {
      float number = x[i] * factor;
      number = number > least ? number : least;  // also replaces NaN
      number = number < most ? number : most;
      const uint32_t bits = fastgen::bits_of(number + kRounding) - fastgen::bits_of(kRounding);
      to[i] = static_cast<uint8_t>(static_cast<int32_t>(bits) + zero_point);
    }
  }
}

constexpr WeightKernels kWeightKernels = {&round_line, &find_extremes};
constexpr RowKernels kRowKernels = {&quantize_rows, &rotate, &rotate_and_quantize_rows};
