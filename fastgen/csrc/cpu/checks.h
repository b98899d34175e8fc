// Checks that every operator makes before it follows a pointer, for any caller and arguments: each tensor is in CPU
// memory, its storage is as large as its sizes and strides say, its elements are aligned, and no written memory
// overlaps other read or written memory. The operator itself checks shapes and types.
//
// Indices in a tensor are checked where they are used, because another thread may have changed them meanwhile.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

namespace fastgen {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_floating(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

template <class T>
constexpr ScalarType type_of() {
  if (std::is_same_v<T, float>) return ScalarType::Float;
  if (std::is_same_v<T, int64_t>) return ScalarType::Long;
  if (std::is_same_v<T, int32_t>) return ScalarType::Int;
  return std::is_same_v<T, bool> ? ScalarType::Bool : ScalarType::Byte;
}

// Returns whether a tensor has this type and shape, and is contiguous.
inline bool is_like(const Tensor& x, ScalarType type, std::initializer_list<int64_t> sizes) {
  bool fits = x.scalar_type() == type && x.dim() == static_cast<int64_t>(sizes.size()) && x.is_contiguous();
  int64_t dim = 0;
  for (const int64_t size : sizes) fits = fits && x.size(dim++) == size;
  return fits;
}

// Returns the data of a tensor whose type has been checked: constant to read, otherwise to write.
template <class T>
T* numbers_of(const Tensor& x) {
  if constexpr (std::is_const_v<T>) return static_cast<T*>(x.const_data_ptr());
  else return static_cast<T*>(x.mutable_data_ptr());
}

// Returns the data of a tensor of this type and shape; otherwise raises an error with this message.
template <class T, class... Message>
T* checked(const Tensor& x, std::initializer_list<int64_t> sizes, const Message&... message) {
  STD_TORCH_CHECK(is_like(x, type_of<std::remove_const_t<T>>(), sizes), message...);
  return numbers_of<T>(x);
}

// An int64 for each row, or one for all of them.
struct OfRows {
  const int64_t* data;
  int64_t stride;

  static bool fits(const Tensor& x, int64_t rows) {
    return x.scalar_type() == ScalarType::Long && (x.numel() == 1 || (x.dim() == 1 && x.size(0) == rows));
  }
  explicit OfRows(const Tensor& x) : data(numbers_of<const int64_t>(x)), stride(x.numel() == 1 ? 0 : x.stride(0)) {}
  int64_t operator[](int64_t row) const { return data[row * stride]; }
};

// Returns which of `stored` rows each of `rows` refers to: a copy, because the used values must be the checked ones.
inline std::vector<int64_t> row_map_of(const char* name, const Tensor& row_map, int64_t rows, int64_t stored) {
  const auto* first = checked<const int64_t>(row_map, {rows}, name, ": the row map must be int64, [", rows, "]");
  std::vector<int64_t> found(first, first + rows);
  for (const int64_t row : found) {
    STD_TORCH_CHECK(row >= 0 && row < stored, name, ": the row map names row ", row, " of ", stored);
  }
  return found;
}

// a / b rounded up, for sizes: b is above zero.
inline int64_t quotient(int64_t a, int64_t b) { return a / b + (a % b > 0); }

// Returns the product of sizes; an error if it exceeds int64.
template <class... Sizes>
int64_t product_of(const char* name, Sizes... sizes) {
  int64_t product = 1;
  bool overflows = false;
  for (const int64_t size : {static_cast<int64_t>(sizes)...}) {
    overflows = __builtin_mul_overflow(product, size, &product) || overflows;
  }
  STD_TORCH_CHECK(!overflows, name, ": sizes whose product is beyond int64");
  return product;
}

// a + b and a - b, saturated to the range of int64.
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

// The bytes from a tensor's first element to its last.
struct Extent {
  uintptr_t begin, end;
  // For a tensor with gaps: its elements form runs of this many bytes, a multiple of `period` apart. Without gaps, both
  // 0.
  uintptr_t run, period;

  bool meets(const Extent& other) const {
    return begin < other.end && other.begin < end && !(period != 0 && other.period != 0 && is_between(other));
  }

 private:
  // Returns whether the runs of two tensors interleave without overlap, as those of K and V in one buffer do.
  bool is_between(const Extent& other) const {
    const uintptr_t common = std::gcd(period, other.period);
    const uintptr_t behind = (other.begin % common + common - begin % common) % common;
    return behind >= run && behind + other.run <= common;
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

  // For a tensor whose elements the operator itself knows not to overlap.
  Arguments& writes_distinct(const Tensor& x) {
    add(x, false);
    return *this;
  }

  template <class... Tensors>
  Arguments& reads(const Tensors&... tensors) {
    (each(tensors, [this](const Tensor& x) { check(extent_of(x)); }), ...);
    return *this;
  }

  // For a tensor that may be written in place: it begins where a written one does, and has the same length.
  Arguments& reads_in_place(const Tensor& x) {
    const Extent extent = extent_of(x);
    if (extent.period != 0 || !any_written([&](const Extent& other) {
          return extent.begin == other.begin && extent.end == other.end;
        })) {
      check(extent);
    }
    return *this;
  }

  // Returns the bytes from a tensor's first element to its last; none if it is empty.
  Extent extent_of(const Tensor& x) const {
    // A command list of a step has hundreds of operators: each of these calls counts.
    static const int32_t cpu = aoti_torch_device_type_cpu();
    int32_t device = 0, type = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device));
    STD_TORCH_CHECK(device == cpu, name_, ": all tensors must be on the CPU");
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &type));
    const int64_t itemsize = static_cast<int64_t>(aoti_torch_dtype_element_size(type)), numbers = x.numel();
    if (numbers == 0) return {0, 0, 0, 0};
    const Places places = x.is_contiguous() ? Places{numbers - 1, numbers, 0} : places_of(x);
    const int64_t last = places.last;
    int64_t stored = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &stored));
    STD_TORCH_CHECK(last < stored / itemsize - x.storage_offset(), name_,
                    ": a tensor whose storage is smaller than its sizes say");
    const uintptr_t begin = reinterpret_cast<uintptr_t>(x.const_data_ptr());
    STD_TORCH_CHECK(begin % (itemsize < 8 ? itemsize : 8) == 0, name_, ": a tensor whose numbers are not aligned");
    const auto bytes = [itemsize](int64_t numbers) { return static_cast<uintptr_t>(numbers * itemsize); };
    const bool has_gaps = places.run <= last && places.period != 0;
    return {begin, begin + bytes(last + 1), has_gaps ? bytes(places.run) : 0, has_gaps ? bytes(places.period) : 0};
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
    if (count_ < kFew) few_[count_] = extent;
    else more_.push_back(extent);
    ++count_;
  }

  void check(const Extent& extent) const {
    STD_TORCH_CHECK(!any_written([&](const Extent& other) { return extent.meets(other); }), name_,
                    ": what is written shares memory with another argument; pass a copy");
  }

  template <class Is>
  bool any_written(const Is& is) const {
    for (size_t i = 0; i < count_; ++i) {
      if (is(i < kFew ? few_[i] : more_[i - kFew])) return true;
    }
    return false;
  }

  // In elements: the position of the last one, the length of a contiguous run, and the divisor of the other distances.
  struct Places {
    int64_t last, run, period;
  };

  // Torch has made sure that the last position fits an int64.
  static Places places_of(const Tensor& x) {
    const int64_t *sizes = x.sizes().data(), *strides = x.strides().data();
    Places found{0, 1, 0};
    for (int64_t dim = x.dim() - 1; dim >= 0; --dim) {
      if (sizes[dim] == 1) continue;
      found.last += (sizes[dim] - 1) * strides[dim];
      if (strides[dim] == found.run) found.run *= sizes[dim];
      else found.period = std::gcd(found.period, strides[dim]);
    }
    return found;
  }

  // Returns whether no elements overlap: sorted by stride, each dimension steps beyond all earlier ones.
  static bool is_distinct(const Tensor& x) {
    if (x.is_contiguous()) return true;
    const int64_t dims = x.dim(), *sizes = x.sizes().data(), *strides = x.strides().data();
    int64_t last = 0;  // last position of the dimensions so far
    const auto comes_before = [&](int64_t a, int64_t b) {
      return strides[a] != strides[b] ? strides[a] < strides[b] : a < b;
    };
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

  // Avoids an allocation: few operators write more.
  static constexpr size_t kFew = 16;
  const char* name_;
  size_t count_ = 0;
  Extent few_[kFew];
  std::vector<Extent> more_;
};

}  // namespace fastgen
