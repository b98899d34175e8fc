// Vectors of 4 floats on any machine: what 128-bit registers hold (SSE, NEON, VSX), through the compiler's own vector
// type where it has one, and as an array that it may vectorise otherwise. Included inside a namespace.

constexpr int64_t kLanes = 4;
#if defined(__GNUC__)
typedef float Vector __attribute__((vector_size(16)));
#else
struct Vector {
  float lanes[4];
  float& operator[](int64_t i) { return lanes[i]; }
  float operator[](int64_t i) const { return lanes[i]; }
};
inline Vector operator+(Vector x, Vector y) { return {x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]}; }
inline Vector operator-(Vector x, Vector y) { return {x[0] - y[0], x[1] - y[1], x[2] - y[2], x[3] - y[3]}; }
inline Vector operator*(Vector x, Vector y) { return {x[0] * y[0], x[1] * y[1], x[2] * y[2], x[3] * y[3]}; }
#endif
// How many rows of queries are held in registers against four keys, and against so many vectors of a value.
constexpr int kScoreRows = 2;
constexpr int kContextRows = 4;
constexpr int kContextVectors = 2;

inline Vector broadcast(float x) { return Vector{x, x, x, x}; }
template <typename scalar_t>
inline Vector load(const scalar_t* from) {
  return Vector{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
}
inline Vector load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
// The larger one; y where x is not a number.
inline Vector maximum(Vector x, Vector y) {
  return Vector{x[0] > y[0] ? x[0] : y[0], x[1] > y[1] ? x[1] : y[1], x[2] > y[2] ? x[2] : y[2],
                x[3] > y[3] ? x[3] : y[3]};
}
inline float sum(Vector x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float largest(Vector x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}

// to[i] = sum of the lanes of the i-th argument.
inline void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
}

// 2^n for the integer n = round(x), given x + kRounder.
inline Vector power_of_two(Vector rounded) {
  uint32_t bits[4];
  std::memcpy(bits, &rounded, sizeof bits);
  for (uint32_t& b : bits) b = (b + 127) << 23;
  Vector x;
  std::memcpy(&x, bits, sizeof x);
  return x;
}

// Lines of as many floats as a vector has, as many lines, transposed.
inline void transpose(const float* from, int64_t stride, float* to, int64_t to_stride) {
  transpose4(from, stride, to, to_stride);
}
