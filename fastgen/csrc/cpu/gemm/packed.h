// Packed weights as the kernels use them: checked, with their addresses and operands.
#pragma once

#include "../isa.h"
#include "operands.h"

namespace fastgen {

constexpr int64_t kPanel = 32;     // outputs of a panel of a weight in groups
constexpr int64_t kMaxGroup = 256;  // inputs that share a scale
// A line of a panel: a word of four bytes for each of its outputs.
constexpr int64_t kLine = kPanel * 4;

// Returns whether a quantised value may have this many bits.
constexpr bool are_bits(int64_t bits) { return bits == 4 || bits == 5 || bits == 6 || bits == 8; }

// Lines form sets. With 8 bits, a line is a set: a word has four inputs. With 4 bits too: a word has eight, the first
// four in the lower nibbles of its bytes. With 5 and 6 bits, some such lines of the lower four bits are followed by one
// of the upper bits: in each byte, those of the first four inputs are lowest.
constexpr int64_t low_lines(int64_t bits) { return bits == 5 ? 4 : bits == 6 ? 2 : 1; }
constexpr int64_t set_inputs(int64_t bits) { return bits == 8 ? 4 : 8 * low_lines(bits); }
constexpr int64_t set_bytes(int64_t bits) { return set_inputs(bits) * kPanel * bits / 8; }

// Returns the quantised value of an input; `words` is its output's word in the first line of the panel.
inline int value_of(const uint8_t* words, int64_t bits, int64_t input) {
  const int64_t in_set = input % set_inputs(bits), four = in_set / 4, byte = in_set % 4;
  const uint8_t* set = words + input / set_inputs(bits) * set_bytes(bits) + byte;
  if (bits == 8) return set[0];
  const int low = set[four / 2 * kLine] >> (four % 2 * 4) & 15;
  if (bits == 4) return low;
  const int high = set[low_lines(bits) * kLine] >> (four * (bits - 4)) & ((1 << (bits - 4)) - 1);
  return low | high << 4;
}

// Super-block scales, and optionally mins: bytes times a float16 number for each block, which consists of consecutive
// groups. In a panel, a block has the numbers of its scales, those of its mins, and then the bytes of each group in
// that order. Without mins, a byte stands for itself less `kSignedZero`.
constexpr int kSignedZero = 128;
struct BlockLayout {
  int64_t groups;
  bool has_mins;

  int64_t unit_bytes() const { return (has_mins ? 2 : 1) * 2 * kPanel; }
  int64_t group_bytes() const { return (has_mins ? 2 : 1) * kPanel; }
  int64_t bytes() const { return unit_bytes() + groups * group_bytes(); }
};
// The layouts of GGUF: Q4_K and Q5_K, Q2_K, and Q3_K and Q6_K. Their sizes distinguish them.
constexpr BlockLayout kBlockLayouts[] = {{8, true}, {16, true}, {16, false}};

inline BlockLayout block_layout(int64_t bytes) {
  for (const BlockLayout& each : kBlockLayouts) {
    if (each.bytes() == bytes) return each;
  }
  return {1, false};
}

// A weight in panels: of 16 bits, with `is_half` as its type, or quantised in groups.
struct Weight {
  const uint8_t *qweight, *zeros;
  const void *scales, *mins;      // float16 or float32
  const uint8_t* block_scales;    // super-block scales in place of these; else null
  BlockLayout block;              // of these
  bool is_half;                   // float16: a weight of 16 bits, or scales and mins
  int32_t zero_point;             // the value of 0, if neither zeros nor mins are given
  int64_t bits, group_size, groups, panel_bytes;

  bool has_mins() const { return block_scales != nullptr ? block.has_mins : mins != nullptr; }
};

// The addresses of an output's super-block scales, of which there are kPanel for each group of each panel.
struct BlockScale {
  const uint16_t* unit;  // of the scale; that of the min is kPanel elements later
  const uint8_t* scale;  // likewise
};

inline BlockScale block_scale(const Weight& weight, int64_t at) {
  const uint64_t group = static_cast<uint64_t>(at) / kPanel, lane = static_cast<uint64_t>(at) % kPanel;
  const int shift = weight.block.groups == 8 ? 3 : 4;
  const uint8_t* block = weight.block_scales + (group >> shift) * weight.block.bytes();
  const uint64_t in_block = group & (weight.block.groups - 1);
  return {reinterpret_cast<const uint16_t*>(block) + lane,
          block + weight.block.unit_bytes() + in_block * weight.block.group_bytes() + lane};
}

// Rows of a floating type as given: [rows, inputs], with contiguous inputs; `order`, if not null, selects input i.
struct Rows {
  const void* data;
  const int64_t* order;
  ScalarType type;
  int64_t rows, inputs, stride;

  Rows(const Tensor& x, const int64_t* order)
      : data(x.const_data_ptr()),
        order(order),
        type(x.scalar_type()),
        rows(x.size(0)),
        inputs(x.size(1)),
        stride(x.stride(0)) {}
};

// The destination of a result, [rows, outputs], and the bias, which may be null.
struct Target {
  void* data;
  const void* bias;
  ScalarType type, bias_type;
  int64_t outputs;

  Target(const Tensor& y, const std::optional<Tensor>& bias)
      : data(y.mutable_data_ptr()),
        bias(bias ? bias->const_data_ptr() : nullptr),
        type(y.scalar_type()),
        bias_type(bias ? bias->scalar_type() : ScalarType::Float),
        outputs(y.size(1)) {}

  // Loads the bias of kCount outputs, from `first` on: zeros after the last output, and without a bias.
  template <int64_t kCount>
  void load_bias(int64_t first, float* to) const {
    const int64_t there = bias == nullptr ? 0 : std::clamp<int64_t>(outputs - first, 0, kCount);
    if (there == kCount && bias_type == ScalarType::Float) {
      std::memcpy(to, static_cast<const float*>(bias) + first, kCount * sizeof(float));
      return;
    }
    for (int64_t i = 0; i < kCount; ++i) to[i] = i < there ? read(bias, first + i, bias_type) : 0.0f;
  }

  // Stores kCount outputs of some rows, from `first` on, as far as they exist: the sums of consecutive rows are
  // `stride` apart. With kBias adds the bias.
  template <int64_t kCount, bool kBias>
  void store(int64_t first, const float* sums, int64_t stride, int64_t row, int64_t rows) const {
    const int64_t there = std::min(kCount, outputs - first);
    float added[kCount];
    if (kBias) load_bias<kCount>(first, added);
    for (int64_t r = 0; r < rows; ++r, sums += stride) {
      const int64_t at = (row + r) * outputs + first;
      float* line = static_cast<float*>(data) + at;
      if (type != ScalarType::Float) {
        for (int64_t i = 0; i < there; ++i) write(data, at + i, type, kBias ? sums[i] + added[i] : sums[i]);
      } else if (there == kCount) {  // a compile-time constant
        for (int64_t i = 0; i < kCount; ++i) line[i] = kBias ? sums[i] + added[i] : sums[i];
      } else {
        for (int64_t i = 0; i < there; ++i) line[i] = kBias ? sums[i] + added[i] : sums[i];
      }
    }
  }
};

// A GEMM with a packed weight, both checked. GEMMs that are computed together have the same x.
struct Product {
  Weight weight;
  Target target;
};

// With float activations (panels.cpp), and with activations that are quantised to 8 bits (int8.cpp).
void multiply_floats(const Rows& x, const std::vector<Product>& products);
void multiply_int8(const Rows& x, bool rotated, const std::vector<Product>& products);

// ---- activations that are quantised to 8 bits in groups of inputs

// Elements to quantise that pay for waking another thread.
constexpr int64_t kGrain = 1 << 15;

// The scale of the bytes in a group of a row, and their sum.
struct Group {
  float scale;
  int32_t sum;
};

// The functions for this processor.
struct RowKernels {
  // Quantises a row of `inputs` numbers to signed bytes, group by group. It is one of `some` interleaved rows: four
  // bytes of each, then the next four.
  void (*quantize)(const float* x, int64_t inputs, int64_t group_size, int64_t some, int8_t* to, Group* groups);
  // Multiplies whole groups, `count` numbers, by the Hadamard matrix of their size and a factor.
  void (*rotate)(const float* x, int64_t count, int64_t group_size, float factor, float* to);
  // `rotate` with 1 / group_size followed by `quantize`, with the same results. `memory` has room for as many numbers.
  void (*rotate_and_quantize)(const float* x, int64_t count, int64_t group_size, int64_t some, int8_t* to, Group* groups,
                              float* memory);
};
RowKernels row_kernels();

// Returns whether groups of this size can be rotated.
inline bool can_rotate(int64_t group_size) { return group_size == 32 || group_size == 64 || group_size == 128; }

}  // namespace fastgen
