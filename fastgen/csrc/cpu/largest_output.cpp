// The largest output of a linear layer for each row, from estimates of all outputs. The schemas are defined in
// fastgen/ops/approximate_logits.py, which explains why the result is exact.
//
// The estimates come from an 8-bit copy of the weight. Each has a bounded error, or is -inf for an output that does not
// count. The output with the largest estimate is computed from the weight itself; then so are all whose estimates, with
// their bounds, reach it. Whole blocks of outputs are examined first.
#include "gemm/packed.h"
#include "top_two/block.h"

#include <atomic>
#include <cmath>

namespace {

using namespace fastgen;

// Whether a second output of a row is about as large as the largest (fastgen/ops/search_step.py).
struct Near {
  bool* is_near;  // of each row; null if not requested
  float masked, share;
};

// Outputs of a block, and the fraction of all outputs (1 / kMost) beyond which all are computed.
constexpr int64_t kBlock = 256, kMost = 8;
// Outputs that pay for waking another thread.
constexpr int64_t kGrain = 64;

struct Layer {
  const Tensor &x, &weight;
  const std::optional<Tensor>& bias;
  const float *lengths, *errors;  // [outputs] each: the norm of a weight row, and that of its error
  int64_t outputs, group_size;
  float rounding;  // relative rounding error of a result
};

// The norm of a row of x, and of its quantisation error.
struct Row {
  float length, error;
};

Row measure(const Layer& layer, int64_t row) {
  const int64_t inputs = layer.x.size(1), groups = quotient(inputs, layer.group_size);
  const int64_t whole = groups * layer.group_size;
  std::vector<float> line(whole), turned(whole);
  std::vector<int8_t> numbers(whole);
  std::vector<Group> scales(groups);
  std::copy_n(numbers_of<const float>(layer.x) + row * layer.x.stride(0), inputs, line.data());
  const RowKernels kernels = row_kernels();
  // As for the estimates. The product of a group and its Hadamard matrix is longer by the square root of its size.
  const float size = static_cast<float>(layer.group_size);
  kernels.rotate(line.data(), whole, layer.group_size, 1.0f / size, turned.data());
  kernels.quantize(turned.data(), whole, layer.group_size, 1, numbers.data(), scales.data());
  double squares = 0.0, errors = 0.0;
  for (int64_t i = 0; i < whole; ++i) {
    const double number = turned[i], error = number - double{scales[i / layer.group_size].scale} * numbers[i];
    squares += number * number, errors += error * error;
  }
  return {static_cast<float>(std::sqrt(squares * size)), static_cast<float>(std::sqrt(errors * size))};
}

// The largest difference between an estimate and the result.
float bound(const Layer& layer, const Row& row, float estimate, float length, float error) {
  return row.length * error + row.error * length + layer.rounding * std::fabs(estimate);
}

// Returns the index of the largest, the first of equal ones; NaN is larger than any number.
size_t place_of_largest(const std::vector<float>& results) {
  size_t found = 0;
  for (size_t i = 1; i < results.size() && results[found] == results[found]; ++i) {
    if (results[i] != results[i] || results[i] > results[found]) found = i;
  }
  return found;
}

// Returns whether another one reaches the largest less `margin`. Nothing is near NaN.
bool has_second(const std::vector<float>& results, size_t largest, float margin) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (i != largest && results[i] >= results[largest] - margin) return true;
  }
  return false;
}

// Returns the largest output of a row, from the estimates of all. Adds the number of computed outputs to `count`.
int64_t largest(const Layer& layer, int64_t row, const float* estimates, LookAt look, const Near& near,
                std::atomic<int64_t>& count) {
  const int64_t outputs = layer.outputs, blocks = quotient(outputs, kBlock);
  const Row of = measure(layer, row);
  std::vector<float> best(blocks);
  bool is_known = std::isfinite(of.length);
  int64_t best_block = 0;
  float size = 0.0f;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * kBlock;
    const Block found = look(estimates + begin, std::min(kBlock, outputs - begin), near.masked);
    best[block] = found.best, size = std::max(size, found.size);
    is_known = is_known && !found.has_nan;
    if (best[block] > best[best_block]) best_block = block;
  }
  std::vector<int64_t> chosen;
  std::vector<float> results(1);
  const float margin = near.is_near == nullptr ? 0.0f : near.share * size;
  int64_t first = 0;
  if (is_known) {
    const float* begin = estimates + best_block * kBlock;
    const float* end = estimates + std::min((best_block + 1) * kBlock, outputs);
    first = std::min<int64_t>(std::find(begin, end, best[best_block]) - estimates, outputs - 1);
    gemv_of_outputs(layer.x, row, layer.weight, layer.bias, &first, 1, results.data());
    const float *lengths = layer.lengths, *errors = layer.errors;
    const float *most_lengths = lengths + outputs, *most_errors = errors + outputs;  // of the blocks
    // Also true for NaN, so that such outputs are computed.
    const auto reaches = [&](float estimate, float length, float error) {
      return estimate != -kInfinity && !(estimate + bound(layer, of, estimate, length, error) < results[0] - margin);
    };
    for (int64_t block = 0; block < blocks; ++block) {
      if (!reaches(best[block], most_lengths[block], most_errors[block])) continue;
      for (int64_t i = block * kBlock; i < std::min((block + 1) * kBlock, outputs); ++i) {
        if (reaches(estimates[i], lengths[i], errors[i])) chosen.push_back(i);
      }
    }
  }
  if (!is_known || static_cast<int64_t>(chosen.size()) > outputs / kMost) {
    chosen.clear();
    for (int64_t i = 0; i < outputs; ++i) {
      if (estimates[i] != -kInfinity) chosen.push_back(i);
    }
  }
  if (near.is_near != nullptr) near.is_near[row] = false;
  // No output counts, or a single one whose estimate has changed meanwhile.
  if (chosen.empty()) return first;
  results.resize(chosen.size());
  const auto compute = [&](int64_t begin, int64_t end) {
    gemv_of_outputs(layer.x, row, layer.weight, layer.bias, chosen.data() + begin, end - begin, &results[begin]);
  };
  const int64_t some = chosen.size();
  if (layer.x.size(0) == 1) {  // the threads are otherwise idle
    parallel_for(0, some, kGrain, compute);
  } else {
    compute(0, some);
  }
  count += some;
  const size_t found = place_of_largest(results);
  if (near.is_near != nullptr) near.is_near[row] = has_second(results, found, margin);
  return chosen[found];
}

void check(const Layer& layer) {
  const ScalarType type = layer.x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float && layer.weight.scalar_type() == type &&
                      (!layer.bias || is_like(*layer.bias, type, {layer.outputs})),
                  "largest_output: x, weight and bias must be of float32, the bias [outputs]");
  STD_TORCH_CHECK(layer.x.size(1) == layer.weight.size(1) && layer.x.size(1) > 0 && layer.outputs > 0 &&
                      are_inputs_adjacent(layer.x) && are_inputs_adjacent(layer.weight),
                  "largest_output: x must be [rows, inputs] and the weight [outputs, inputs], with the inputs next to each "
                  "other");
  STD_TORCH_CHECK(can_rotate(layer.group_size), "largest_output: groups have 32, 64 or 128 inputs");
}

int64_t largest_output_out(Tensor out, std::optional<Tensor> is_near, Tensor estimates, Tensor x, Tensor weight,
                           std::optional<Tensor> bias, Tensor sizes, int64_t group_size, double rounding, double masked,
                           double share) {
  Arguments("largest_output").writes(out, is_near).reads(estimates, x, weight, bias, sizes);
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, "largest_output: x must be [rows, inputs], the weight a matrix");
  const int64_t rows = x.size(0), outputs = weight.size(0), of_each = outputs + quotient(outputs, kBlock);
  int64_t* found = checked<int64_t>(out, {rows}, "largest_output: the result must be [rows] of int64");
  const float* given =
      checked<const float>(estimates, {rows, outputs}, "largest_output: the estimates must be [rows, outputs] of float32");
  const float* lengths =
      checked<const float>(sizes, {2, of_each}, "largest_output: the sizes must be [2, outputs and blocks] of float32");
  bool* near = is_near ? checked<bool>(*is_near, {rows}, "largest_output: is_near must be [rows] of bool") : nullptr;
  const Layer layer{x, weight, bias, lengths, lengths + of_each, outputs, group_size, static_cast<float>(rounding)};
  check(layer);
  const Near asked{near, static_cast<float>(masked), static_cast<float>(share)};
  const LookAt look = look_at();
  std::atomic<int64_t> count{0};
  const auto of_rows = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      found[row] = largest(layer, row, given + row * outputs, look, asked, count);
    }
  };
  if (rows == 1) of_rows(0, 1);  // its threads share its outputs
  else parallel_for(0, rows, 1, of_rows);
  return count;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("largest_output_out", TORCH_BOX(&largest_output_out));
}
