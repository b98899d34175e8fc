// Sums of products in AMX tiles, for one type of weights. Included once per type by
// cpu/quantized_linear.cpp, inside a namespace of its own, with these defined:
//   FASTGEN_TARGET               the attribute that lets the compiler use the instructions
//   FASTGEN_SUM                  the type of a sum
//   FASTGEN_ADD(sums, x, weight) the instruction, on the numbers of registers
// No include guard: it is meant to be included several times.

// Registers 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights. Up to 16 rows: the sums of every second line of inputs
// are kept apart, so that an instruction need not wait for the one before it. More rows: registers 2, 3 and 5 have the
// rows from the 17th on.
FASTGEN_TARGET inline void multiply(const uint8_t* x, int64_t stride, int64_t rows, const uint8_t* panel, int64_t depth,
                                    void* sums) {
  FASTGEN_SUM* target = static_cast<FASTGEN_SUM*>(sums);
  constexpr int64_t kStride = kPanel * sizeof(FASTGEN_SUM);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (rows > kTileRows) {
    const uint8_t* below = x + kTileRows * stride;
    for (int64_t k = 0; k < depth; k += kLine, panel += 2 * kTileBytes) {
      _tile_loadd(4, x + k, stride);
      _tile_loadd(6, panel, kLine);
      _tile_loadd(7, panel + kTileBytes, kLine);
      FASTGEN_ADD(0, 4, 6);
      FASTGEN_ADD(1, 4, 7);
      _tile_loadd(5, below + k, stride);
      FASTGEN_ADD(2, 5, 6);
      FASTGEN_ADD(3, 5, 7);
    }
    _tile_stored(0, target, kStride);
    _tile_stored(1, target + kTileRows, kStride);
    _tile_stored(2, target + kTileRows * kPanel, kStride);
    _tile_stored(3, target + kTileRows * kPanel + kTileRows, kStride);
    return;
  }
  int64_t k = 0;
  for (; k + kLine < depth; k += 2 * kLine, panel += 4 * kTileBytes) {
    for (int64_t i = 0; i < 4 * kTileBytes; i += kLine) __builtin_prefetch(panel + kAhead + i, 0, 2);
    _tile_loadd(4, x + k, stride);
    _tile_loadd(6, panel, kLine);
    _tile_loadd(7, panel + kTileBytes, kLine);
    FASTGEN_ADD(0, 4, 6);
    FASTGEN_ADD(1, 4, 7);
    _tile_loadd(5, x + k + kLine, stride);
    _tile_loadd(6, panel + 2 * kTileBytes, kLine);
    _tile_loadd(7, panel + 3 * kTileBytes, kLine);
    FASTGEN_ADD(2, 5, 6);
    FASTGEN_ADD(3, 5, 7);
  }
  if (k < depth) {
    _tile_loadd(4, x + k, stride);
    _tile_loadd(6, panel, kLine);
    _tile_loadd(7, panel + kTileBytes, kLine);
    FASTGEN_ADD(0, 4, 6);
    FASTGEN_ADD(1, 4, 7);
  }
  alignas(kLine) FASTGEN_SUM odd[kTileRows * kPanel];
  _tile_stored(0, target, kStride);
  _tile_stored(1, target + kTileRows, kStride);
  _tile_stored(2, odd, kStride);
  _tile_stored(3, odd + kTileRows, kStride);
  for (int64_t i = 0; i < rows * kPanel; ++i) target[i] += odd[i];
}

#undef FASTGEN_TARGET
#undef FASTGEN_SUM
#undef FASTGEN_ADD
