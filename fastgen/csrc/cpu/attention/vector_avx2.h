// Vectors of 8 floats in AVX2 registers. Included inside a namespace that is compiled for AVX2, FMA and F16C.

using Vector = __m256;
constexpr int64_t kLanes = 8;
// How many rows of queries are held in registers against four keys, and against so many vectors of a value.
constexpr int kScoreRows = 2;
constexpr int kContextRows = 4;
constexpr int kContextVectors = 2;

inline Vector broadcast(float x) { return _mm256_set1_ps(x); }
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline Vector load(const c10::BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Vector load(const c10::Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
// The larger one; y where x is not a number.
inline Vector maximum(Vector x, Vector y) { return _mm256_max_ps(x, y); }
inline float sum(Vector x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(Vector x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// to[i] = sum of the lanes of the i-th argument.
inline void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
  const Vector abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

// 2^n for the integer n = round(x), given x + kRounder.
inline Vector power_of_two(Vector rounded) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(rounded), _mm256_set1_epi32(127)), 23));
}

// Lines of as many floats as a vector has, as many lines, transposed.
inline void transpose(const float* from, int64_t stride, float* to, int64_t to_stride) {
  transpose8(from, stride, to, to_stride);
}
