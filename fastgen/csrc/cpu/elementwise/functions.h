// Functions of one number in float32, without branches, so that loops of them vectorise.
#pragma once

#include "../floats.h"

#include <cstdint>

namespace fastgen {

// e^x, up to 2 units in the last place: an integer power of 2, times the Taylor series of the rest.
FASTGEN_ALWAYS float exponential(float x) {
  x = x < -105.0f ? -105.0f : x;  // comparisons that let NaN pass
  x = x > 105.0f ? 105.0f : x;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the last bits
  const float shifted = x * 1.44269504f + shift;
  const float whole = shifted - shift;
  // ln 2 in two parts, the first with 9 bits: its product is exact.
  const float left = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float sum = 1.0f / 5040.0f;
  sum = sum * left + 1.0f / 720.0f;
  sum = sum * left + 1.0f / 120.0f;
  sum = sum * left + 1.0f / 24.0f;
  sum = sum * left + 1.0f / 6.0f;
  sum = sum * left + 0.5f;
  sum = sum * left + 1.0f;
  sum = sum * left + 1.0f;
  // In two factors, because the power may exceed the range of one number.
  const int32_t power = static_cast<int32_t>(bits_of(shifted) - bits_of(shift));
  const int32_t half = power >> 1;
  const float first = of_bits(static_cast<uint32_t>(half + 127) << 23);
  return sum * first * of_bits(static_cast<uint32_t>(power - half + 127) << 23);
}

FASTGEN_ALWAYS float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

FASTGEN_ALWAYS float silu(float x) { return x / (1.0f + exponential(-x)); }

FASTGEN_ALWAYS float hyperbolic_tangent(float x) {
  const float size = of_bits(bits_of(x) & 0x7fffffffu);
  const float power = exponential(-2.0f * size);
  const float large = of_bits(bits_of((1.0f - power) / (1.0f + power)) | (bits_of(x) & 0x80000000u));
  // Near zero, where the difference would lose digits: x (1 + x^2 P(x^2)) up to 0.625, P with the least maximum error
  // (4e-9).
  const float square = x * x;
  float sum = -0.005717040362837588f;
  sum = sum * square + 0.020650582724625218f;
  sum = sum * square - 0.05374349653096667f;
  sum = sum * square + 0.13331491265926168f;
  sum = sum * square - 0.3333328392436322f;
  return size < 0.625f ? x * (1.0f + square * sum) : large;
}

// x times the normal distribution's cumulative probability, which is erfc(-x / sqrt(2)) / 2 (Hendrycks and Gimpel,
// "Gaussian Error Linear Units", 2016). erfc(a) = exp(-a^2) t P(t) with t = 1 / (1 + 0.4 a), up to a = 9.8, P with the
// least maximum error (7e-9 of the result).
FASTGEN_ALWAYS float gelu(float x) {
  const float size = of_bits(bits_of(x) & 0x7fffffffu);
  const float t = 1.0f / (1.0f + 0.4f * 0.70710678f * size);
  float sum = -0.02998942199056702f;
  sum = sum * t + 0.20016470335424127f;
  sum = sum * t - 0.5038859023910723f;
  sum = sum * t + 0.5542252059976662f;
  sum = sum * t - 0.2900348075298511f;
  sum = sum * t + 0.27512130657517f;
  sum = sum * t + 0.1286185890533f;
  sum = sum * t + 0.21514763017871133f;
  sum = sum * t + 0.22492436325647047f;
  sum = sum * t + 0.2257083408552169f;
  const float beyond = 0.5f * exponential(-0.5f * size * size) * t * sum;
  const float share = x < 0.0f ? beyond : 1.0f - beyond;
  return x * share;
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as a sigmoid.
FASTGEN_ALWAYS float gelu_tanh(float x) {
  return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

}  // namespace fastgen
