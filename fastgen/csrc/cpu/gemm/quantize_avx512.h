// Quantises rows to 8 bits, with a group of 32, 64 or 128 numbers in registers at a time. Included by
// quantize_kernels.h. It uses the same operations in the same order, so that results have the same bits.

// Computes sums and differences of vectors that are kStep apart, then of those that are twice as far apart, and so on.
template <int kStep, int kVectors>
FASTGEN_INLINE void add_vectors(__m512 (&group)[kVectors]) {
  if constexpr (kStep < kVectors) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      if ((i & kStep) != 0) continue;
      const __m512 one = group[i], other = group[i + kStep];
      group[i] = _mm512_add_ps(one, other);
      group[i + kStep] = _mm512_sub_ps(one, other);
    }
    add_vectors<2 * kStep>(group);
  }
}

// Multiplies the group by its Hadamard matrix. Numbers that quantize_kernels.h moves to the other half of the group
// stay in place here: a difference if the bit in which the pair's indices differ is set, else a sum.
template <int kVectors>
FASTGEN_INLINE void rotate_in_registers(__m512 (&group)[kVectors]) {
  const __m512 add = _mm512_set1_ps(1.0f), take = _mm512_set1_ps(-1.0f);
  const __m512 first = _mm512_mask_blend_ps(0xaaaa, add, take), second = _mm512_mask_blend_ps(0xcccc, add, take);
  const __m512 third = _mm512_mask_blend_ps(0xf0f0, add, take), fourth = _mm512_mask_blend_ps(0xff00, add, take);
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    __m512& x = group[i];
    x = _mm512_fmadd_ps(x, first, _mm512_permute_ps(x, 0xb1));
    x = _mm512_fmadd_ps(x, second, _mm512_permute_ps(x, 0x4e));
    x = _mm512_fmadd_ps(x, third, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_fmadd_ps(x, fourth, _mm512_shuffle_f32x4(x, x, 0x4e));
  }
  add_vectors<1>(group);
}

template <int kVectors>
FASTGEN_INLINE void quantize_in_registers(const __m512 (&group)[kVectors],
                                                                                int64_t some, int8_t* to,
                                                                                Group* about) {
  alignas(64) int8_t numbers[kVectors * 16];
  const __m512i without_sign = _mm512_set1_epi32(0x7fffffff);
  __m512i sizes = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    sizes = _mm512_max_epu32(sizes, _mm512_and_si512(_mm512_castps_si512(group[i]), without_sign));
  }
  const uint32_t largest = _mm512_reduce_max_epu32(sizes);
  const bool is_finite = largest < 0x7f800000u;
  const float size = fastgen::of_bits(largest), factor = is_finite && size > 1e-30f ? 127.0f / size : 0.0f;
  const __mmask16 kept = is_finite ? 0xffff : 0;
  const __m512i rounding = _mm512_set1_epi32(static_cast<int32_t>(fastgen::bits_of(kRounding)));
  __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const __m512 x = _mm512_maskz_mov_ps(kept, group[i]);
    const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(factor), _mm512_castsi512_ps(rounding));
    const __m512i number = _mm512_sub_epi32(_mm512_castps_si512(shifted), rounding);
    sum = _mm512_add_epi32(sum, number);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + 16 * i), _mm512_cvtepi32_epi8(number));
  }
  if (some == 1) {
    std::memcpy(to, numbers, sizeof(numbers));
  } else {
    for (int64_t i = 0; i < kVectors * 16; i += 4) std::memcpy(to + i * some, numbers + i, 4);
  }
  *about = {is_finite ? (factor == 0.0f ? 0.0f : size / 127.0f) : kNaN, _mm512_reduce_add_epi32(sum)};
}

// Quantises whole groups of kVectors vectors, optionally rotated.
template <int kVectors, bool kRotated>
FASTGEN_TARGET void round_groups(const float* x, int64_t count, int64_t some, int8_t* to, Group* groups) {
  constexpr int64_t kSize = kVectors * 16;
  const __m512 share = _mm512_set1_ps(1.0f / static_cast<float>(kSize));
  for (const float* end = x + count; x < end; x += kSize, to += kSize * some, groups += some) {
    __m512 group[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      group[i] = _mm512_loadu_ps(x + 16 * i);
      if (kRotated) group[i] = _mm512_mul_ps(group[i], share);
    }
    if (kRotated) rotate_in_registers(group);
    quantize_in_registers(group, some, to, groups);
  }
}

FASTGEN_TARGET inline void quantize_rows(const float* x, int64_t inputs, int64_t group_size, int64_t some, int8_t* to,
                                         Group* groups) {
  if (inputs % group_size != 0) return quantize(x, inputs, group_size, some, to, groups);
  switch (group_size) {
    case 32: return round_groups<2, false>(x, inputs, some, to, groups);
    case 64: return round_groups<4, false>(x, inputs, some, to, groups);
    case 128: return round_groups<8, false>(x, inputs, some, to, groups);
    default: return quantize(x, inputs, group_size, some, to, groups);
  }
}

FASTGEN_TARGET inline void rotate_and_quantize_rows(const float* x, int64_t count, int64_t group_size, int64_t some,
                                                    int8_t* to, Group* groups, float*) {
  switch (group_size) {
    case 32: return round_groups<2, true>(x, count, some, to, groups);
    case 64: return round_groups<4, true>(x, count, some, to, groups);
    default: return round_groups<8, true>(x, count, some, to, groups);
  }
}
