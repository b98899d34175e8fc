// The rows of x as int8.cpp reads them: quantised to 8 bits, in tiles.
#pragma once
#include "amx.h"
#include "packed.h"
#include "quantize.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace fastgen {

// Rows in bytes. For AMX tiles a row lies behind the other. Otherwise, four inputs of each row of a tile lie side by
// side, then the next four of each, and groups likewise: so a tile reads from one place on.
struct Inputs {
  const int8_t* values;
  const Group* groups;
  int64_t stride;  // bytes of a row
};

// Rows in bytes, and the memory that they are in.
class QuantizedRows {
 public:
  // In tiles of at most `most` rows; with 0 for AMX tiles.
  QuantizedRows(const Rows& x, int64_t group_size, bool rotated, int64_t most)
      : x_(x), size_(group_size), rotated_(rotated), groups_of_row_((x.inputs + group_size - 1) / group_size),
        stride_(groups_of_row_ * group_size) {
    const int64_t rows = x.rows;
    // Whole AMX tiles of them.
    const int64_t whole = most > 0 ? rows : (rows + kAmxRows - 1) / kAmxRows * kAmxRows;
    values_.reset(new int8_t[whole * stride_]);
    groups_.reset(new Group[whole * groups_of_row_]);
    std::memset(values_.get() + rows * stride_, 0, (whole - rows) * stride_);
    std::fill(groups_.get() + rows * groups_of_row_, groups_.get() + whole * groups_of_row_, Group{});
    const RowTiles tiles(rows, std::max<int64_t>(most, 1));
    if (rows * stride_ < kGrain) {
      quantize(tiles, 0, tiles.count);
    } else {
      const int64_t grain = std::max<int64_t>(kGrain / (stride_ * std::max<int64_t>(most, 1)), 1);
      parallel_for(0, tiles.count, grain, [&](int64_t begin, int64_t end) { quantize(tiles, begin, end); });
    }
  }

  Inputs inputs() const { return {values_.get(), groups_.get(), stride_}; }

 private:
  void quantize(const RowTiles& tiles, int64_t begin, int64_t end) {
    const int64_t inputs = x_.inputs;
    const bool is_as_it_is = x_.order == nullptr && x_.type == ScalarType::Float && (!rotated_ || stride_ == inputs);
    const RowKernels kernels = row_kernels();
    // With zeros behind them for the last group.
    std::vector<float> line(is_as_it_is ? 0 : stride_), turned(rotated_ ? stride_ : 0);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tiles.begin(tile), some = tiles.size(tile);
      for (int64_t r = 0; r < some; ++r) {
        const int64_t start = (first + r) * x_.stride;
        if (!is_as_it_is) read_line(x_.data, start, inputs, 1, x_.order, x_.type, line.data());
        const float* values = is_as_it_is ? static_cast<const float*>(x_.data) + start : line.data();
        int8_t* to = values_.get() + first * stride_ + r * 4;
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
  std::unique_ptr<int8_t[]> values_;
  std::unique_ptr<Group[]> groups_;
};

}  // namespace fastgen
