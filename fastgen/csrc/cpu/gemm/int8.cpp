// Products of rows that are quantised to 8 bits with weights in groups.
//
// A weight is stored in panels of 32 outputs. A line of a panel holds four inputs of each of its outputs, a byte each, or
// eight, four bits each: so the instructions that multiply bytes (AVX-512 VNNI and the like) add up as many outputs as a
// vector has lanes, and nothing is added across lanes. Inputs are quantised row by row and group by group, so the
// result of a row depends neither on the other rows nor on the number of threads. The sums of a group are exact; groups
// are added in float32, in their order. Many rows are multiplied in AMX tiles, with the same result.
#include "amx.h"
#include "int8_rows.h"
#include "packed.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef FASTGEN_VECTORS

namespace {

using fastgen::BlockScale;
using fastgen::block_scale;
using fastgen::Group;
using fastgen::Inputs;
using fastgen::kLine;
using fastgen::kPanel;
using fastgen::Product;
using fastgen::Rows;
using fastgen::RowTiles;
using fastgen::Weight;

// Bytes of a weight that a single tile prefetches. More of them take memory's time from what the processor
// fetches by itself (measured on an AMD EPYC with AVX-512, as the number for what leaves out the second-level cache).
constexpr int64_t kAhead = 256, kAheadOnce = 128;
// Tiles of rows that share what is prefetched of the next panel.
constexpr int64_t kPrefetchers = 3;
// Rows from which on AMX tiles are faster than vectors; twice as many with groups that half fill them.
constexpr int64_t kLeastRows = 16;

// Where the bytes are that a tile prefetches while it reads a panel: so far behind its own, and so far apart for each line.
// What is used once may leave out the second-level cache, where code and inputs then stay. On AMD it does.
struct Ahead {
  int64_t distance, step;
  bool leaves_out_second_level;
};

// A panel comes from memory for its first tile, and is near by for the others. So that memory is read all the time, the
// first tiles prefetch a part of the next panel each.
inline Ahead ahead(const Weight& weight, int64_t tile, int64_t tiles) {
  if (tiles == 1) {
    const bool is_amd = fastgen::is_amd();
    return {is_amd ? kAheadOnce : kAhead, kLine, is_amd};
  }
  const int64_t prefetchers = std::min(tiles, kPrefetchers);
  if (tile >= prefetchers) return {0, kLine, false};
  return {weight.panel_bytes + weight.panel_bytes * tile / prefetchers, kLine / prefetchers, false};
}

#define FASTGEN_KERNELS "int8_kernels.h"
#define FASTGEN_VNNI
#include "each_isa.h"

#ifdef FASTGEN_AMX
namespace avx512vnni {
#include "int8_amx.h"
}
#endif

bool has_avx512_vnni() {
#ifdef FASTGEN_X86
  return fastgen::instruction_set() == fastgen::InstructionSet::kAvx512 && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

struct Kernel {
  int64_t tile_rows;
  decltype(&portable::multiply_panel) multiply;
};

Kernel kernel() {
#define FASTGEN_KERNEL(SET) \
  Kernel { SET::kTileRows, &SET::multiply_panel }
#ifdef FASTGEN_X86
  if (has_avx512_vnni()) return FASTGEN_KERNEL(avx512vnni);
  if (fastgen::instruction_set() != fastgen::InstructionSet::kPortable) {
#ifdef FASTGEN_AVX_VNNI
    if (fastgen::has_avx_vnni()) return FASTGEN_KERNEL(avxvnni);
#endif
    return FASTGEN_KERNEL(avx2);
  }
#endif
  return FASTGEN_KERNEL(portable);
#undef FASTGEN_KERNEL
}

// Whether so many rows with groups of this size are multiplied in AMX tiles.
bool uses_amx(int64_t rows, const Weight& weight) {
#ifdef FASTGEN_AMX
  const int64_t depth = avx512vnni::matrix_depth(weight.group_size);
  if (weight.bits % 4 != 0 || depth == 0) return false;
  if (rows < (depth == fastgen::kAmxLine ? kLeastRows : 2 * kLeastRows)) return false;
  return has_avx512_vnni() && fastgen::has_amx();
#else
  return false;
#endif
}

}  // namespace

// The panels of all products together are shared out among the threads.
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

#endif
