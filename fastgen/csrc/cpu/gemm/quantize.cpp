// Quantises rows and weights to 4 or 8 bits in groups of inputs, for the GEMM of int8.cpp. The schemas are defined in
// fastgen/ops/linear/__init__.py.
//
// Groups of a row and of a weight may be rotated first: both are multiplied with the Hadamard matrix H of the group's
// size n, and the row also by 1 / n. Their product does not change, because H times its transpose is n. A number that
// is larger than the others of its group is spread over all of them, so that the quantisation steps are smaller
// (Ashkboos et al., "QuaRot", 2024).
#include "packed.h"

#include <limits>
#include <utility>

namespace {

using namespace fastgen;

// Adding this rounds to the nearest integer, ties to even.
constexpr float kRounding = 12582912.0f;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct WeightKernels {
  void (*round_line)(const float*, int64_t, int64_t, const float*, int32_t, uint8_t*);
  void (*find_extremes)(const float*, int64_t, int64_t, float*, float*);
};

#define FASTGEN_KERNELS "gemm/quantize_kernels.h"
#include "../each_isa.h"

// A weight [outputs, inputs], output by output in float32, optionally rotated.
class Lines {
 public:
  Lines(const Tensor& weight, int64_t group_size, bool rotated)
      : weight_(weight), size_(group_size), rotated_(rotated) {
    Arguments("group_extremes and round_to_panels").reads(weight);
    STD_TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0 && is_floating(weight.scalar_type()),
                    "the weight must be [outputs, inputs] of a floating type");
    STD_TORCH_CHECK(group_size >= 8 && group_size % 8 == 0 && group_size <= kMaxGroup, "groups of 8 to ", kMaxGroup,
                    " inputs, in eights");
    STD_TORCH_CHECK(!rotated || can_rotate(group_size), "rotated groups have 32, 64 or 128 inputs");
  }

  int64_t groups() const { return quotient(weight_.size(1), size_); }
  int64_t whole() const { return groups() * size_; }
  // Elements of a line: whole groups if they are rotated.
  int64_t numbers() const { return rotated_ ? whole() : weight_.size(1); }

  // Calls use(output, numbers) for each output, in several threads.
  template <class Use>
  void for_each(const Use& use) const {
    const int64_t inputs = weight_.size(1);
    const auto rotate = row_kernels().rotate;
    const int64_t grain = std::max<int64_t>(kGrain / inputs, 1);
    parallel_for(0, weight_.size(0), grain, [&](int64_t begin, int64_t end) {
      // Padded with zeros for the last group.
      std::vector<float> line(whole()), turned(rotated_ ? whole() : 0);
      for (int64_t output = begin; output < end; ++output) {
        read_line(weight_.const_data_ptr(), output * weight_.stride(0), inputs, weight_.stride(1), nullptr,
                  weight_.scalar_type(), line.data());
        if (rotated_) rotate(line.data(), whole(), size_, 1.0f, turned.data());
        use(output, rotated_ ? turned.data() : line.data());
      }
    });
  }

 private:
  const Tensor& weight_;
  const int64_t size_;
  const bool rotated_;
};

// Returns the smallest and the largest number of each group and 0: [2, outputs, groups].
Tensor group_extremes(Tensor weight, int64_t group_size, bool rotated) {
  const Lines lines(weight, group_size, rotated);
  const int64_t outputs = weight.size(0), groups = lines.groups();
  Tensor extremes = torch::stable::new_empty(weight, {2, outputs, groups}, ScalarType::Float);
  float* const least = numbers_of<float>(extremes);
  float* const most = least + outputs * groups;
  const auto kernel = FASTGEN_CHOOSE(kWeightKernels).find_extremes;
  lines.for_each([&](int64_t output, const float* line) {
    kernel(line, lines.numbers(), group_size, least + output * groups, most + output * groups);
  });
  return extremes;
}

// Rounds a weight [outputs, inputs] to multiples of the scales [outputs, groups], and packs it in panels.
Tensor round_to_panels(Tensor weight, Tensor scales, int64_t bits, int64_t group_size, bool rotated) {
  Arguments("round_to_panels").reads(scales);
  STD_TORCH_CHECK(bits == 4 || bits == 8, "round_to_panels: 4 or 8 bits");
  const Lines lines(weight, group_size, rotated);
  const int64_t outputs = weight.size(0), groups = lines.groups();
  STD_TORCH_CHECK(scales.dim() == 2 && scales.size(0) == outputs && scales.size(1) == groups &&
                      scales.scalar_type() == ScalarType::Float && scales.is_contiguous(),
                  "round_to_panels: the scales must be [outputs, groups] of float32");
  const int64_t panels = quotient(outputs, kPanel), height = lines.whole() / 4 * bits / 8;
  Tensor numbers = torch::stable::new_zeros(weight, {panels, height, kPanel, 4}, ScalarType::Byte);
  uint8_t* const to = numbers_of<uint8_t>(numbers);
  const float* scale = numbers_of<const float>(scales);
  const auto kernel = FASTGEN_CHOOSE(kWeightKernels).round_line;
  lines.for_each([&](int64_t output, const float* values) {
    thread_local std::vector<uint8_t> line;
    line.assign(lines.whole(), 0);
    kernel(values, lines.numbers(), group_size, scale + output * groups, 1 << (bits - 1), line.data());
    uint8_t* of = to + output / kPanel * height * kPanel * 4 + output % kPanel * 4;
    for (int64_t four = 0; four < lines.whole() / 4; ++four) {
      for (int64_t i = 0; i < 4; ++i) {
        if (bits == 8) {
          of[four * kPanel * 4 + i] = line[four * 4 + i];
        } else {
          of[four / 2 * kPanel * 4 + i] |= static_cast<uint8_t>(line[four * 4 + i] << (four % 2 * 4));
        }
      }
    }
  });
  return numbers;
}

}  // namespace

fastgen::RowKernels fastgen::row_kernels() { return FASTGEN_CHOOSE(kRowKernels); }

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("group_extremes", TORCH_BOX(&group_extremes));
  library.impl("round_to_panels", TORCH_BOX(&round_to_panels));
}
