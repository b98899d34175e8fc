// Loops over the scores of a row, for one instruction set: included once for each, inside a namespace, with
// FASTGEN_TARGET and FASTGEN_FLOAT16 defined. Each of them becomes vectors. No include guard.

// Whether one of some scores, a multiple of kLine, is above `limit`, or is not a number.
FASTGEN_TARGET bool any_above(const float* scores, int64_t size, float limit) {
  int32_t lanes[kLine] = {};
  for (int64_t i = 0; i < size; i += kLine) {
    for (int64_t j = 0; j < kLine; ++j) lanes[j] |= !(scores[i + j] <= limit);
  }
  int32_t found = 0;
  for (const int32_t each : lanes) found |= each;
  return found != 0;
}

// The largest; what is not a number does not count.
FASTGEN_TARGET float largest(const float* scores, int64_t size) {
  float lanes[kLine];
  for (float& each : lanes) each = -kInfinity;
  int64_t i = 0;
  for (; i + kLine <= size; i += kLine) {
    for (int64_t j = 0; j < kLine; ++j) lanes[j] = scores[i + j] > lanes[j] ? scores[i + j] : lanes[j];
  }
  for (int64_t j = 0; i + j < size; ++j) lanes[j] = scores[i + j] > lanes[j] ? scores[i + j] : lanes[j];
  float found = -kInfinity;
  for (const float each : lanes) found = each > found ? each : found;
  return found;
}

// The sum of e to the power of each minus `maximum`.
FASTGEN_TARGET float sum_of_exponentials(const float* scores, int64_t size, float maximum) {
  float lanes[kLine] = {};
  int64_t i = 0;
  for (; i + kLine <= size; i += kLine) {
    for (int64_t j = 0; j < kLine; ++j) lanes[j] += fastgen::exponential(scores[i + j] - maximum);
  }
  for (int64_t j = 0; i + j < size; ++j) lanes[j] += fastgen::exponential(scores[i + j] - maximum);
  float sum = 0.0f;
  for (const float each : lanes) sum += each;
  return sum;
}

FASTGEN_TARGET void widen_bfloat16(float* to, const uint16_t* from, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = fastgen::of_bits(static_cast<uint32_t>(from[i]) << 16);
}

FASTGEN_TARGET void widen_float16(float* to, const uint16_t* from, int64_t size) {
  struct Numbers {
    float of[16];
  };
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) FASTGEN_FLOAT16<16>::load(*reinterpret_cast<Numbers*>(to + i), from + i);
  for (; i < size; ++i) to[i] = fastgen::float16_to_float(from[i]);
}
