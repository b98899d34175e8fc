// Products with weights in few bits, for one instruction set. Included once per instruction set by cpu/grouped_linear.cpp,
// inside a namespace of its own, with these defined:
//   FASTGEN_TARGET     the attribute that lets the compiler use the instruction set
//   FASTGEN_WIDTH      32-bit numbers of a vector
//   FASTGEN_VECTORS    vectors of outputs that are summed up at the same time
//   FASTGEN_ROWS       rows that are summed up at the same time: as many as there are registers for
//   FASTGEN_FLOAT16    what loads a vector of float16 (float16.h)
//   FASTGEN_WIDEN      (from): a vector of floats from bytes
//   FASTGEN_DOT        (sums, bytes, four): sums + products of the unsigned bytes of each lane with four signed ones
//   FASTGEN_SMALL_DOT  the same for bytes below 64
// No include guard: it is meant to be included several times.

#define FASTGEN_INLINE FASTGEN_TARGET inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(FASTGEN_WIDTH * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(FASTGEN_WIDTH * 4), aligned(4), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(FASTGEN_WIDTH * 4), aligned(1), may_alias));
typedef uint8_t FewBytes __attribute__((vector_size(FASTGEN_WIDTH), aligned(1), may_alias));

FASTGEN_INLINE void load_factors(Floats& to, const void* from, int64_t at, bool is_half) {
  if (is_half) {
    FASTGEN_FLOAT16::load(to, static_cast<const uint16_t*>(from) + at);
  } else {
    to = *reinterpret_cast<const Floats*>(static_cast<const float*>(from) + at);
  }
}

// What the numbers of a group are multiplied with, for a vector of outputs.
struct Factors {
  Floats scale, middle = {}, least = {};
};

constexpr int64_t kTileRows = FASTGEN_ROWS;

// A byte times a number in float16, of each output.
FASTGEN_INLINE void load_multiples(Floats& to, const uint16_t* units, const uint8_t* bytes) {
  FASTGEN_FLOAT16::load(to, units);
  to *= FASTGEN_WIDEN(bytes);
}

FASTGEN_INLINE void load_group(Factors& to, const Weight& weight, int64_t at) {
  if (weight.multiples != nullptr) {
    const Place of = place(weight, at);
    if (weight.block.has_minimums) {
      load_multiples(to.scale, of.unit, of.scale);
      load_multiples(to.least, of.unit + kPanel, of.scale + kPanel);
    } else {
      FASTGEN_FLOAT16::load(to.scale, of.unit);
      to.scale *= FASTGEN_WIDEN(of.scale) - static_cast<float>(fastgen::kSignedMiddle);
    }
    return;
  }
  load_factors(to.scale, weight.scales, at, weight.are_half);
  if (weight.zeros != nullptr) {
    to.middle = FASTGEN_WIDEN(weight.zeros + at);
  }
  if (weight.minimums != nullptr) load_factors(to.least, weight.minimums, at, weight.are_half);
}

// Adds a group's sum of products. Whatever `has_middle` takes away from it is exact.
FASTGEN_INLINE void add_group(Floats& total, const Ints& sum, const Factors& factors, const Group& of, bool has_middle,
                              bool has_least) {
  Floats whole = __builtin_convertvector(sum, Floats);
  if (has_middle) whole -= factors.middle * static_cast<float>(of.sum);
  total += whole * (factors.scale * of.scale);
  if (has_least) total += factors.least * (of.scale * static_cast<float>(of.sum));
}

// A line of a tile. kLevels: in how many caches it is to stay, up to 3; with 0 in none but the first.
template <int kLevels>
FASTGEN_INLINE void ask_for(const uint8_t* line) {
  __builtin_prefetch(line, 0, kLevels);
  if (FASTGEN_VECTORS * FASTGEN_WIDTH * 4 > 64) __builtin_prefetch(line + 64, 0, kLevels);
}

// Four inputs of a word as bytes. `high` has their upper bits lowest, and then those of the next four.
template <int kBits>
FASTGEN_INLINE Bytes four_of(const Bytes& word, int which, Ints& high) {
  const Bytes low = which == 0 ? word & 15 : (Bytes)(((Ints)word >> 4) & 0x0f0f0f0f);
  if (kBits == 4) return low;
  const Bytes found = low | (Bytes)((high << 4) & (kBits == 5 ? 0x10101010 : 0x30303030));
  high >>= kBits - 4;
  return found;
}

// The sums over all inputs, in float32, of the kRows rows of a tile and the outputs from `first` on in a panel.
// With kHasMore the weight may have zeros, minimums or multiples.
template <int kBits, int kRows, bool kHasMore>
FASTGEN_TARGET void tile(const Weight& weight, const Inputs& inputs, int64_t row, int64_t panel, int64_t first,
                         Ahead where, float* sums) {
  constexpr int kVectors = FASTGEN_VECTORS;
  constexpr int64_t kWords = fastgen::low_lines(kBits), kLines = kWords + (kBits % 4 != 0);  // of a set
  const uint8_t* numbers = weight.numbers + panel * weight.panel_bytes + first * 4;
  const uint8_t* ahead = numbers + where.distance;
  const int64_t step = where.step;
  const Group* of = inputs.groups + row * weight.groups;
  const int64_t lines = weight.group_size / 4 * kBits / 8;
  const int8_t* x = inputs.numbers + row * inputs.stride;
  Floats total[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[r][v] = Floats{};
  }
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t at = (panel * weight.groups + group) * kPanel + first;
    Ints sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Ints{} - weight.middle * of[r].sum;
    }
    for (const uint8_t* end = numbers + lines * kLine; numbers != end; numbers += kLines * kLine) {
      Ints high[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        high[v] = kBits % 4 == 0 ? Ints{} : *reinterpret_cast<const Ints*>(numbers + kWords * kLine + v * FASTGEN_WIDTH * 4);
      }
#pragma GCC unroll 2
      for (int64_t line = 0; line < kLines; ++line, ahead += step) {
        if (where.leaves_out_second_level) {
          ask_for<0>(ahead);
        } else {
          ask_for<3>(ahead);
        }
      }
      for (int64_t word = 0; word < kWords; ++word) {
        // The weight's vectors first: then four inputs of a row are repeated once for all of them.
        Bytes bytes[kVectors], some[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          bytes[v] = *reinterpret_cast<const Bytes*>(numbers + word * kLine + v * FASTGEN_WIDTH * 4);
        }
        if (kBits == 8) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r, x += 4) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) FASTGEN_DOT(sum[r][v], bytes[v], x);
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
            for (int v = 0; v < kVectors; ++v) FASTGEN_SMALL_DOT(sum[r][v], some[v], x);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Factors factors;
      if (kHasMore) {
        load_group(factors, weight, at + v * FASTGEN_WIDTH);
      } else {
        load_factors(factors.scale, weight.scales, at + v * FASTGEN_WIDTH, weight.are_half);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const bool has_middle = kHasMore && weight.zeros != nullptr, has_least = kHasMore && weight.has_minimums();
        add_group(total[r][v], sum[r][v], factors, of[r], has_middle, has_least);
      }
    }
    of += kRows;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Floats*>(sums + r * kPanel + first + v * FASTGEN_WIDTH) = total[r][v];
    }
  }
}

template <int kBits, bool kHasMore>
FASTGEN_TARGET void rows_of_tile(const Weight& weight, const Inputs& inputs, int64_t row, int64_t some, int64_t panel,
                                 Ahead where, float* sums) {
  for (int64_t first = 0; first < kPanel; first += FASTGEN_VECTORS * FASTGEN_WIDTH) {
    switch (some) {
#if FASTGEN_ROWS >= 6
      case 6: tile<kBits, 6, kHasMore>(weight, inputs, row, panel, first, where, sums); break;
      case 5: tile<kBits, 5, kHasMore>(weight, inputs, row, panel, first, where, sums); break;
      case 4: tile<kBits, 4, kHasMore>(weight, inputs, row, panel, first, where, sums); break;
#endif
#if FASTGEN_ROWS >= 3
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

// All rows times a panel: `finish(sums, row, some)` takes the sums, kPanel of each of some rows.
template <class Finish>
FASTGEN_TARGET void panel(const Weight& weight, const Inputs& inputs, int64_t rows, int64_t panel,
                          const Finish& finish) {
  alignas(64) float sums[kTileRows * kPanel];
  const Tiles tiles(rows, kTileRows);
  for (int64_t i = 0; i < tiles.count; ++i) {
    const int64_t begin = tiles.begin(i), some = tiles.begin(i + 1) - begin;
    Ahead where = ahead(weight, i, tiles.count);
    const bool has_more = weight.zeros != nullptr || weight.has_minimums() || weight.multiples != nullptr;
    const auto rows_of = has_more ? rows_of_bits<true>(weight.bits) : rows_of_bits<false>(weight.bits);
    rows_of(weight, inputs, begin, some, panel, where, sums);
    finish(sums, begin, some);
  }
}

#undef FASTGEN_INLINE
#undef FASTGEN_TARGET
#undef FASTGEN_WIDTH
#undef FASTGEN_VECTORS
#undef FASTGEN_ROWS
#undef FASTGEN_FLOAT16
#undef FASTGEN_WIDEN
#undef FASTGEN_DOT
#undef FASTGEN_SMALL_DOT
