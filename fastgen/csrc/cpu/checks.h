// What every operator checks before it follows a pointer, whoever calls it and with what: that each tensor is in the memory
// of the CPU, that its storage reaches as far as its sizes and strides say, that its numbers are aligned, and that nothing
// is written where something else is read or written. Shapes and types are the operator's own matter.
//
// Indices that a tensor holds are checked where they are used, because another thread may have changed them meanwhile.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fastgen {

using torch::stable::Tensor;

// a / b rounded up, for sizes: b is above zero.
inline int64_t quotient(int64_t a, int64_t b) { return a / b + (a % b > 0); }

// The product of sizes; an error where it is beyond int64.
template <class... Sizes>
int64_t product_of(const char* name, Sizes... sizes) {
  int64_t product = 1;
  bool overflows = false;
  for (const int64_t size : {static_cast<int64_t>(sizes)...}) {
#ifdef __GNUC__
    overflows = __builtin_mul_overflow(product, size, &product) || overflows;
#else
    overflows = overflows || (size > 0 && product > INT64_MAX / size);
    product = overflows ? 0 : product * size;
#endif
  }
  STD_TORCH_CHECK(!overflows, name, ": sizes whose product is beyond int64");
  return product;
}

// a + b and a - b; the largest or the smallest int64 where they are beyond it.
inline int64_t sum_of(int64_t a, int64_t b) {
  if (b > 0 && a > INT64_MAX - b) return INT64_MAX;
  if (b < 0 && a < INT64_MIN - b) return INT64_MIN;
  return a + b;
}
inline int64_t difference_of(int64_t a, int64_t b) {
  if (b < 0 && a > INT64_MAX + b) return INT64_MAX;
  if (b > 0 && a < INT64_MIN + b) return INT64_MIN;
  return a - b;
}

// The bytes from a tensor's first number up to its last one.
struct Extent {
  uintptr_t begin = 0, end = 0;
  bool has_gaps = false;  // there may be memory of others between its numbers

  // Numbers of two tensors with gaps may lie between each other's, as K and V of one buffer do.
  bool meets(const Extent& other) const {
    return begin < other.end && other.begin < end && !(has_gaps && other.has_gaps);
  }
};

// The memory of the arguments of one call: first those that are written, then those that are read.
class Arguments {
 public:
  explicit Arguments(const char* name) : name_(name) {}

  template <class... Tensors>
  Arguments& writes(const Tensors&... tensors) {
    (each(tensors, [this](const Tensor& x) { add(x, true); }), ...);
    return *this;
  }

  // Of a tensor whose numbers the operator itself knows not to share memory.
  Arguments& writes_distinct(const Tensor& x) {
    add(x, false);
    return *this;
  }

  template <class... Tensors>
  Arguments& reads(const Tensors&... tensors) {
    (each(tensors, [this](const Tensor& x) { check(extent_of(x)); }), ...);
    return *this;
  }

  // What may be written in place: a tensor that begins where a written one does, and is as long.
  Arguments& reads_in_place(const Tensor& x) {
    const Extent extent = extent_of(x);
    for (const Extent& other : written_) {
      if (extent.begin == other.begin && extent.end == other.end && !extent.has_gaps) return *this;
    }
    check(extent);
    return *this;
  }

  // From the first number of a tensor up to the last one. Nothing, if it has none.
  Extent extent_of(const Tensor& x) const {
    STD_TORCH_CHECK(x.is_cpu(), name_, ": all tensors must be on the CPU");
    const int64_t dims = x.dim(), *sizes = x.sizes().data(), *strides = x.strides().data();
    const int64_t itemsize = static_cast<int64_t>(x.element_size());
    int64_t last = 0, numbers = 1;  // torch has made sure that neither overflows
    for (int64_t dim = 0; dim < dims; ++dim) {
      if (sizes[dim] == 0) return {};
      last += (sizes[dim] - 1) * strides[dim];
      numbers *= sizes[dim];
    }
    int64_t stored = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &stored));
    STD_TORCH_CHECK(last < stored / itemsize - x.storage_offset(), name_,
                    ": a tensor whose storage is smaller than its sizes say");
    const uintptr_t begin = reinterpret_cast<uintptr_t>(x.const_data_ptr());
    STD_TORCH_CHECK(begin % (itemsize < 8 ? itemsize : 8) == 0, name_, ": a tensor whose numbers are not aligned");
    return {begin, begin + static_cast<uintptr_t>((last + 1) * itemsize), last + 1 > numbers};
  }

 private:
  template <class Use>
  static void each(const Tensor& x, const Use& use) {
    use(x);
  }
  template <class Use>
  static void each(const std::optional<Tensor>& x, const Use& use) {
    if (x) use(*x);
  }
  template <class One, class Use>
  static void each(const std::vector<One>& tensors, const Use& use) {
    for (const One& x : tensors) each(x, use);
  }

  void add(const Tensor& x, bool must_be_distinct) {
    const Extent extent = extent_of(x);
    STD_TORCH_CHECK(!must_be_distinct || extent.begin == extent.end || is_distinct(x), name_,
                    ": numbers of a tensor that is written share memory (an expanded tensor?); pass a copy");
    check(extent);
    written_.push_back(extent);
  }

  void check(const Extent& extent) const {
    for (const Extent& other : written_) {
      STD_TORCH_CHECK(!extent.meets(other), name_,
                      ": what is written shares memory with another argument; pass a copy");
    }
  }

  // Whether each number has a place of its own: by their strides, each dimension goes beyond the ones before it.
  static bool is_distinct(const Tensor& x) {
    if (x.is_contiguous()) return true;
    const int64_t dims = x.dim(), *sizes = x.sizes().data(), *strides = x.strides().data();
    int64_t last = 0;  // number of the dimensions so far
    const auto comes_before = [&](int64_t a, int64_t b) { return strides[a] != strides[b] ? strides[a] < strides[b] : a < b; };
    for (int64_t before = -1, found = 0;; before = found) {
      found = -1;
      for (int64_t dim = 0; dim < dims; ++dim) {
        if (sizes[dim] == 1 || (before >= 0 && !comes_before(before, dim))) continue;
        if (found < 0 || comes_before(dim, found)) found = dim;
      }
      if (found < 0) return true;
      if (strides[found] <= last) return false;
      last += (sizes[found] - 1) * strides[found];
    }
  }

  const char* name_;
  std::vector<Extent> written_;
};

}  // namespace fastgen
