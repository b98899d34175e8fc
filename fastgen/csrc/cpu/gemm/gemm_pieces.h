// GEMM with packed pieces of a weight, for one instruction set. Included by gemm_kernels.h.
// No include guard: it is meant to be included several times.

constexpr int kVectors = by_width(4, 2, 3);   // across a panel
constexpr int kTileRows = by_width(4, 6, 8);  // kTileRows x kVectors sums stay in registers
constexpr int64_t kPanel = kWidth * kVectors;  // outputs of a panel

// y[kRows, kPanel] = first (one row for all; y itself if null) + x[kRows, depth] times panel[depth, kPanel]. The
// products are summed separately first, so that a long sum is rounded as its parts are. Meanwhile prefetches the next
// data: kLines cache lines for each input.
template <int kRows, int kLines>
FASTGEN_TARGET void tile(const float* x, int64_t x_stride, const float* panel, int64_t depth, const float* first, float* y,
                         int64_t y_stride, const Lines& next) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int64_t n = 0; n < kPanel; n += kLine) __builtin_prefetch(y + r * y_stride + n, 1, 3);
  }
  Vector sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const Vector* weights = reinterpret_cast<const Vector*>(panel + k * kPanel);
    const float* lines = next.first + k / kLine * next.group + k % kLine * next.input;
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(lines + line * next.line, 0, 2);
    Vector w[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) w[v] = weights[v];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float value = x[r * x_stride + k];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] += value * w[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vector* target = reinterpret_cast<Vector*>(y + r * y_stride) + v;
      *target = (first != nullptr ? reinterpret_cast<const Vector*>(first)[v] : *target) + sums[r][v];
    }
  }
}

using Tile = void (*)(const float*, int64_t, const float*, int64_t, const float*, float*, int64_t, const Lines&);

template <int kLines, size_t... kRows>
constexpr std::array<Tile, sizeof...(kRows)> make_tiles(std::index_sequence<kRows...>) {
  return {&tile<static_cast<int>(kRows) + 1, kLines>...};
}

// By the number of lines to prefetch, less one, and the number of rows, less one.
constexpr int64_t kPanelLines = (kPanel + kLine - 1) / kLine;
static_assert(kPanelLines <= 3 && kPanel % kLine == 0);
constexpr std::array<std::array<Tile, kTileRows>, 3> kTiles = {
    make_tiles<1>(std::make_index_sequence<kTileRows>()),
    make_tiles<2>(std::make_index_sequence<kTileRows>()),
    make_tiles<3>(std::make_index_sequence<kTileRows>()),
};

// The lines that one of several tiles prefetches of a piece of a panel, `lines` cache lines for each input that it
// multiplies: together the tiles prefetch all of it, if they multiply kDepth inputs. A piece with neither contiguous
// inputs nor outputs deserves no special case: useless prefetches cost little.
inline Lines lines_of(const Piece& piece, int64_t tile, int64_t lines) {
  const int64_t begin = std::min(tile * lines, kPanelLines - lines);
  if (piece.output == 1) {  // lines hold outputs
    return {piece.first + begin * kLine, kLine * piece.input, piece.input, kLine};
  }
  return {piece.first + begin * kLine * piece.output, lines * piece.output, kLine, piece.output};  // inputs
}

// Multiplies all rows with `depth` inputs of one panel; adds to y if there is no bias. The part of the panel that is
// read at once fits into the first-level cache, so that only one tile of rows reads it from farther away. Meanwhile the
// tiles together prefetch the following data: more of the panel, and at the end `after`.
inline void multiply(const float* x, int64_t x_stride, int64_t rows, const float* panel, int64_t depth, const float* bias,
                     float* y, int64_t y_stride, const Piece& after) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, lines = (kPanelLines + tiles - 1) / tiles;
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t some = std::min(kDepth, depth - k);
    const float* part = panel + k * kPanel;
    const Piece next = k + some < depth ? Piece{part + some * kPanel, 1, kPanel} : after;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t begin = rows * i / tiles, end = rows * (i + 1) / tiles;  // of nearly the same size
      kTiles[lines - 1][end - begin - 1](x + begin * x_stride + k, x_stride, part, some, k == 0 ? bias : nullptr,
                                         y + begin * y_stride, y_stride, lines_of(next, i, lines));
    }
  }
}

// Copies up to kWidth numbers. Whole vectors and halves, the most common counts, take one move.
FASTGEN_TARGET inline void copy(const float* from, int64_t count, float* to) {
  if (count == kWidth) {
    std::memcpy(to, from, kWidth * sizeof(float));
  } else if (count == kWidth / 2) {
    std::memcpy(to, from, kWidth / 2 * sizeof(float));
  } else {
    std::copy_n(from, count, to);
  }
}

// Transposes some lines of some columns, at most kWidth each, to `wide` numbers of each column, with zeros after the
// last line.
FASTGEN_TARGET inline void transpose(const float* from, int64_t stride, int64_t lines, int64_t columns, float* to,
                                     int64_t to_stride, int64_t wide) {
  if (lines == kWidth && columns == kWidth) return transpose_block(from, stride, to, to_stride);
  float block[kWidth * kWidth], transposed[kWidth * kWidth];
  for (int64_t i = 0; i < lines; ++i) copy(from + i * stride, columns, block + i * kWidth);
  std::fill(block + lines * kWidth, block + kWidth * kWidth, 0.0f);
  transpose_block(block, kWidth, transposed, kWidth);
  for (int64_t i = 0; i < columns; ++i) copy(transposed + i * kWidth, wide, to + i * to_stride);
}

// Packs a piece for the kernels, [depth, width], with `valid` outputs; the others are zeros.
FASTGEN_TARGET inline void pack_piece(const Piece& piece, int64_t valid, int64_t depth, int64_t width, float* to) {
  constexpr int64_t kStep = kWidth;
  if (piece.input == 1) {
    for (int64_t n = 0; n < width; n += kStep) {
      const int64_t lines = std::clamp(valid - n, int64_t{0}, kStep);
      for (int64_t k = 0; k < depth; k += kStep) {
        transpose(piece.first + n * piece.output + k, piece.output, lines, std::min(kStep, depth - k), to + k * width + n,
                  width, std::min(kStep, width - n));
      }
    }
    return;
  }
  // If outputs are not contiguous, reads as many inputs at a time as a cache line has.
  for (int64_t k = 0; k < depth; k += kLine) {
    const int64_t last = piece.output == 1 ? k : std::min(k + kLine, depth);
    for (int64_t i = 0; i < valid; ++i) {
      for (int64_t j = k; j < last; ++j) to[j * width + i] = piece.first[i * piece.output + j * piece.input];
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    if (piece.output == 1) std::copy_n(piece.first + k * piece.input, valid, to + k * width);
    std::fill(to + k * width + valid, to + (k + 1) * width, 0.0f);
  }
}
