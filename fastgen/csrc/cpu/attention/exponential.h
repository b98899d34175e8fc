// Included by instruction_sets.h for each instruction set.

// e^x for x <= 0; results below the smallest normal number may be zero. e^x = 2^n e^r with n the integer nearest to
// x / ln 2, and e^r a polynomial whose coefficients minimise the largest relative error, 3e-9, over |r| <= ln 2 / 2.
inline Vector exponential(Vector x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  // 2^-127 is made as zero, which ends the results; NaN passes.
  x = maximum(broadcast(-88.0f), x);
  const Vector rounded = multiply_add(x, broadcast(1.44269504f), broadcast(kRounder));
  const Vector n = rounded - broadcast(kRounder);
  // ln 2 in two parts, of which the first has so few digits that its product with n is exact.
  const Vector r = multiply_add(n, broadcast(-1.42860677e-6f), multiply_add(n, broadcast(-0.693145752f), x));
  Vector tail = broadcast(0.0013814542f);
  tail = multiply_add(tail, r, broadcast(0.0083687454f));
  tail = multiply_add(tail, r, broadcast(0.041668389f));
  tail = multiply_add(tail, r, broadcast(0.16666521f));
  tail = multiply_add(tail, r, broadcast(0.49999994f));
  const Vector one_and_r = r + broadcast(1.0f);
  return multiply_add(tail, r * r, one_and_r) * power_of_two(rounded);
}
