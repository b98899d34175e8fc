// The rows of x as the products of grouped_linear.cpp read them: rounded to 8 bits, in tiles.
#pragma once
#include "../amx.h"
#include "../parallel.h"
#include "rows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace fastgen {

// Rows in bytes. For AMX tiles a row lies behind the other. Otherwise, four inputs of each row of a tile lie side by
// side, then the next four of each, and groups likewise: so a tile reads from one place on.
struct Inputs {
  const int8_t* numbers;
  const Group* groups;
  int64_t stride;  // bytes of a row
};

// Rows that are multiplied together, at most so many. All tiles have nearly the same number.
struct Tiles {
  int64_t rows, count;

  Tiles(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
  int64_t begin(int64_t i) const { return rows * i / count; }
};

// Rows of a floating type as they are given: [rows, inputs], the inputs next to each other; with `order`, input i is the one
// that it names.
struct Rows {
  const void* data;
  const int64_t* order;
  ScalarType type;
  int64_t rows, inputs, stride;
};

// Rows in bytes, and the memory that they are in.
class RoundedRows {
 public:
  // In tiles of at most `most` rows; with 0 for AMX tiles.
  RoundedRows(const Rows& x, int64_t group_size, bool rotated, int64_t most)
      : x_(x), size_(group_size), rotated_(rotated), groups_of_row_((x.inputs + group_size - 1) / group_size),
        stride_(groups_of_row_ * group_size) {
    const int64_t rows = x.rows;
    // Whole AMX tiles of them.
    const int64_t whole = most > 0 ? rows : (rows + kMatrixRows - 1) / kMatrixRows * kMatrixRows;
    numbers_.reset(new int8_t[whole * stride_]);
    groups_.reset(new Group[whole * groups_of_row_]);
    std::memset(numbers_.get() + rows * stride_, 0, (whole - rows) * stride_);
    std::fill(groups_.get() + rows * groups_of_row_, groups_.get() + whole * groups_of_row_, Group{});
    const Tiles tiles(rows, std::max<int64_t>(most, 1));
    if (rows * stride_ < kGrain) {
      round(tiles, 0, tiles.count);
    } else {
      const int64_t grain = std::max<int64_t>(kGrain / (stride_ * std::max<int64_t>(most, 1)), 1);
      parallel_for(0, tiles.count, grain, [&](int64_t begin, int64_t end) { round(tiles, begin, end); });
    }
  }

  Inputs inputs() const { return {numbers_.get(), groups_.get(), stride_}; }

 private:
  void round(const Tiles& tiles, int64_t begin, int64_t end) {
    const int64_t inputs = x_.inputs;
    const bool is_as_it_is = x_.order == nullptr && x_.type == ScalarType::Float && (!rotated_ || stride_ == inputs);
    const RowKernels kernels = row_kernels();
    // With zeros behind them for the last group.
    std::vector<float> line(is_as_it_is ? 0 : stride_), turned(rotated_ ? stride_ : 0);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tiles.begin(tile), some = tiles.begin(tile + 1) - first;
      for (int64_t r = 0; r < some; ++r) {
        const int64_t start = (first + r) * x_.stride;
        if (!is_as_it_is) read_line(x_.data, start, inputs, 1, x_.order, x_.type, line.data());
        const float* values = is_as_it_is ? static_cast<const float*>(x_.data) + start : line.data();
        int8_t* to = numbers_.get() + first * stride_ + r * 4;
        Group* groups = groups_.get() + first * groups_of_row_ + r;
        if (rotated_) {
          kernels.rotate_and_quantize(values, stride_, size_, some, to, groups, turned.data());
        } else {
          kernels.quantize(values, inputs, size_, some, to, groups);
        }
      }
    }
  }

  const Rows x_;
  const int64_t size_;
  const bool rotated_;
  const int64_t groups_of_row_, stride_;
  std::unique_ptr<int8_t[]> numbers_;
  std::unique_ptr<Group[]> groups_;
};

}  // namespace fastgen
