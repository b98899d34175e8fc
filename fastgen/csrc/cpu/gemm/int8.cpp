// GEMM of rows that are quantised to 8 bits with weights in groups.
//
// A weight is stored in panels of 32 outputs. A line of a panel holds four inputs of each of its outputs, a byte each,
// or eight, four bits each: the instructions that multiply bytes (AVX-512 VNNI and the like) then sum as many outputs
// as a vector has lanes, without horizontal sums. Inputs are quantised row by row and group by group, so that the
// result of a row depends neither on the other rows nor on the number of threads. The sums of a group are exact; groups
// are added in float32, in order. Many rows are multiplied in AMX tiles, with the same result.
#include "amx.h"
#include "packed.h"

#include <memory>

namespace {

using namespace fastgen;

// Rows in bytes. For AMX tiles, one row follows the other. Otherwise four inputs of each row of a tile are adjacent,
// then the next four of each, and likewise the groups: a tile reads consecutive memory.
struct Inputs {
  const int8_t* values;
  const Group* groups;
  int64_t stride;  // bytes of a row
};

// Rows in bytes, with their memory.
class QuantizedRows {
 public:
  // In tiles of at most `most` rows; 0 for AMX tiles.
  QuantizedRows(const Rows& x, int64_t group_size, bool rotated, int64_t most)
      : x_(x), size_(group_size), rotated_(rotated), groups_of_row_(quotient(x.inputs, group_size)),
        stride_(groups_of_row_ * group_size) {
    const int64_t rows = x.rows;
    // Whole AMX tiles of rows.
    const int64_t whole = most > 0 ? rows : quotient(rows, kAmxRows) * kAmxRows;
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
    // Padded with zeros for the last group.
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

// Bytes of a weight that a single tile prefetches. More would compete with the processor's own prefetches (measured on
// an AMD EPYC with AVX-512, as was the value for bypassing the second-level cache).
constexpr int64_t kAhead = 256, kAheadOnce = 128;
// Tiles of rows that share the prefetches of the next panel.
constexpr int64_t kPrefetchers = 3;
// From this many rows on, AMX tiles are faster than vectors; from twice as many with groups that half fill them.
constexpr int64_t kLeastRows = 16;

// The addresses that a tile prefetches while it reads a panel: their distance from its own, and the step for each line.
// Data that is used once may bypass the second-level cache, which then keeps code and inputs. On AMD it does.
struct Ahead {
  int64_t distance, step;
  bool leaves_out_second_level;
};

// The first tile reads a panel from memory, the others from the cache. To keep memory busy, the first tiles each
// prefetch a part of the next panel.
inline Ahead ahead(const Weight& weight, int64_t tile, int64_t tiles) {
  if (tiles == 1) return {is_amd() ? kAheadOnce : kAhead, kLine, is_amd()};
  const int64_t prefetchers = std::min(tiles, kPrefetchers);
  if (tile >= prefetchers) return {0, kLine, false};
  return {weight.panel_bytes + weight.panel_bytes * tile / prefetchers, kLine / prefetchers, false};
}

struct Kernel {
  int64_t tile_rows;
  void (*multiply)(const Product& product, const Inputs& inputs, int64_t rows, int64_t panel);
};

#define FASTGEN_KERNELS "gemm/int8_kernels.h"
#define FASTGEN_VNNI
#include "../each_isa.h"

#ifdef FASTGEN_AMX
namespace avx512vnni {
#include "int8_amx.h"
}
#endif

bool has_avx512_vnni() {
#ifdef FASTGEN_X86
  return instruction_set() == InstructionSet::kAvx512 && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

Kernel kernel() {
#ifdef FASTGEN_X86
  if (has_avx512_vnni()) return avx512vnni::kKernel;
#ifdef FASTGEN_AVX_VNNI
  if (has_avx_vnni() && instruction_set() != InstructionSet::kPortable) return avxvnni::kKernel;
#endif
  if (instruction_set() != InstructionSet::kPortable) return avx2::kKernel;
#endif
  return portable::kKernel;
}

// Returns whether this many rows with groups of this size are multiplied in AMX tiles.
bool uses_amx(int64_t rows, const Weight& weight) {
#ifdef FASTGEN_AMX
  const int64_t depth = avx512vnni::matrix_depth(weight.group_size);
  if (weight.bits % 4 != 0 || depth == 0) return false;
  if (rows < (depth == kAmxLine ? kLeastRows : 2 * kLeastRows)) return false;
  return has_avx512_vnni() && has_amx();
#else
  return false;
#endif
}

}  // namespace

// The threads share the panels of all weights together.
void fastgen::multiply_int8(const Rows& x, bool rotated, const std::vector<Product>& products) {
  std::vector<int64_t> panels;
  int64_t all = 0;
  for (const Product& each : products) all += panels.emplace_back(quotient(each.target.outputs, kPanel));
  if (x.rows == 0 || all == 0) return;
  const Weight& any = products[0].weight;
  const bool in_tiles = uses_amx(x.rows, any);
  const Kernel kernel = ::kernel();
  const QuantizedRows quantized(x, any.group_size, rotated, in_tiles ? 0 : kernel.tile_rows);
  const Inputs inputs = quantized.inputs();
  const int64_t threads = std::max<int64_t>(torch::stable::get_num_threads(), 1), piece = quotient(all, threads);
  parallel_for(0, quotient(all, piece), 1, [&](int64_t begin, int64_t end) {
    const auto for_each_panel = [&](const auto& multiply) {
      for_each_part(panels, begin * piece, end * piece, [&](size_t i, int64_t from, int64_t to) {
        for (int64_t panel = from; panel < to; ++panel) multiply(products[i], panel);
      });
    };
#ifdef FASTGEN_AMX
    if (in_tiles) {
      const Aligned<uint8_t> memory(any.groups * any.group_size * kPanel);
      avx512vnni::set_up(avx512vnni::matrix_depth(any.group_size));
      const TilesUntilEnd until_end;
      for_each_panel([&](const Product& product, int64_t panel) {
        avx512vnni::multiply_panel_in_tiles(product, inputs, x.rows, panel, memory.data());
      });
      return;
    }
#endif
    for_each_panel([&](const Product& product, int64_t panel) { kernel.multiply(product, inputs, x.rows, panel); });
  });
}
