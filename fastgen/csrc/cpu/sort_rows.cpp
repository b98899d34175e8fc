// Sorts the rows of a matrix of float32, on the CPU. The schema is defined in fastgen/ops/search_step.py.
//
// A radix sort of the bits, least significant digit first (Knuth, "The Art of Computer Programming", volume 3, section
// 5.2.5): it has no comparisons, and is stable. If top-k sampling has left a few scores and set the others to -inf,
// only those few are sorted.
#include "floats.h"
#include "operator.h"

#include <array>
#include <limits>
#include <memory>

namespace {

using namespace fastgen;

// Three digits of 11 bits are 32 bits and one more.
constexpr int kDigits = 3, kBits = 11;
constexpr uint32_t kValues = 1u << kBits;
constexpr uint32_t kSign = 1u << 31, kInfinity = 0x7f800000u;
// The key of -inf, the smallest: the keys below it would be those of negative NaN, which gets another key.
constexpr uint32_t kLeast = ~(kSign | kInfinity);

// Bits in the order of the numbers: 0 and -0 are equal, and NaN is above everything, as for torch.sort.
uint32_t key_of(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & ~kSign;
  if (magnitude > kInfinity) return ~0u;
  if (magnitude == 0) return kSign;
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// A key and its column.
struct Item {
  uint32_t key, column;
};

class Sorter {
 public:
  explicit Sorter(int64_t width) : items_(new Item[width]), others_(new Item[width]) {}

  void sort(const float* row, int64_t width, float* values, int64_t* columns) {
    const int64_t least = take(row, width, columns), count = width - least;
    for (int digit = 0; digit < kDigits; ++digit) {
      if (place_of_digit(digit, count)) items_.swap(others_);
    }
    for (int64_t at = 0; at < count; ++at) columns[least + at] = items_[at].column;
    std::fill_n(values, least, -std::numeric_limits<float>::infinity());
    for (int64_t at = 0; at < count; ++at) values[least + at] = row[items_[at].column];
  }

 private:
  // Counts digits, and puts the items other than -inf into `items_`. Another thread may write to the row meanwhile, so
  // that keys are computed only once. Returns the number of -inf, and writes their columns.
  int64_t take(const float* row, int64_t width, int64_t* columns) {
    for (auto& each : counts_) each.fill(0);
    int64_t least = 0, count = 0;
    for (int64_t column = 0; column < width; ++column) {
      const uint32_t key = key_of(row[column]);
      if (key == kLeast) {
        columns[least++] = column;
        continue;
      }
      items_[count++] = {key, static_cast<uint32_t>(column)};
      for (int digit = 0; digit < kDigits; ++digit) ++counts_[digit][value_of(key, digit)];
    }
    return least;
  }

  // Sorts the items into `others_` by a digit; returns false if all have the same.
  bool place_of_digit(int digit, int64_t count) {
    std::array<uint32_t, kValues>& places = counts_[digit];
    uint32_t before = 0;
    for (uint32_t& each : places) {
      if (each == count) return false;
      const uint32_t here = each;
      each = before;
      before += here;
    }
    for (int64_t at = 0; at < count; ++at) {
      const Item item = items_[at];
      others_[places[value_of(item.key, digit)]++] = item;
    }
    return true;
  }

  static uint32_t value_of(uint32_t key, int digit) { return (key >> (digit * kBits)) & (kValues - 1); }

  std::unique_ptr<Item[]> items_, others_;
  std::array<std::array<uint32_t, kValues>, kDigits> counts_;
};

void sort_rows_out(Tensor values, Tensor columns, Tensor x) {
  Arguments("sort_rows").writes(values, columns).reads(x);
  const char* wanted = "sort_rows: x must be [rows, width], float32 and contiguous, the values like it, and the columns int64";
  STD_TORCH_CHECK(x.dim() == 2, wanted);
  const int64_t rows = x.size(0), width = x.size(1);
  const auto* from = checked<const float>(x, {rows, width}, wanted);
  auto* to = checked<float>(values, {rows, width}, wanted);
  auto* at = checked<int64_t>(columns, {rows, width}, wanted);
  STD_TORCH_CHECK(width <= std::numeric_limits<uint32_t>::max(), "sort_rows: too many numbers in a row");
  parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    const auto sorter = std::make_unique<Sorter>(width);
    for (int64_t row = begin; row < end; ++row) {
      sorter->sort(from + row * width, width, to + row * width, at + row * width);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("sort_rows_out", FASTGEN_PLANNED(sort_rows_out)); }
