// Casts float32 to 16 bits, if no number changes. The schema is defined in fastgen/ops/linear/__init__.py.
#include "../floats.h"
#include "../operator.h"

#include <atomic>

namespace {

using namespace fastgen;

// Both return whether all numbers are unchanged, bit by bit. Without branches, so that the loops vectorise.
bool cast_to_bfloat16(const float* from, int64_t count, uint16_t* to) {
  uint32_t lost = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(from[i]);
    to[i] = static_cast<uint16_t>(bits >> 16);
    lost |= bits & 0xffffu;
  }
  return lost == 0;
}

bool cast_to_float16(const float* from, int64_t count, uint16_t* to) {
  uint32_t lost = 0;
  for (int64_t i = 0; i < count; ++i) {
    to[i] = to_float16(from[i]);
    lost |= bits_of(float16_to_float(to[i])) ^ bits_of(from[i]);
  }
  return lost == 0;
}

// Casts the numbers of x to `out` until one would change; returns whether none did.
bool exact_cast_out(Tensor out, Tensor x) {
  Arguments("narrow").writes(out).reads(x);
  const ScalarType type = out.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "narrow: the result must be of bfloat16 or float16");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous() && out.is_contiguous() &&
                      x.numel() == out.numel(),
                  "narrow: the numbers must be of float32, as many as the results, all next to each other");
  constexpr int64_t kPart = 1 << 15;
  const int64_t count = x.numel(), parts = quotient(count, kPart);
  const float* from = numbers_of<const float>(x);
  uint16_t* to = numbers_of<uint16_t>(out);
  const auto narrow = type == ScalarType::BFloat16 ? cast_to_bfloat16 : cast_to_float16;
  std::atomic<bool> is_same{true};
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kPart; i < std::min(end * kPart, count) && is_same; i += kPart) {
      if (!narrow(from + i, std::min(kPart, count - i), to + i)) is_same = false;
    }
  });
  return is_same;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("exact_cast_out", TORCH_BOX(&exact_cast_out)); }
