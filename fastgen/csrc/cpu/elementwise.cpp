// Runs several elementwise operators and norms in one call, for tensors so small that launching an operator takes
// longer than its computation, and some for tensors of any size. The schema is defined in fastgen/ops/elementwise.py.
#include "elementwise/functions.h"
#include "elementwise/lines.h"
#include "floats.h"
#include "isa.h"
#include "operator.h"

#include <array>
#include <cmath>

namespace {

using namespace fastgen;

#define FASTGEN_KERNELS "elementwise/loops.h"
#define FASTGEN_LOOPS
#include "each_isa.h"

}  // namespace

fastgen::Line fastgen::line_of(int64_t kind) { return FASTGEN_CHOOSE(line_of(kind)); }

namespace {

// The result and three operands: their memory and strides.
constexpr int64_t kMaxDims = 8, kTensors = 4;
struct Operand {
  char* data;
  int64_t type;
  std::array<int64_t, kMaxDims> strides;
};
using Operands = std::array<Operand, kTensors>;

// One operator, as a line of the code: the kind, the number of dimensions, their sizes, the options; then for the
// result and each operand the piece of memory (-1: none), the type, the byte offset of its first element, and the
// strides in elements. A result may be one of several that are `stride` elements apart: an int64 in memory selects it.
// If that is not in 0 to count - 1, nothing is written.
struct Instruction {
  int64_t kind, dims;
  std::array<int64_t, kMaxDims> sizes;
  double numbers[2];
  int64_t rounds_scaled;
  struct {
    int64_t memory, begin, stride, count;
  } position;
  struct {
    int64_t memory, type, begin;
    std::array<int64_t, kMaxDims> strides;
  } operands[kTensors];
};
// Keeps products of a size, a stride and an element size from overflowing.
constexpr int64_t kLargest = int64_t{1} << 28;
constexpr int64_t kLength = sizeof(Instruction) / sizeof(int64_t);

struct Sizes {
  int64_t dims = 0;
  std::array<int64_t, kMaxDims> of{};
};

int64_t bytes_of(int64_t type) {
  switch (type) {
    case kBytes1: return 1;
    case kBFloat16: case kFloat16: return 2;
    case kBytes8: return 8;
    default: return 4;
  }
}

bool is_norm(int64_t kind) { return kind == kRmsNorm || kind == kLayerNorm; }

// Drops dimensions of one, and merges those that can be traversed as one; but keeps the rows of norms.
Sizes merged(Operands& operands, const Instruction& instruction) {
  Sizes sizes;
  const int64_t rows = is_norm(instruction.kind) ? instruction.dims - 1 : instruction.dims;
  for (int64_t dim = 0; dim < instruction.dims; ++dim) {
    const int64_t size = instruction.sizes[dim], last = sizes.dims - 1;
    if (size == 1 && dim < rows) continue;
    bool joins = sizes.dims > 0 && dim < rows;
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

// From this many elements on, several threads share the work.
constexpr int64_t kForThreads = 1 << 15;

// The last dimension is a line, the one before it counts lines, and outer loops traverse the others.
void execute(const Operands& operands, const Sizes& sizes, const Options& options, Line line, int64_t dim,
             std::array<int64_t, kTensors> offsets) {
  if (dim + 2 < sizes.dims) {
    for (int64_t i = 0; i < sizes.of[dim]; ++i) {
      execute(operands, sizes, options, line, dim + 1, offsets);
      for (int n = 0; n < kTensors; ++n) offsets[n] += operands[n].strides[dim];
    }
    return;
  }
  const int64_t last = sizes.dims - 1;
  Piece pieces[kTensors];
  int64_t apart[kTensors];
  for (int n = 0; n < kTensors; ++n) {
    const Operand& each = operands[n];
    const int64_t bytes = bytes_of(each.type);
    pieces[n] = {each.data ? each.data + offsets[n] * bytes : nullptr, each.type, each.strides[last]};
    apart[n] = each.strides[dim] * bytes;
  }
  line(pieces, apart, dim < last ? sizes.of[dim] : 1, sizes.of[last], options);
}

// The same, with a part of the first dimension for each thread, if there is enough work.
void execute_in_parts(const Operands& operands, const Sizes& sizes, const Options& options, Line line, bool is_norm) {
  int64_t numbers = 1;
  for (int64_t dim = 0; dim < sizes.dims; ++dim) numbers *= sizes.of[dim];
  if (numbers < kForThreads || (is_norm && sizes.dims == 1)) return execute(operands, sizes, options, line, 0, {});
  const int64_t grain = std::max(kForThreads / (numbers / sizes.of[0]), int64_t{1});
  parallel_for(0, sizes.of[0], grain, [&](int64_t begin, int64_t end) {
    Sizes part = sizes;
    part.of[0] = end - begin;
    std::array<int64_t, kTensors> offsets;
    for (int n = 0; n < kTensors; ++n) offsets[n] = begin * operands[n].strides[0];
    execute(operands, part, options, line, 0, offsets);
  });
}

struct Memory {
  char* data;
  int64_t size;
};

void check(const Instruction& instruction) {
  const int64_t kind = instruction.kind, type = instruction.operands[0].type;
  const bool copies = kind == kCopy && type >= 0 && type < kTypes && type == instruction.operands[1].type;
  bool fits = kind >= 0 && kind < kKinds && instruction.dims >= (is_norm(kind) ? 1 : 0) && instruction.dims <= kMaxDims;
  int64_t numbers = 1;
  for (int64_t dim = 0; fits && dim < instruction.dims; ++dim) {
    const int64_t size = instruction.sizes[dim];
    fits = size > 0 && size <= kLargest / numbers;
    if (fits) numbers *= size;
  }
  fits = fits && instruction.operands[0].memory >= 0 && instruction.operands[1].memory >= 0;
  for (const auto& each : instruction.operands) {
    const bool has_numbers = each.type >= 0 && each.type <= kFloat16;
    fits = fits && (each.memory < 0 || has_numbers || (copies && each.type == type));
  }
  STD_TORCH_CHECK(fits, "elementwise: no instruction");
}

// Returns the address of the int64 that selects one of several results.
const char* position(const Instruction& instruction, const std::vector<Memory>& memory) {
  const auto& given = instruction.position;
  const bool fits = given.memory >= 0 && given.memory < static_cast<int64_t>(memory.size()) && given.begin >= 0 &&
                    given.begin <= memory[given.memory].size - static_cast<int64_t>(sizeof(int64_t)) &&
                    given.stride >= 0 && given.stride <= kLargest && given.count > 0 && given.count <= kLargest;
  STD_TORCH_CHECK(fits, "elementwise: no position");
  return memory[given.memory].data + given.begin;
}

// Returns an operand, after checking that all of it is inside its memory.
Operand operand(const Instruction& instruction, int n, const std::vector<Memory>& memory) {
  const auto& given = instruction.operands[n];
  if (given.memory == -1) return {nullptr, kFloat32, {}};
  const int64_t itemsize = bytes_of(given.type);
  bool fits = given.memory >= 0 && given.memory < static_cast<int64_t>(memory.size()) && given.begin >= 0 &&
              given.begin <= memory[given.memory].size;
  int64_t end = fits ? given.begin + itemsize : 0;
  const auto& several = instruction.position;
  if (n == 0 && several.memory >= 0) end += (several.count - 1) * several.stride * itemsize;
  for (int64_t dim = 0; fits && dim < instruction.dims; ++dim) {
    fits = given.strides[dim] >= 0 && instruction.sizes[dim] <= kLargest && given.strides[dim] <= kLargest;
    if (fits) end += (instruction.sizes[dim] - 1) * given.strides[dim] * itemsize;
  }
  STD_TORCH_CHECK(fits && end <= memory[given.memory].size, "elementwise: an operand is outside of its memory");
  char* const data = memory[given.memory].data + given.begin;
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % itemsize == 0, "elementwise: an operand is not aligned");
  return {data, given.type, given.strides};
}

// The instructions of a code, and the pieces of memory that they use.
struct Code {
  std::vector<Memory> memory;
  const Instruction* instructions;
  int64_t count;

  Code(const std::vector<Tensor>& tensors, const Tensor& code) {
    // Results and operands share this memory. All instructions are read before any is executed.
    Arguments("elementwise").reads(tensors, code);
    STD_TORCH_CHECK(code.dim() == 2 && code.size(1) == kLength && code.scalar_type() == ScalarType::Long &&
                        code.is_contiguous(),
                    "elementwise: the code must be [instructions, ", kLength, "] of int64");
    instructions = numbers_of<const Instruction>(code), count = code.size(0);
    for (const Tensor& tensor : tensors) {
      STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Byte && tensor.is_contiguous(),
                      "elementwise: memory must be bytes next to each other");
      memory.push_back({numbers_of<char>(tensor), tensor.numel()});
    }
  }
};

// An instruction, ready to be executed.
struct Step {
  Operands operands;
  Sizes sizes;
  Options options;
  Line line;
  int64_t is_norm;
  // Address of the int64 that selects one of `count` results, `bytes` bytes apart; null if there is one.
  const char* position;
  int64_t bytes, count;
};

Step step(const Instruction& instruction, const std::vector<Memory>& memory) {
  check(instruction);
  Step made{};
  const auto& several = instruction.position;
  if (several.memory != -1) made.position = position(instruction, memory);  // also checks what operands rely on
  for (int n = 0; n < kTensors; ++n) made.operands[n] = operand(instruction, n, memory);
  if (several.memory != -1) {
    made.bytes = several.stride * bytes_of(made.operands[0].type), made.count = several.count;
  }
  made.sizes = merged(made.operands, instruction);
  made.options = {{instruction.numbers[0], instruction.numbers[1]}, instruction.rounds_scaled != 0};
  made.line = line_of(instruction.kind), made.is_norm = is_norm(instruction.kind);
  return made;
}

void run(const Step& step) {
  int64_t at = 0;
  if (step.position != nullptr) {
    std::memcpy(&at, step.position, sizeof(at));
    if (at < 0 || at >= step.count) return;
  }
  if (at == 0) return execute_in_parts(step.operands, step.sizes, step.options, step.line, step.is_norm);
  Operands operands = step.operands;
  operands[0].data += at * step.bytes;
  execute_in_parts(operands, step.sizes, step.options, step.line, step.is_norm);
}

std::vector<Step> steps_of(const Code& code) {
  std::vector<Step> steps;
  for (int64_t i = 0; i < code.count; ++i) steps.push_back(step(code.instructions[i], code.memory));
  return steps;
}

bool has_moved(const std::vector<Tensor>& tensors, const std::vector<Memory>& memory) {
  size_t i = 0;
  return std::any_of(tensors.begin(), tensors.end(), [&](const Tensor& each) {
    const Memory& known = memory[i++];
    return each.const_data_ptr() != known.data || each.numel() != known.size;
  });
}

void elementwise(std::vector<Tensor> tensors, Tensor given) {
  Code code(tensors, given);
  std::vector<Step> steps = steps_of(code);
  if (!plan_is_open()) {
    for (const Step& each : steps) run(each);
    return;
  }
  // Resolves addresses once, and again after memory has moved, for example to be shared by processes.
  add_to_plan([tensors, given, memory = code.memory, steps]() mutable {
    if (has_moved(tensors, memory)) {
      const Code now(tensors, given);
      memory = now.memory, steps = steps_of(now);
    }
    for (const Step& each : steps) run(each);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("elementwise", TORCH_BOX(&elementwise)); }
