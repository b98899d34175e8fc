// Vectors of 16 floats in AVX-512 registers. Included inside a namespace that is compiled for AVX-512.

using Vector = __m512;
constexpr int64_t kLanes = 16;
// How many rows of queries are held in registers against four keys, and against so many vectors of a value.
constexpr int kScoreRows = 4;
constexpr int kContextRows = 4;
constexpr int kContextVectors = 4;

inline Vector broadcast(float x) { return _mm512_set1_ps(x); }
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline Vector load(const c10::BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vector load(const c10::Half* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
// The larger one; y where x is not a number.
inline Vector maximum(Vector x, Vector y) { return _mm512_max_ps(x, y); }
inline float sum(Vector x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vector x) { return _mm512_reduce_max_ps(x); }

// to[i] = sum of the lanes of the i-th argument: pairs of vectors are added in the halves of one until each of the
// four sums has a lane of its own.
inline void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vector cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Vector abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

// 2^n for the integer n = round(x), given x + kRounder.
inline Vector power_of_two(Vector rounded) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(rounded), _mm512_set1_epi32(127)), 23));
}

// Lines of as many floats as a vector has, as many lines, transposed.
inline void transpose(const float* from, int64_t stride, float* to, int64_t to_stride) {
  transpose16(from, stride, to, to_stride);
}
