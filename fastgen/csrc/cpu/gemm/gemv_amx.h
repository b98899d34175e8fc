// Multiplies rows and a weight in bfloat16, in AMX tiles. A tile loads 16 lines of the unpacked weight, 32 inputs at a
// time, and another one the same inputs of all rows, in pairs. Included by gemv.cpp.

namespace amx {

using fastgen::first32;
using fastgen::kAmxBytes;
using fastgen::kAmxLine;
using fastgen::kAmxRows;

constexpr int64_t kInputs = 32;  // of a tile
// With fewer rows, dot products take less time.
constexpr int64_t kMinRows = 8, kMaxRows = kAmxRows;

#define FASTGEN_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))

// Copies some inputs of lines that are `stride` apart to a tile's layout; zeros after the last line and the last input.
FASTGEN_TARGET inline void copy(const uint16_t* from, int64_t stride, int64_t lines, int64_t inputs, char* to) {
  for (int64_t i = 0; i < kAmxRows; ++i) {
    const __m512i line =
        i < lines ? _mm512_maskz_loadu_epi16(first32(inputs), from + i * stride) : _mm512_setzero_si512();
    _mm512_store_si512(to + i * kAmxLine, line);
  }
}

// Returns the rows, [steps][16 pairs of inputs][16 rows], in the thread's scratch memory.
FASTGEN_TARGET inline const char* transposed(const Operands<void>& a) {
  const int64_t steps = fastgen::quotient(a.inputs, kInputs);
  char* rows = fastgen::scratch(steps * kAmxBytes);
  alignas(64) char tile[kAmxBytes];
  for (int64_t s = 0; s < steps; ++s) {
    copy(static_cast<const uint16_t*>(a.x) + s * kInputs, a.x_stride, a.rows, a.inputs - s * kInputs, tile);
    fastgen::transpose16(tile, kAmxRows, rows + s * kAmxBytes, kAmxRows);
  }
  return rows;
}

// Writes the sums of 16 outputs with all rows to the valid results. Like the sums themselves, denormal results are
// zero.
FASTGEN_TARGET inline void finish(const Operands<void>& a, const float* sums, int64_t output, int64_t outputs) {
  alignas(64) float lines[kAmxBytes / sizeof(float)];
  fastgen::transpose16(sums, kAmxRows, lines, kAmxRows);
  const __mmask16 some = fastgen::first16(outputs);
  __m512 start = _mm512_setzero_ps();
  if (a.bias != nullptr) {
    const __m256i bias = _mm256_maskz_loadu_epi16(some, static_cast<const uint16_t*>(a.bias) + output);
    start = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bias), 16));
  }
  for (int64_t row = 0; row < a.rows; ++row) {
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(lines + row * kAmxRows), start);
    const __m256i result = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum));
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(a.y) + row * a.outputs + output, some, result);
  }
}

// Multiplies outputs from `first` on, for all rows. Meanwhile prefetches the lines of the next 16 outputs, if they are
// next in memory.
FASTGEN_TARGET inline void multiply(const Operands<void>& a, int64_t first, int64_t count) {
  const char* rows = transposed(a);
  const int64_t whole = a.inputs / kInputs, rest = a.inputs % kInputs, stride = a.weight_stride * 2;
  alignas(64) char tile[kAmxBytes];
  alignas(64) float sums[kAmxBytes / sizeof(float)];
  const fastgen::WholeTiles tiles;
  for (int64_t output = first; output < first + count; output += kAmxRows) {
    const int64_t lines = std::min(kAmxRows, first + count - output);
    const char* weight = static_cast<const char*>(a.weight) + output * stride;
    const char* next = weight + kAmxRows * stride;
    const bool has_next = output + 2 * kAmxRows <= a.outputs && a.weight_stride == a.inputs;
    __asm__ volatile("" : : : "memory");  // the intrinsics do not declare all that they read
    _tile_zero(0);
    for (int64_t s = 0; s < whole; ++s) {
      if (lines == kAmxRows) {
        _tile_loadd(1, weight + s * kAmxLine, stride);
      } else {
        copy(reinterpret_cast<const uint16_t*>(weight) + s * kInputs, a.weight_stride, lines, kInputs, tile);
        __asm__ volatile("" : : "r"(tile) : "memory");
        _tile_loadd(1, tile, kAmxLine);
        __asm__ volatile("" : : : "memory");
      }
      _tile_loadd(2, rows + s * kAmxBytes, kAmxLine);
      _tile_dpbf16ps(0, 1, 2);
      if (has_next) {
        for (int64_t i = 0; i < kAmxRows; ++i) _mm_prefetch(next + (s * kAmxRows + i) * kAmxLine, _MM_HINT_T0);
      }
    }
    if (rest > 0) {
      copy(reinterpret_cast<const uint16_t*>(weight) + whole * kInputs, a.weight_stride, lines, rest, tile);
      __asm__ volatile("" : : "r"(tile) : "memory");
      _tile_loadd(1, tile, kAmxLine);
      _tile_loadd(2, rows + whole * kAmxBytes, kAmxLine);
      _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, sums, kAmxLine);
    __asm__ volatile("" : : "r"(sums) : "memory");
    finish(a, sums, output, lines);
  }
}

#undef FASTGEN_TARGET

}  // namespace amx
