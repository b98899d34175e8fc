// Linear layers on weights of 4 or 8 bits in groups. The schemas are defined in fastgen/ops/linear/grouped.py.
//
// A weight is stored in panels of 32 outputs. A line of a panel holds four inputs of each of its outputs, a byte each, or
// eight, four bits each: so the instructions that multiply bytes (AVX-512 VNNI and the like) add up as many outputs as a
// vector has lanes, and nothing is added across lanes. Inputs are rounded to 8 bits row by row and group by group, so the
// result of a row depends neither on the other rows nor on the number of threads. The sums of a group are exact; groups
// are added in float32, in their order. Many rows are multiplied in AMX tiles, with the same result.
#include "float16.h"
#include "grouped_linear/products.h"
#include "grouped_linear/rounded_rows.h"
#include "grouped_linear/rows.h"
#include "grouped_linear/target.h"
#include "instruction_set.h"
#include "amx.h"
#include "parallel.h"
#include "plan.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

// Vectors as a language extension: gcc and clang.
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#ifdef FASTGEN_X86
#include <immintrin.h>
#endif

namespace {

using fastgen::Group;
using fastgen::Inputs;
using fastgen::is_floating;
using fastgen::kLine;
using fastgen::kPanel;
using fastgen::Packed;
using fastgen::Place;
using fastgen::place;
using fastgen::Product;
using fastgen::Products;
using fastgen::read;
using fastgen::Result;
using fastgen::RoundedRows;
using fastgen::Rows;
using fastgen::Target;
using fastgen::Tiles;
using fastgen::Weight;
using fastgen::write;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Bytes of a weight that a single tile asks for ahead of time. More of them take memory's time from what the processor
// fetches by itself (measured on an AMD EPYC with AVX-512, as the number for what leaves out the second-level cache).
constexpr int64_t kAhead = 256, kAheadOnce = 128;
// Tiles of rows that share what is asked for of the next panel.
constexpr int64_t kAskers = 3;
// Rows from which on AMX tiles are faster than vectors; twice as many with groups that half fill them.
constexpr int64_t kLeastRows = 16;

// Where the bytes are that a tile asks for while it reads a panel: so far behind its own, and so far apart for each line.
// What is used once may leave out the second-level cache, where code and inputs then stay. On AMD it does.
struct Ahead {
  int64_t distance, step;
  bool leaves_out_second_level;
};

// A panel comes from memory for its first tile, and is near by for the others. So that memory is read all the time, the
// first tiles ask for a part of the next panel each.
inline Ahead ahead(const Weight& weight, int64_t tile, int64_t tiles) {
  if (tiles == 1) {
    const bool is_amd = fastgen::is_amd();
    return {is_amd ? kAheadOnce : kAhead, kLine, is_amd};
  }
  const int64_t askers = std::min(tiles, kAskers);
  if (tile >= askers) return {0, kLine, false};
  return {weight.panel_bytes + weight.panel_bytes * tile / askers, kLine / askers, false};
}

inline int32_t four(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, sizeof(bytes));
  return bytes;
}

namespace portable {
#define FASTGEN_TARGET
#define FASTGEN_WIDTH 4
#define FASTGEN_VECTORS 2
#define FASTGEN_ROWS 2
#define FASTGEN_FLOAT16 fastgen::Float16<FASTGEN_WIDTH>
#define FASTGEN_WIDEN(from) __builtin_convertvector(*reinterpret_cast<const FewBytes*>(from), Floats)
#define FASTGEN_DOT(sums, bytes, x)                                                        \
  for (int lane = 0; lane < FASTGEN_WIDTH; ++lane) {                                       \
    for (int i = 0; i < 4; ++i) (sums)[lane] += int32_t{(bytes)[4 * lane + i]} * (x)[i]; \
  }
#define FASTGEN_SMALL_DOT FASTGEN_DOT
#include "grouped_linear/kernels.h"
}  // namespace portable

#ifdef FASTGEN_X86

namespace avx2 {
// Products of two bytes each fit into 16 bits if one of the bytes is small. Others are widened first.
__attribute__((target("avx2"), always_inline)) inline __m256i small_dot(__m256i sums, __m256i bytes, const int8_t* x) {
  const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi32(four(x)));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
__attribute__((target("avx2"), always_inline)) inline __m256i dot(__m256i sums, __m256i bytes, const int8_t* x) {
  const __m256i inputs = _mm256_set1_epi32(four(x));
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8), odd = _mm256_srai_epi16(inputs, 8);
  const __m256i first = _mm256_madd_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(255)), even);
  const __m256i second = _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), odd);
  return _mm256_add_epi32(sums, _mm256_add_epi32(first, second));
}
#define FASTGEN_TARGET __attribute__((target("avx2,fma,f16c")))
#define FASTGEN_WIDTH 8
#define FASTGEN_VECTORS 2
#define FASTGEN_ROWS 2
#define FASTGEN_FLOAT16 fastgen::Float16F16c<FASTGEN_WIDTH>
#define FASTGEN_WIDEN(from) (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from))))
#define FASTGEN_DOT(sums, bytes, x) (sums) = (Ints)dot((__m256i)(sums), (__m256i)(bytes), x)
#define FASTGEN_SMALL_DOT(sums, bytes, x) (sums) = (Ints)small_dot((__m256i)(sums), (__m256i)(bytes), x)
#include "grouped_linear/kernels.h"
}  // namespace avx2

// In 256 bits, for processors without AVX-512: gcc 11, clang 12.
#if __has_include(<avxvnniintrin.h>)
#define FASTGEN_AVX_VNNI 1
namespace avxvnni {
#define FASTGEN_TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define FASTGEN_WIDTH 8
#define FASTGEN_VECTORS 2
#define FASTGEN_ROWS 3
#define FASTGEN_FLOAT16 fastgen::Float16F16c<FASTGEN_WIDTH>
#define FASTGEN_WIDEN(from) (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from))))
#define FASTGEN_DOT(sums, bytes, x) \
  (sums) = (Ints)_mm256_dpbusd_avx_epi32((__m256i)(sums), (__m256i)(bytes), _mm256_set1_epi32(four(x)))
#define FASTGEN_SMALL_DOT FASTGEN_DOT
#include "grouped_linear/kernels.h"
}  // namespace avxvnni
#endif

namespace avx512vnni {
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")))
#define FASTGEN_WIDTH 16
#define FASTGEN_VECTORS 2
#define FASTGEN_ROWS 6
#define FASTGEN_FLOAT16 fastgen::Float16Avx512<FASTGEN_WIDTH>
#define FASTGEN_WIDEN(from) (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from))))
#define FASTGEN_DOT(sums, bytes, x) \
  (sums) = (Ints)_mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(bytes), _mm512_set1_epi32(four(x)))
#define FASTGEN_SMALL_DOT FASTGEN_DOT
#include "grouped_linear/kernels.h"
#ifdef FASTGEN_AMX
#include "grouped_linear/amx.h"
#endif
}  // namespace avx512vnni

#endif

enum class Kernels { kPortable, kAvx2, kAvxVnni, kAvx512Vnni };

Kernels kernels() {
#ifdef FASTGEN_X86
  const fastgen::InstructionSet set = fastgen::instruction_set();
  if (set == fastgen::InstructionSet::kAvx512 && __builtin_cpu_supports("avx512vnni")) return Kernels::kAvx512Vnni;
#ifdef FASTGEN_AVX_VNNI
  if (set != fastgen::InstructionSet::kPortable && fastgen::has_avx_vnni()) return Kernels::kAvxVnni;
#endif
  if (set != fastgen::InstructionSet::kPortable) return Kernels::kAvx2;
#endif
  return Kernels::kPortable;
}

// `finish(sums, row, some)` takes the results of a panel, kPanel of each of some rows.
template <class Finish>
void panel(const Weight& weight, const Inputs& inputs, int64_t rows, int64_t number, const Finish& finish) {
  switch (kernels()) {
#ifdef FASTGEN_X86
    case Kernels::kAvx512Vnni: return avx512vnni::panel(weight, inputs, rows, number, finish);
#ifdef FASTGEN_AVX_VNNI
    case Kernels::kAvxVnni: return avxvnni::panel(weight, inputs, rows, number, finish);
#endif
    case Kernels::kAvx2: return avx2::panel(weight, inputs, rows, number, finish);
#endif
    default: return portable::panel(weight, inputs, rows, number, finish);
  }
}

// Rows of a tile in these kernels.
int64_t tile_rows() {
  switch (kernels()) {
#ifdef FASTGEN_X86
    case Kernels::kAvx512Vnni: return avx512vnni::kTileRows;
#ifdef FASTGEN_AVX_VNNI
    case Kernels::kAvxVnni: return avxvnni::kTileRows;
#endif
    case Kernels::kAvx2: return avx2::kTileRows;
#endif
    default: return portable::kTileRows;
  }
}

// Whether so many rows with groups of this size are multiplied in AMX tiles.
bool uses_amx(int64_t rows, int64_t bits, int64_t group_size) {
#ifdef FASTGEN_AMX
  const int64_t depth = avx512vnni::matrix_depth(group_size);
  if (bits % 4 != 0 || depth == 0 || rows < (depth == fastgen::kMatrixBytes ? kLeastRows : 2 * kLeastRows)) return false;
  return kernels() == Kernels::kAvx512Vnni && fastgen::has_amx();
#else
  return false;
#endif
}

// A thread's use of the kernels. In AMX tiles it sets these up, and has memory for a panel.
class Worker {
 public:
  Worker(const Weight& any, bool in_tiles) : in_tiles_(in_tiles) {
#ifdef FASTGEN_AMX
    if (!in_tiles_) return;
    avx512vnni::set_up(avx512vnni::matrix_depth(any.group_size));
    memory_.reset(new uint8_t[any.groups * any.group_size * kPanel + kAligned]);
    const auto odd = reinterpret_cast<uintptr_t>(memory_.get()) % kAligned;
    numbers_ = memory_.get() + (kAligned - odd) % kAligned;
#endif
  }
  ~Worker() {
#ifdef FASTGEN_AMX
    if (in_tiles_) fastgen::release_tiles();
#endif
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  template <class Finish>
  void multiply(const Weight& weight, const Inputs& inputs, int64_t rows, int64_t number, const Finish& finish) {
#ifdef FASTGEN_AMX
    if (in_tiles_) return avx512vnni::panel_in_tiles(weight, inputs, rows, number, numbers_, finish);
#endif
    panel(weight, inputs, rows, number, finish);
  }

 private:
  static constexpr int64_t kAligned = 64;  // what loads are aligned to
  bool in_tiles_;
  std::unique_ptr<uint8_t[]> memory_;
  uint8_t* numbers_ = nullptr;
};

// The panels of all products together are shared out among the threads.
void multiply(const Rows& x, int64_t group_size, bool rotated, const Product* each, size_t count) {
  std::vector<Target> targets;
  std::vector<int64_t> ends;  // of the panels of each product, among those of all
  int64_t panels = 0;
  for (size_t i = 0; i < count; ++i) {
    targets.emplace_back(each[i].result);
    ends.push_back(panels += (each[i].result.outputs + kPanel - 1) / kPanel);
  }
  const int64_t rows = x.rows;
  if (rows == 0 || panels == 0) return;
  const bool in_tiles = uses_amx(rows, each[0].weight.bits, group_size);
  const RoundedRows rounded(x, group_size, rotated, in_tiles ? 0 : tile_rows());
  const Inputs inputs = rounded.inputs();
  const int64_t threads = std::max<int64_t>(torch::stable::get_num_threads(), 1);
  const int64_t piece = (panels + threads - 1) / threads;
  fastgen::parallel_for(0, (panels + piece - 1) / piece, 1, [&](int64_t begin, int64_t end) {
    size_t product = 0;
    Worker worker(each[0].weight, in_tiles);
    for (int64_t number = begin * piece; number < std::min(end * piece, panels); ++number) {
      while (number >= ends[product]) ++product;
      const int64_t own = number - (product == 0 ? 0 : ends[product - 1]);
      worker.multiply(each[product].weight, inputs, rows, own, [&](const float* sums, int64_t row, int64_t some) {
        targets[product].store<true>(own * kPanel, kPanel, sums, kPanel, row, some);
      });
    }
  });
}

// Where the memory of tensors begins.
using Places = std::vector<const void*>;

void add_place(Places& to, const Tensor& tensor) { to.push_back(tensor.const_data_ptr()); }

void add_place(Places& to, const std::optional<Tensor>& tensor) {
  if (tensor) add_place(to, *tensor);
}

template <class One>
void add_place(Places& to, const std::vector<One>& tensors) {
  for (const One& each : tensors) add_place(to, each);
}

template <class... Tensors>
Places places_of(const Tensors&... tensors) {
  Places found;
  (add_place(found, tensors), ...);
  return found;
}

void grouped_linears_out(std::vector<Tensor> results, Tensor x, std::vector<Tensor> numbers, std::vector<Tensor> scales,
                         std::vector<std::optional<Tensor>> zeros, std::vector<std::optional<Tensor>> minimums,
                         std::optional<Tensor> order, std::vector<std::optional<Tensor>> biases, int64_t bits,
                         int64_t group_size, bool rotated, bool floats) {
  const auto made = [=] {
    return Products(results, x, numbers, scales, zeros, minimums, order, biases, bits, group_size, rotated, floats);
  };
  const auto run = [](const Products& products) {
    if (products.floats) return fastgen::multiply_floats(products);
    multiply(products.x, products.group_size, products.rotated, products.each.data(), products.each.size());
  };
  if (!fastgen::plan_is_open()) return run(made());
  const auto places = [=] { return places_of(results, x, numbers, scales, zeros, minimums, biases); };
  // What is where is found out once, and again when memory has moved. The numbers of an order are checked each time.
  const bool is_ordered = order.has_value();
  fastgen::add_to_plan([made, run, places, is_ordered, products = made(), known = places()]() mutable {
    if (is_ordered || places() != known) products = made(), known = places();
    run(products);
  });
}

void grouped_linear_out(Tensor y, Tensor x, Tensor numbers, Tensor scales, std::optional<Tensor> zeros,
                        std::optional<Tensor> minimums, std::optional<Tensor> order, std::optional<Tensor> bias,
                        int64_t bits, int64_t group_size, bool rotated, bool floats) {
  grouped_linears_out({y}, x, {numbers}, {scales}, {zeros}, {minimums}, order, {bias}, bits, group_size, rotated, floats);
}

Tensor grouped_linear(Tensor x, Tensor numbers, Tensor scales, std::optional<Tensor> zeros,
                      std::optional<Tensor> minimums, std::optional<Tensor> order, std::optional<Tensor> bias,
                      int64_t outputs, int64_t bits, int64_t group_size, bool rotated, bool floats) {
  STD_TORCH_CHECK(x.dim() == 2 && outputs > 0, "grouped_linear: x must be [rows, inputs]");
  Tensor y = torch::stable::new_empty(x, {x.size(0), outputs});
  grouped_linear_out(y, x, numbers, scales, zeros, minimums, order, bias, bits, group_size, rotated, floats);
  return y;
}

// Lines of a weight, [n, inputs] in the type of `like`: those that `which`, [n] int64, names.
Tensor grouped_rows(Tensor like, Tensor which, Tensor numbers, Tensor scales, std::optional<Tensor> zeros,
                    std::optional<Tensor> minimums, int64_t outputs, int64_t inputs, int64_t bits,
                    int64_t group_size) {
  fastgen::Arguments("grouped_rows").reads(like, which, numbers, scales, zeros, minimums);
  const ScalarType type = like.scalar_type();
  STD_TORCH_CHECK(is_floating(type) && which.dim() == 1 && which.scalar_type() == ScalarType::Long &&
                      which.is_contiguous() && outputs > 0 && inputs > 0,
                  "grouped_rows: the lines must be [n] of int64, their type floating");
  const Weight weight = Packed{numbers, scales, zeros, minimums}.weight(inputs, outputs, bits, group_size);
  const int64_t count = which.size(0);
  const int64_t* from = static_cast<const int64_t*>(which.const_data_ptr());
  const ScalarType kept = scales.scalar_type();
  const auto read_unit = [](const uint16_t* unit) { return read(unit, 0, ScalarType::Half); };
  Tensor y = torch::stable::new_empty(like, {count, inputs});
  void* to = y.mutable_data_ptr();
  for (int64_t r = 0; r < count; ++r) {
    const int64_t which_line = from[r];
    STD_TORCH_CHECK(which_line >= 0 && which_line < outputs, "grouped_rows: index out of range");
    const int64_t panel = which_line / kPanel, lane = which_line % kPanel;
    const uint8_t* words = weight.numbers + panel * weight.panel_bytes + lane * 4;
    for (int64_t i = 0; i < inputs; ++i) {
      const int64_t at = (panel * weight.groups + i / group_size) * kPanel + lane;
      const int number = fastgen::code_of(words, bits, i);
      const int zero = weight.zeros != nullptr ? weight.zeros[at] : weight.middle;
      float scale, least = 0.0f;
      if (weight.multiples != nullptr) {
        const Place of = place(weight, at);
        scale = read_unit(of.unit) * static_cast<float>(of.scale[0] - (weight.block.has_minimums ? 0 : fastgen::kSignedMiddle));
        if (weight.block.has_minimums) least = read_unit(of.unit + kPanel) * of.scale[kPanel];
      } else {
        scale = read(weight.scales, at, kept);
        if (weight.minimums != nullptr) least = read(weight.minimums, at, kept);
      }
      write(to, r * inputs + i, type, scale * static_cast<float>(number - zero) + least);
    }
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("grouped_rows", TORCH_BOX(&grouped_rows));
  library.impl("grouped_linear", TORCH_BOX(&grouped_linear));
  library.impl("grouped_linear_out", TORCH_BOX(&grouped_linear_out));
  library.impl("grouped_linears_out", TORCH_BOX(&grouped_linears_out));
}

#endif
