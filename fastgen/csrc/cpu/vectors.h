// Vectors of FASTGEN_WIDTH elements and their operations, for one instruction set. each_isa.h includes it, and
// documents the macros. No include guard: it is meant to be included several times.

constexpr int64_t kWidth = FASTGEN_WIDTH;

typedef float Vector __attribute__((vector_size(FASTGEN_WIDTH * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(FASTGEN_WIDTH * 4), aligned(4), may_alias));
// Two 16-bit elements in each lane.
typedef uint32_t Bits __attribute__((vector_size(FASTGEN_WIDTH * 4), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(FASTGEN_WIDTH * 4), aligned(1), may_alias));
typedef uint16_t FewWords __attribute__((vector_size(FASTGEN_WIDTH * 2), aligned(2), may_alias));
typedef uint8_t FewBytes __attribute__((vector_size(FASTGEN_WIDTH), aligned(1), may_alias));

// A constant tuned to the registers, for each vector width.
template <class Number>
constexpr Number by_width(Number of_4, Number of_8, Number of_16) {
  return FASTGEN_WIDTH == 4 ? of_4 : FASTGEN_WIDTH == 8 ? of_8 : of_16;
}

#if FASTGEN_WIDTH == 4

FASTGEN_INLINE void load_float16(Vector& to, const uint16_t* from) {
  float numbers[4];
  for (int i = 0; i < 4; ++i) numbers[i] = fastgen::float16_to_float(from[i]);
  std::memcpy(&to, numbers, sizeof(numbers));
}

// Transposes kWidth rows of kWidth elements.
FASTGEN_INLINE void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  fastgen::transpose4(from, from_stride, to, to_stride);
}

FASTGEN_INLINE Vector load_bytes(const uint8_t* from) {
  return __builtin_convertvector(*reinterpret_cast<const FewBytes*>(from), Vector);
}

// Byte i of each lane.
FASTGEN_INLINE Bits byte_of(Bits bits, int i) {
  return bits >> (8 * i) & 255u;
}

// Four floats, repeated; and element i of such a vector, repeated.
FASTGEN_INLINE Vector repeat4(const float* from) { return *reinterpret_cast<const Vector*>(from); }
template <int i>
FASTGEN_INLINE Vector one_of4(Vector fours) {
  return fours[i] - Vector{};
}

#elif FASTGEN_WIDTH == 8

FASTGEN_INLINE void load_float16(Vector& to, const uint16_t* from) {
  const __m256 numbers = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  std::memcpy(&to, &numbers, sizeof(numbers));
}

FASTGEN_INLINE void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  fastgen::transpose8(from, from_stride, to, to_stride);
}

FASTGEN_INLINE Vector load_bytes(const uint8_t* from) {
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

FASTGEN_INLINE Bits byte_of(Bits bits, int i) {
  if (i == 0) return (Bits)_mm256_and_si256((__m256i)bits, _mm256_set1_epi32(255));
  if (i == 3) return (Bits)_mm256_srli_epi32((__m256i)bits, 24);
  const int64_t low = fastgen::lanes_of_byte(i), high = fastgen::upper_lanes_of_byte(i);
  return (Bits)_mm256_shuffle_epi8((__m256i)bits, _mm256_set_epi64x(high, low, high, low));
}

FASTGEN_INLINE Vector repeat4(const float* from) {
  return (Vector)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
}
template <int i>
FASTGEN_INLINE Vector one_of4(Vector fours) {
  return (Vector)_mm256_permute_ps((__m256)fours, i * 0x55);
}

#else

FASTGEN_INLINE void load_float16(Vector& to, const uint16_t* from) {
  const __m512 numbers = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  std::memcpy(&to, &numbers, sizeof(numbers));
}

FASTGEN_INLINE void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  fastgen::transpose16(from, from_stride, to, to_stride);
}

FASTGEN_INLINE Vector load_bytes(const uint8_t* from) {
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

FASTGEN_INLINE Bits byte_of(Bits bits, int i) {
  if (i == 0) return (Bits)_mm512_and_si512((__m512i)bits, _mm512_set1_epi32(255));
  if (i == 3) return (Bits)_mm512_srli_epi32((__m512i)bits, 24);
  const int64_t low = fastgen::lanes_of_byte(i), high = fastgen::upper_lanes_of_byte(i);
  return (Bits)_mm512_shuffle_epi8((__m512i)bits, _mm512_set4_epi64(high, low, high, low));
}

FASTGEN_INLINE Vector repeat4(const float* from) { return (Vector)_mm512_broadcast_f32x4(_mm_loadu_ps(from)); }
template <int i>
FASTGEN_INLINE Vector one_of4(Vector fours) {
  return (Vector)_mm512_permute_ps((__m512)fours, i * 0x55);
}

#endif
