// GEMM of quantised rows with weights in groups, for one instruction set. int8.cpp compiles it for each with
// each_isa.h, therefore without an include guard.

#ifdef FASTGEN_HAS_VNNI
constexpr int kTileRows = FASTGEN_WIDTH == 16 ? 6 : 3;  // summed at the same time, as many as fit the registers
#else
constexpr int kTileRows = 2;
#endif
constexpr int kVectors = 2;  // of outputs

// Adds to sums the products of the unsigned bytes of each lane with four signed ones. With kSmall, bytes are below 64.
template <bool kSmall>
FASTGEN_INLINE void add_dot(Ints& sums, const Bytes& bytes, const int8_t* x) {
#if FASTGEN_WIDTH == 4
  for (int lane = 0; lane < kWidth; ++lane) {
    for (int i = 0; i < 4; ++i) sums[lane] += int32_t{bytes[4 * lane + i]} * x[i];
  }
#else
  int32_t four;
  std::memcpy(&four, x, sizeof(four));
#if FASTGEN_WIDTH == 16
  sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32(four));
#elif defined(FASTGEN_HAS_VNNI)
  sums = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)bytes, _mm256_set1_epi32(four));
#else
  const __m256i inputs = _mm256_set1_epi32(four), numbers = (__m256i)bytes;
  if constexpr (kSmall) {  // the sum of two bytes' products fits into 16 bits
    const __m256i pairs = _mm256_maddubs_epi16(numbers, inputs);
    sums = (Ints)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  } else {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8), odd = _mm256_srai_epi16(inputs, 8);
    const __m256i first = _mm256_madd_epi16(_mm256_and_si256(numbers, _mm256_set1_epi16(255)), even);
    const __m256i second = _mm256_madd_epi16(_mm256_srli_epi16(numbers, 8), odd);
    sums = (Ints)_mm256_add_epi32((__m256i)sums, _mm256_add_epi32(first, second));
  }
#endif
#endif
}

FASTGEN_INLINE void load_factors(Vector& to, const void* from, int64_t at, bool is_half) {
  if (is_half) {
    load_float16(to, static_cast<const uint16_t*>(from) + at);
  } else {
    to = *reinterpret_cast<const Vector*>(static_cast<const float*>(from) + at);
  }
}

// The factors of a group's values, for a vector of outputs.
struct Factors {
  Vector scale, zero = {}, least = {};
};

// A byte times a float16 number, for each output.
FASTGEN_INLINE void load_block_scales(Vector& to, const uint16_t* units, const uint8_t* bytes) {
  load_float16(to, units);
  to *= load_bytes(bytes);
}

FASTGEN_INLINE void load_group(Factors& to, const Weight& weight, int64_t at) {
  if (weight.block_scales != nullptr) {
    const BlockScale of = block_scale(weight, at);
    if (weight.block.has_mins) {
      load_block_scales(to.scale, of.unit, of.scale);
      load_block_scales(to.least, of.unit + kPanel, of.scale + kPanel);
    } else {
      load_float16(to.scale, of.unit);
      to.scale *= load_bytes(of.scale) - static_cast<float>(fastgen::kSignedZero);
    }
    return;
  }
  load_factors(to.scale, weight.scales, at, weight.is_half);
  if (weight.zeros != nullptr) {
    to.zero = load_bytes(weight.zeros + at);
  }
  if (weight.mins != nullptr) load_factors(to.least, weight.mins, at, weight.is_half);
}

// Adds a group's sum of products. The subtraction for `has_zero` is exact.
FASTGEN_INLINE void add_group(Vector& total, const Ints& sum, const Factors& factors, const Group& of, bool has_zero,
                              bool has_least) {
  Vector whole = __builtin_convertvector(sum, Vector);
  if (has_zero) whole -= factors.zero * static_cast<float>(of.sum);
  total += whole * (factors.scale * of.scale);
  if (has_least) total += factors.least * (of.scale * static_cast<float>(of.sum));
}

// Prefetches a line of a tile. kLevels: the number of caches that keep it, up to 3; with 0 only the first.
template <int kLevels>
FASTGEN_INLINE void prefetch(const uint8_t* line) {
  __builtin_prefetch(line, 0, kLevels);
  if (kVectors * kWidth * 4 > 64) __builtin_prefetch(line + 64, 0, kLevels);
}

// Returns four inputs of a word as bytes. `high` has their upper bits lowest, and then those of the next four.
template <int kBits>
FASTGEN_INLINE Bytes four_of(const Bytes& word, int which, Ints& high) {
  const Bytes low = which == 0 ? word & 15 : (Bytes)(((Ints)word >> 4) & 0x0f0f0f0f);
  if (kBits == 4) return low;
  const Bytes found = low | (Bytes)((high << 4) & (kBits == 5 ? 0x10101010 : 0x30303030));
  high >>= kBits - 4;
  return found;
}

// Sums over all inputs, in float32, for the kRows rows of a tile and the outputs from `first` on in a panel. With
// kHasMore the weight may have zeros, mins or super-block scales.
template <int kBits, int kRows, bool kHasMore>
FASTGEN_TARGET void tile(const Weight& weight, const Inputs& inputs, int64_t row, int64_t panel, int64_t first,
                         Ahead where, float* sums) {
  constexpr int64_t kWords = fastgen::low_lines(kBits), kLines = kWords + (kBits % 4 != 0);  // of a set
  const uint8_t* numbers = weight.qweight + panel * weight.panel_bytes + first * 4;
  const uint8_t* ahead = numbers + where.distance;
  const int64_t step = where.step;
  const Group* of = inputs.groups + row * weight.groups;
  const int64_t lines = weight.group_size / 4 * kBits / 8;
  const int8_t* x = inputs.values + row * inputs.stride;
  Vector total[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[r][v] = Vector{};
  }
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t at = (panel * weight.groups + group) * kPanel + first;
    Ints sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Ints{} - weight.zero_point * of[r].sum;
    }
    for (const uint8_t* end = numbers + lines * kLine; numbers != end; numbers += kLines * kLine) {
      Ints high[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        high[v] = kBits % 4 == 0 ? Ints{} : *reinterpret_cast<const Ints*>(numbers + kWords * kLine + v * kWidth * 4);
      }
#pragma GCC unroll 2
      for (int64_t line = 0; line < kLines; ++line, ahead += step) {
        if (where.leaves_out_second_level) {
          prefetch<0>(ahead);
        } else {
          prefetch<3>(ahead);
        }
      }
      for (int64_t word = 0; word < kWords; ++word) {
        // The weight's vectors first: four inputs of a row are then broadcast once for all of them.
        Bytes bytes[kVectors], some[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          bytes[v] = *reinterpret_cast<const Bytes*>(numbers + word * kLine + v * kWidth * 4);
        }
        if (kBits == 8) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r, x += 4) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) add_dot<false>(sum[r][v], bytes[v], x);
          }
          continue;
        }
#pragma GCC unroll 2
        for (int which = 0; which < 2; ++which) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) some[v] = four_of<kBits>(bytes[v], which, high[v]);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r, x += 4) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) add_dot<true>(sum[r][v], some[v], x);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Factors factors;
      if (kHasMore) {
        load_group(factors, weight, at + v * kWidth);
      } else {
        load_factors(factors.scale, weight.scales, at + v * kWidth, weight.is_half);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const bool has_zero = kHasMore && weight.zeros != nullptr, has_least = kHasMore && weight.has_mins();
        add_group(total[r][v], sum[r][v], factors, of[r], has_zero, has_least);
      }
    }
    of += kRows;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Vector*>(sums + r * kPanel + first + v * kWidth) = total[r][v];
    }
  }
}

// Explicit calls, so that the compiler knows the possible values of `first`.
template <int kBits, bool kHasMore>
FASTGEN_TARGET void rows_of_tile(const Weight& weight, const Inputs& inputs, int64_t row, int64_t some, int64_t panel,
                                 Ahead where, float* sums) {
  for (int64_t first = 0; first < kPanel; first += kVectors * kWidth) {
    switch (some) {
#ifdef FASTGEN_HAS_VNNI
#if FASTGEN_WIDTH == 16
      case 6: tile<kBits, 6, kHasMore>(weight, inputs, row, panel, first, where, sums); break;
      case 5: tile<kBits, 5, kHasMore>(weight, inputs, row, panel, first, where, sums); break;
      case 4: tile<kBits, 4, kHasMore>(weight, inputs, row, panel, first, where, sums); break;
#endif
      case 3: tile<kBits, 3, kHasMore>(weight, inputs, row, panel, first, where, sums); break;
#endif
      case 2: tile<kBits, 2, kHasMore>(weight, inputs, row, panel, first, where, sums); break;
      default: tile<kBits, 1, kHasMore>(weight, inputs, row, panel, first, where, sums);
    }
  }
}

template <bool kHasMore>
auto rows_of_bits(int64_t bits) {
  switch (bits) {
    case 4: return &rows_of_tile<4, kHasMore>;
    case 5: return &rows_of_tile<5, kHasMore>;
    case 6: return &rows_of_tile<6, kHasMore>;
    default: return &rows_of_tile<8, kHasMore>;
  }
}

// Multiplies all rows with a panel.
FASTGEN_TARGET inline void multiply_panel(const Product& product, const Inputs& inputs, int64_t rows, int64_t panel) {
  const Weight& weight = product.weight;
  alignas(64) float sums[kTileRows * kPanel];
  const RowTiles tiles(rows, kTileRows);
  const bool has_more = weight.zeros != nullptr || weight.has_mins() || weight.block_scales != nullptr;
  const auto rows_of = has_more ? rows_of_bits<true>(weight.bits) : rows_of_bits<false>(weight.bits);
  for (int64_t i = 0; i < tiles.count; ++i) {
    const int64_t begin = tiles.begin(i), some = tiles.size(i);
    rows_of(weight, inputs, begin, some, panel, ahead(weight, i, tiles.count), sums);
    product.target.store<kPanel, true>(panel * kPanel, sums, kPanel, begin, some);
  }
}

constexpr Kernel kKernel = {kTileRows, &multiply_panel};
