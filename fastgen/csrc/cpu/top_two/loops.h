// Summarises a block of scores, for one instruction set. top_two.cpp compiles it for each with each_isa.h, therefore
// without an include guard.

// Returns the block's largest score, its largest magnitude below `masked`, and whether it has NaN, which counts for
// neither.
FASTGEN_TARGET Block look_at(const float* scores, int64_t count, float masked) {
  const Vector limit = Vector{} + masked;
  Vector best = Vector{} - kInfinity, size = Vector{};
  Ints nans = {};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Vector x = *reinterpret_cast<const Vector*>(scores + i);
    const Vector sizes = (Vector)((Ints)x & 0x7fffffff);
    best = x > best ? x : best;
    size = (sizes < limit) & (sizes > size) ? sizes : size;
    nans |= x != x;
  }
  Block found{-kInfinity, 0.0f, false};
  for (int64_t lane = 0; lane < kWidth; ++lane) {
    found.best = std::max(found.best, best[lane]);
    found.size = std::max(found.size, size[lane]);
    found.has_nan |= nans[lane] != 0;
  }
  for (; i < count; ++i) {
    const float x = scores[i], magnitude = std::fabs(x);
    if (x > found.best) found.best = x;
    if (magnitude < masked && magnitude > found.size) found.size = magnitude;
    found.has_nan |= x != x;
  }
  return found;
}
