// Several elementwise operators in one call, for tensors so small that starting an operator takes longer than computing
// it. The schema is defined in fastgen/ops/elementwise.py. Each gives the bits that torch's operator gives.
#include "bfloat16.h"
#include "instruction_set.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <cstdint>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// As in fastgen/ops/elementwise.py.
enum Kind : int64_t { kCopy, kNegate, kAdd, kSubtract, kMultiply, kKinds };

// The result, and the two operands: where they begin, and how far apart their numbers are.
constexpr int64_t kMaxDims = 8;
struct Operand {
  void* data;
  std::array<int64_t, kMaxDims> strides;
};
using Operands = std::array<Operand, 3>;

// One operator, as a line of the code: the kind, the bytes of a number, how many dimensions, their sizes; then of the
// result and of each operand the piece of memory, where in it the first number is, and the strides, in numbers.
struct Instruction {
  int64_t kind, itemsize, dims;
  std::array<int64_t, kMaxDims> sizes;
  struct {
    int64_t memory, begin;
    std::array<int64_t, kMaxDims> strides;
  } operands[3];
};
// So that no product of a size, a stride and the bytes of a number overflows.
constexpr int64_t kLargest = int64_t{1} << 28;
constexpr int64_t kLength = sizeof(Instruction) / sizeof(int64_t);

struct Sizes {
  int64_t dims = 0;
  std::array<int64_t, kMaxDims> of{};
};

using Run = void (*)(const Operands&, const Sizes&, int64_t, std::array<int64_t, 3>);

namespace portable {
#define FASTGEN_TARGET
#include "elementwise/loops.h"
}  // namespace portable

#ifdef FASTGEN_X86
namespace avx2 {
#define FASTGEN_TARGET __attribute__((target("avx2")))
#include "elementwise/loops.h"
}  // namespace avx2

namespace avx512 {
#ifdef __clang__
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#include "elementwise/loops.h"
}  // namespace avx512
#endif

Run run_of(const Instruction& instruction) {
#ifdef FASTGEN_X86
  switch (fastgen::instruction_set()) {
    case fastgen::InstructionSet::kAvx512: return avx512::run_of(instruction.kind, instruction.itemsize);
    case fastgen::InstructionSet::kAvx2: return avx2::run_of(instruction.kind, instruction.itemsize);
    case fastgen::InstructionSet::kPortable: break;
  }
#endif
  return portable::run_of(instruction.kind, instruction.itemsize);
}

// Dimensions of one are left out, and those that can be gone through as one become one.
Sizes merged(Operands& operands, const Instruction& instruction) {
  Sizes sizes;
  for (int64_t dim = 0; dim < instruction.dims; ++dim) {
    const int64_t size = instruction.sizes[dim], last = sizes.dims - 1;
    if (size == 1) continue;
    bool joins = sizes.dims > 0;
    for (const Operand& each : operands) joins = joins && each.strides[last] == each.strides[dim] * size;
    const int64_t to = joins ? last : sizes.dims++;
    sizes.of[to] = joins ? sizes.of[to] * size : size;
    for (Operand& each : operands) each.strides[to] = each.strides[dim];
  }
  if (sizes.dims == 0) {
    sizes.of[sizes.dims++] = 1;
    for (Operand& each : operands) each.strides[0] = 1;
  }
  return sizes;
}

struct Memory {
  char* data;
  int64_t size;
};

void check(const Instruction& instruction) {
  bool fits = instruction.kind >= 0 && instruction.kind < kKinds && instruction.dims >= 0 &&
              instruction.dims <= kMaxDims && (instruction.itemsize == 4 || instruction.itemsize == 2);
  for (int64_t dim = 0; fits && dim < instruction.dims; ++dim) fits = instruction.sizes[dim] > 0;
  STD_TORCH_CHECK(fits, "elementwise: no instruction");
}

// Where an operand begins, if all of it is inside of its memory.
Operand operand(const Instruction& instruction, int n, const std::vector<Memory>& memory) {
  const auto& given = instruction.operands[n];
  bool fits = given.memory >= 0 && given.memory < static_cast<int64_t>(memory.size()) && given.begin >= 0 &&
              given.begin <= memory[given.memory].size;
  int64_t end = fits ? given.begin + instruction.itemsize : 0;
  for (int64_t dim = 0; fits && dim < instruction.dims; ++dim) {
    fits = given.strides[dim] >= 0 && instruction.sizes[dim] <= kLargest && given.strides[dim] <= kLargest;
    if (fits) end += (instruction.sizes[dim] - 1) * given.strides[dim] * instruction.itemsize;
  }
  STD_TORCH_CHECK(fits && end <= memory[given.memory].size && given.begin % instruction.itemsize == 0,
                  "elementwise: an operand is outside of its memory");
  return {memory[given.memory].data + given.begin, given.strides};
}

void elementwise(std::vector<Tensor> tensors, Tensor code) {
  STD_TORCH_CHECK(code.dim() == 2 && code.size(1) == kLength && code.scalar_type() == ScalarType::Long &&
                      code.is_contiguous(),
                  "elementwise: the code must be [instructions, ", kLength, "] of int64");
  std::vector<Memory> memory;
  for (const Tensor& tensor : tensors) {
    STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Byte && tensor.is_contiguous(),
                    "elementwise: memory must be bytes next to each other");
    memory.push_back({static_cast<char*>(tensor.mutable_data_ptr()), tensor.numel()});
  }
  const Instruction* instructions = static_cast<const Instruction*>(code.const_data_ptr());
  for (int64_t i = 0; i < code.size(0); ++i) {
    const Instruction& instruction = instructions[i];
    check(instruction);
    Operands operands{operand(instruction, 0, memory), operand(instruction, 1, memory), operand(instruction, 2, memory)};
    const Sizes sizes = merged(operands, instruction);
    run_of(instruction)(operands, sizes, 0, {});
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("elementwise", TORCH_BOX(&elementwise)); }
