// Common code of linear operators: y = x @ weight.T + bias, for one weight or several with the same x.
#pragma once

#include "../floats.h"
#include "../operator.h"

namespace fastgen {

using Tensors = std::vector<Tensor>;
using MaybeTensors = std::vector<std::optional<Tensor>>;

// A GEMM in one type: x [rows, inputs], the weight [outputs, inputs], y [rows, outputs]. Strides are in elements, from
// a row to the next one; the bias may be null.
template <class T>
struct Operands {
  const T *x, *weight, *bias;
  T* y;
  int64_t x_stride, weight_stride, rows, inputs, outputs;
};

inline bool are_inputs_adjacent(const Tensor& x) { return x.stride(1) == 1 || x.size(1) == 1; }

inline void check_x(const char* name, const Tensor& x, bool is_of_type) {
  STD_TORCH_CHECK(is_of_type && x.dim() == 2 && x.size(1) > 0 && are_inputs_adjacent(x), name,
                  ": x must be [rows, inputs] of a type that it serves, with the inputs next to each other");
}

inline void check_bias(const char* name, const std::optional<Tensor>& bias, int64_t outputs, bool is_of_type) {
  STD_TORCH_CHECK(!bias || (is_of_type && bias->dim() == 1 && bias->size(0) == outputs && bias->is_contiguous()), name,
                  ": the bias must be [outputs] of a type that it serves");
}

// Checks y [rows, outputs] of the type of x, and the bias, of any floating type.
inline void check_result(const char* name, const Tensor& y, const Tensor& x, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(y.dim() == 2 && y.size(0) == x.size(0) && y.is_contiguous() && y.scalar_type() == x.scalar_type(), name,
                  ": the result must be [rows, outputs] of the type of x");
  check_bias(name, bias, y.size(1), !bias || is_floating(bias->scalar_type()));
}

// Returns the operands of a GEMM in one type; `is_laid_out` checks that the kernel supports the weight's strides.
template <class T>
Operands<T> checked(const char* name, const Tensor& y, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    bool (*is_laid_out)(const Tensor& weight)) {
  const ScalarType type = x.scalar_type();
  check_result(name, y, x, bias);
  STD_TORCH_CHECK(weight.scalar_type() == type && (!bias || bias->scalar_type() == type), name, ": all must be of one type");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == y.size(1) && weight.size(1) == x.size(1) && is_laid_out(weight), name,
                  ": the weight must be [outputs, inputs], with strides that it serves");
  return {numbers_of<const T>(x),
          numbers_of<const T>(weight),
          bias ? numbers_of<const T>(*bias) : nullptr,
          numbers_of<T>(y),
          x.stride(0),
          weight.stride(0),
          x.size(0),
          x.size(1),
          weight.size(0)};
}

// Checks several GEMMs with the same x: the memory of all, and that their numbers agree.
inline void check_batch(const char* name, const Tensors& results, const Tensor& x, const Tensors& weights,
                        const MaybeTensors& biases) {
  Arguments(name).writes(results).reads(x, weights, biases);
  STD_TORCH_CHECK(results.size() == weights.size() && biases.size() == weights.size(), name,
                  ": as many results and biases as weights");
}

// Calls an operator for several weights with one.
template <auto several>
void one_of(Tensor y, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  several({y}, x, {weight}, {bias});
}

// Calls use(i, from, to) for the part of each of several consecutive ranges of these sizes that lies from `begin` to
// `end`.
template <class Use>
void for_each_part(const std::vector<int64_t>& sizes, int64_t begin, int64_t end, const Use& use) {
  int64_t first = 0;
  for (size_t i = 0; i < sizes.size(); first += sizes[i++]) {
    const int64_t from = std::max(begin - first, int64_t{0}), to = std::min(end - first, sizes[i]);
    if (from < to) use(i, from, to);
  }
}

// Rows in tiles of at most `most`, all of nearly the same size.
struct RowTiles {
  int64_t rows, count;

  RowTiles(int64_t rows, int64_t most) : rows(rows), count(quotient(rows, most)) {}
  int64_t begin(int64_t tile) const { return rows * tile / count; }
  int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
};

// ---- elements of the floating types, one by one, as float32

inline float read(const void* from, int64_t at, ScalarType type) {
  if (type == ScalarType::Float) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return type == ScalarType::BFloat16 ? to_float(bits) : float16_to_float(bits);
}

// Reads `count` numbers, `stride` apart, or those that `order` selects.
inline void read_line(const void* from, int64_t at, int64_t count, int64_t stride, const int64_t* order, ScalarType type,
                      float* to) {
  const auto copy = [&](const auto* numbers, const auto& upcast) {
    if (order != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        // The order has been checked. If another thread has changed it since, no other memory is read.
        const int64_t input = order[i];
        const bool is_there = static_cast<uint64_t>(input) < static_cast<uint64_t>(count);
        to[i] = is_there ? upcast(numbers[at + input * stride]) : 0.0f;
      }
    } else if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) to[i] = upcast(numbers[at + i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = upcast(numbers[at + i * stride]);
    }
  };
  if (type == ScalarType::Float) {
    copy(static_cast<const float*>(from), [](float x) { return x; });
  } else if (type == ScalarType::BFloat16) {
    copy(static_cast<const uint16_t*>(from), [](uint16_t x) { return to_float(x); });
  } else {
    copy(static_cast<const uint16_t*>(from), [](uint16_t x) { return float16_to_float(x); });
  }
}

inline void write(void* to, int64_t at, ScalarType type, float number) {
  if (type == ScalarType::Float) {
    static_cast<float*>(to)[at] = number;
  } else {
    static_cast<uint16_t*>(to)[at] = type == ScalarType::BFloat16 ? to_bfloat16(number) : to_float16(number);
  }
}

// GEMVs of this type, each with its own x, whose threads share all outputs together; and a GEMM. `weight_stride` is that
// from an output to the next one or, `by_outputs`, from an input to the next one; the other one is 1.
void gemv_each(const std::vector<Operands<void>>& products, ScalarType type, bool by_outputs);
void gemm(const Operands<void>& product, ScalarType type, bool by_outputs);

// Computes the results of gemv_out for a row and `count` outputs, to the last bit. The arguments must be valid for such
// a GEMV in float32, with contiguous inputs of the weight.
void gemv_of_outputs(const Tensor& x, int64_t row, const Tensor& weight,
                     const std::optional<Tensor>& bias, const int64_t* outputs, int64_t count, float* y);

}  // namespace fastgen
