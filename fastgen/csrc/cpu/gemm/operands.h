// What linear operators have in common: y = x @ weight.T + bias, of one weight or of several with the same x.
#pragma once

#include "../checks.h"
#include "../parallel.h"
#include "../plan.h"
#include "formats.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <optional>
#include <vector>

namespace fastgen {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensors = std::vector<std::optional<Tensor>>;

// One product of numbers of a type: x [rows, inputs], the weight [outputs, inputs], y [rows, outputs]. Strides are in numbers,
// from a row to the next one; the bias may be null.
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

// y [rows, outputs] of the type of x, and the bias, of any floating type.
inline void check_result(const char* name, const Tensor& y, const Tensor& x, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(y.dim() == 2 && y.size(0) == x.size(0) && y.is_contiguous() && y.scalar_type() == x.scalar_type(), name,
                  ": the result must be [rows, outputs] of the type of x");
  check_bias(name, bias, y.size(1), !bias || is_floating(bias->scalar_type()));
}

// The operands of a product in one type, with a weight of which `is_laid_out` says that the kernel takes its strides.
template <class T>
Operands<T> checked(const char* name, const Tensor& y, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    bool (*is_laid_out)(const Tensor& weight)) {
  const ScalarType type = x.scalar_type();
  check_result(name, y, x, bias);
  STD_TORCH_CHECK(weight.scalar_type() == type && (!bias || bias->scalar_type() == type), name, ": all must be of one type");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == y.size(1) && weight.size(1) == x.size(1) && is_laid_out(weight), name,
                  ": the weight must be [outputs, inputs], with strides that it serves");
  return {static_cast<const T*>(x.const_data_ptr()),
          static_cast<const T*>(weight.const_data_ptr()),
          bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
          static_cast<T*>(y.mutable_data_ptr()),
          x.stride(0),
          weight.stride(0),
          x.size(0),
          x.size(1),
          weight.size(0)};
}

// Of several products with the same x: the memory of all, and that there are as many of each.
inline void check_batch(const char* name, const Tensors& results, const Tensor& x, const Tensors& weights,
                        const MaybeTensors& biases) {
  Arguments(name).writes(results).reads(x, weights, biases);
  STD_TORCH_CHECK(results.size() == weights.size() && biases.size() == weights.size(), name,
                  ": as many results and biases as weights");
}

// The form for one weight of an operator for several.
template <auto several>
void one_of(Tensor y, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  several({y}, x, {weight}, {bias});
}

// What of each of several ranges of these sizes, one behind the other, lies from `begin` to `end`: use(i, from, to).
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

// Memory that begins with a cache line: a vector that lies in two of them takes twice as long to load. It is not filled.
template <class T>
class Aligned {
 public:
  explicit Aligned(int64_t count) : first_(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)))) {}
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { ::operator delete(first_, std::align_val_t(64)); }
  T* data() const { return first_; }

 private:
  T* first_;
};

}  // namespace fastgen
