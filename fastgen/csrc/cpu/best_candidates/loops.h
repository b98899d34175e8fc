// Loops over the scores of a row, for one instruction set. best_candidates.cpp compiles it for each with each_isa.h,
// therefore without an include guard.

// Finds which of some lines of kLine scores are above `limit`, or NaN: a bit for each.
FASTGEN_TARGET void above(const float* scores, int64_t lines, float limit, uint64_t* found) {
  for (int64_t line = 0; line < lines; ++line, scores += kLine) {
    uint64_t bits = 0;
#if FASTGEN_WIDTH == 4
    int32_t any = 0;  // the compiler vectorises this
    for (int64_t j = 0; j < kLine; ++j) any |= !(scores[j] <= limit);
    if (any == 0) {
      found[line] = 0;
      continue;
    }
#endif
    for (int64_t j = 0; j < kLine; j += by_width(1, 8, 16)) {
#if FASTGEN_WIDTH == 16
      const uint64_t some = _mm512_cmp_ps_mask(_mm512_loadu_ps(scores + j), _mm512_set1_ps(limit), _CMP_NLE_UQ);
#elif FASTGEN_WIDTH == 8
      const __m256 is_above = _mm256_cmp_ps(_mm256_loadu_ps(scores + j), _mm256_set1_ps(limit), _CMP_NLE_UQ);
      const uint64_t some = static_cast<uint32_t>(_mm256_movemask_ps(is_above));
#else
      const uint64_t some = !(scores[j] <= limit);
#endif
      bits |= some << j;
    }
    found[line] = bits;
  }
}

// Returns the largest; ignores NaN.
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

// Returns the sum of e to the power of each minus `maximum`.
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
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) load_float16(*reinterpret_cast<Vector*>(to + i), from + i);
  for (; i < size; ++i) to[i] = fastgen::float16_to_float(from[i]);
}

constexpr Loops kLoops = {&above, &largest, &sum_of_exponentials, &widen_bfloat16, &widen_float16};
