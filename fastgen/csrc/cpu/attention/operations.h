// Attention's vector operations (vectors.h) for one instruction set: kernel.h and texts.h include it once for each.

// Query rows held in registers against four keys, and against this many vectors of a value.
constexpr int kScoreRows = by_width(2, 2, 4), kContextRows = 4, kContextVectors = by_width(2, 2, 4);

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

FASTGEN_INLINE float to_float(float x) { return x; }
FASTGEN_INLINE float to_float(c10::Half x) { return static_cast<float>(x); }
FASTGEN_INLINE float to_float(c10::BFloat16 x) { return static_cast<float>(x); }

FASTGEN_INLINE Vector broadcast(float x) { return x - Vector{}; }
FASTGEN_INLINE Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
FASTGEN_INLINE void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }

// `multiply_add` rounds once if the processor can. `maximum` returns the larger one; y if x is NaN. `store_sums` stores
// the sum of the lanes of the i-th argument in to[i].
#if FASTGEN_WIDTH == 4

template <typename scalar_t>
FASTGEN_INLINE Vector load(const scalar_t* from) {
  return Vector{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
}
FASTGEN_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
FASTGEN_INLINE Vector maximum(Vector x, Vector y) { return x > y ? x : y; }
FASTGEN_INLINE float sum(Vector x) { return (x[0] + x[2]) + (x[1] + x[3]); }
FASTGEN_INLINE float largest(Vector x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}
FASTGEN_INLINE void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
}

#elif FASTGEN_WIDTH == 8

FASTGEN_INLINE Vector load(const c10::Half* from) {
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
FASTGEN_INLINE Vector load(const c10::BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
}
FASTGEN_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
FASTGEN_INLINE Vector maximum(Vector x, Vector y) { return (Vector)_mm256_max_ps((__m256)x, (__m256)y); }
FASTGEN_INLINE float sum(Vector x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
FASTGEN_INLINE float largest(Vector x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
FASTGEN_INLINE void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
  const __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b), cd = _mm256_hadd_ps((__m256)c, (__m256)d);
  const __m256 abcd = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

#else

FASTGEN_INLINE Vector load(const c10::Half* from) {
  return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
FASTGEN_INLINE Vector load(const c10::BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
FASTGEN_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
FASTGEN_INLINE Vector maximum(Vector x, Vector y) { return (Vector)_mm512_max_ps((__m512)x, (__m512)y); }
FASTGEN_INLINE float sum(Vector x) { return _mm512_reduce_add_ps((__m512)x); }
FASTGEN_INLINE float largest(Vector x) { return _mm512_reduce_max_ps((__m512)x); }
// Adds pairs of vectors in the halves of one until each of the four sums has a lane of its own.
FASTGEN_INLINE void store_sums(float* to, Vector first, Vector second, Vector third, Vector fourth) {
  const __m512 a = (__m512)first, b = (__m512)second, c = (__m512)third, d = (__m512)fourth;
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#endif

// e^x for x <= 0; results below the smallest normal number may be zero. e^x = 2^n e^r with n the integer nearest to
// x / ln 2, and e^r a polynomial whose coefficients minimise the largest relative error, 3e-9, over |r| <= ln 2 / 2.
FASTGEN_INLINE Vector exponential(Vector x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  // 2^-127 becomes zero, which bounds the results; NaN passes through.
  x = maximum(broadcast(-88.0f), x);
  const Vector rounded = multiply_add(x, broadcast(1.44269504f), broadcast(kRounder));
  const Vector n = rounded - broadcast(kRounder);
  // ln 2 in two parts, the first with so few digits that its product with n is exact.
  const Vector r = multiply_add(n, broadcast(-1.42860677e-6f), multiply_add(n, broadcast(-0.693145752f), x));
  Vector tail = broadcast(0.0013814542f);
  tail = multiply_add(tail, r, broadcast(0.0083687454f));
  tail = multiply_add(tail, r, broadcast(0.041668389f));
  tail = multiply_add(tail, r, broadcast(0.16666521f));
  tail = multiply_add(tail, r, broadcast(0.49999994f));
  const Vector one_and_r = r + broadcast(1.0f), power = (Vector)(((Bits)rounded + 127u) << 23);
  return multiply_add(tail, r * r, one_and_r) * power;
}
