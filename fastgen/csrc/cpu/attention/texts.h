// Attention over all tokens of a sequence, for one instruction set. packed_attention.cpp compiles it for each with
// each_isa.h, therefore without an include guard.
//
// Each lane of a vector belongs to a different query. A key's element, broadcast and multiplied by a vector of the
// queries, contributes to their scores, and a value's element, multiplied by a vector of weights, to their contexts.
// There are therefore no horizontal sums or comparisons. The softmax is computed online, block by block (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", NeurIPS 2022).

#include "operations.h"

// Positions per block: their keys, and their scores with kVectors vectors of queries, share the first-level cache.
constexpr int64_t kBlock = 128;
// Queries are processed in tiles of kVectors vectors; this many tiles share each copied block of keys and values.
constexpr int kVectors = 2;
constexpr int64_t kTiles = 8;
constexpr int64_t kTileQueries = kVectors * kWidth;
// Keys whose scores, and elements of values whose sums, are held in registers at the same time.
constexpr int kKeys = kWidth == 16 ? 12 : kWidth == 8 ? 6 : 4;
constexpr int kNumbers = kWidth == 16 ? 8 : 4;

// The size rounded up to whole transposed squares.
FASTGEN_TARGET inline int64_t padded(int64_t dim) { return (dim + kWidth - 1) / kWidth * kWidth; }

// Adjacent queries of one head, and their results so far.
struct Tile {
  float* query;    // [dim, kTileQueries], scaled
  float* context;  // [value dim, kTileQueries]: the sum of exp(score - largest) * value
  float* largest;  // [kTileQueries]
  float* total;    // [kTileQueries]: the sum of exp(score - largest)
};

// Computes scores [kCount, kTileQueries] of as many keys, [kCount, dim] contiguous. Updates `largest` with them.
template <int kCount, int kWide>
FASTGEN_TARGET inline void score(const float* query, const float* keys, int64_t dim, float* scores,
                                 Vector (&largest)[kVectors]) {
  Vector sums[kCount][kWide];
#pragma GCC unroll 16
  for (int j = 0; j < kCount; ++j) {
#pragma GCC unroll 16
    for (int v = 0; v < kWide; ++v) sums[j][v] = broadcast(0.0f);
  }
  for (int64_t d = 0; d < dim; ++d) {
    Vector q[kWide];
#pragma GCC unroll 16
    for (int v = 0; v < kWide; ++v) q[v] = load(query + d * kTileQueries + v * kWidth);
#pragma GCC unroll 16
    for (int j = 0; j < kCount; ++j) {
      const Vector key = broadcast(keys[j * dim + d]);
  #pragma GCC unroll 16
      for (int v = 0; v < kWide; ++v) sums[j][v] = multiply_add(key, q[v], sums[j][v]);
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < kCount; ++j) {
#pragma GCC unroll 16
    for (int v = 0; v < kWide; ++v) {
      store(scores + j * kTileQueries + v * kWidth, sums[j][v]);
      largest[v] = maximum(sums[j][v], largest[v]);
    }
  }
}

// The same for `count` keys, at most kCount.
template <int kCount, int kWide>
FASTGEN_TARGET inline void score_some(int64_t count, const float* query, const float* keys, int64_t dim, float* scores,
                                      Vector (&largest)[kVectors]) {
  if constexpr (kCount > 1) {
    if (count < kCount) return score_some<kCount - 1, kWide>(count, query, keys, dim, scores, largest);
  }
  score<kCount, kWide>(query, keys, dim, scores, largest);
}

// Multiplies context [kNumbers, kTileQueries] by `factor`, and adds the weights of `length` positions times their
// values.
template <int kWide>
FASTGEN_TARGET inline void add_values(const float* weights, const float* values, int64_t value_dim, int64_t length,
                                      const Vector (&factor)[kVectors], float* context) {
  Vector sums[kNumbers][kWide];
#pragma GCC unroll 16
  for (int d = 0; d < kNumbers; ++d) {
#pragma GCC unroll 16
    for (int v = 0; v < kWide; ++v) sums[d][v] = load(context + d * kTileQueries + v * kWidth) * factor[v];
  }
  for (int64_t j = 0; j < length; ++j) {
    Vector weight[kWide];
#pragma GCC unroll 16
    for (int v = 0; v < kWide; ++v) weight[v] = load(weights + j * kTileQueries + v * kWidth);
#pragma GCC unroll 16
    for (int d = 0; d < kNumbers; ++d) {
      const Vector value = broadcast(values[j * value_dim + d]);
  #pragma GCC unroll 16
      for (int v = 0; v < kWide; ++v) sums[d][v] = multiply_add(value, weight[v], sums[d][v]);
    }
  }
#pragma GCC unroll 16
  for (int d = 0; d < kNumbers; ++d) {
#pragma GCC unroll 16
    for (int v = 0; v < kWide; ++v) store(context + d * kTileQueries + v * kWidth, sums[d][v]);
  }
}

// Adds a block of positions to a tile in which kWide vectors hold queries.
template <int kWide>
FASTGEN_TARGET void add_block(const TextAttention& problem, const Tile& tile, const float* keys, const float* values,
                              int64_t length, float* scores) {
  Vector former[kVectors], largest[kVectors], total[kVectors], factor[kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kWide; ++v) largest[v] = former[v] = load(tile.largest + v * kWidth);
  const int64_t groups = (length + kKeys - 1) / kKeys;
  for (int64_t i = 0; i < groups; ++i) {  // of nearly the same size
    const int64_t begin = length * i / groups, end = length * (i + 1) / groups;
    score_some<kKeys, kWide>(end - begin, tile.query, keys + begin * problem.dim, problem.dim,
                             scores + begin * kTileQueries, largest);
  }
#pragma GCC unroll 16
  for (int v = 0; v < kWide; ++v) {
    factor[v] = exponential(former[v] - largest[v]);
    total[v] = load(tile.total + v * kWidth) * factor[v];
    store(tile.largest + v * kWidth, largest[v]);
  }
  for (int64_t j = 0; j < length; ++j) {
#pragma GCC unroll 16
    for (int v = 0; v < kWide; ++v) {
      float* place = scores + j * kTileQueries + v * kWidth;
      const Vector weight = exponential(load(place) - largest[v]);
      total[v] = total[v] + weight;
      store(place, weight);
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < kWide; ++v) store(tile.total + v * kWidth, total[v]);
  const int64_t value_dim = padded(problem.value_dim);
  for (int64_t d = 0; d < problem.value_dim; d += kNumbers) {
    add_values<kWide>(scores, values + d, value_dim, length, factor, tile.context + d * kTileQueries);
  }
}

// Transposes at most kWidth queries of `dim` elements each to a vector for each element.
FASTGEN_TARGET inline void lay_out(const float* from, int64_t stride, int64_t queries, int64_t dim, float scale,
                                   float* to) {
  float lines[kWidth * kWidth] = {};
  const Vector factor = broadcast(scale);
  for (int64_t d = 0; d < dim; d += kWidth) {
    for (int64_t i = 0; i < queries; ++i) {
      float* line = lines + i * kWidth;
      std::memcpy(line, from + i * stride + d, std::min<int64_t>(kWidth, dim - d) * sizeof(float));
      store(line, load(line) * factor);
    }
    transpose_block(lines, kWidth, to + d * kTileQueries, kTileQueries);
  }
}

// Writes the contexts of at most kWidth queries, divided by the sums of their weights.
FASTGEN_TARGET inline void put(const float* context, const float* total, int64_t queries, int64_t value_dim, float* to,
                               int64_t stride) {
  float divisors[kWidth], scaled[kWidth * kWidth], lines[kWidth * kWidth];
  for (int64_t i = 0; i < kWidth; ++i) divisors[i] = 1.0f / total[i];
  const Vector factor = load(divisors);
  for (int64_t d = 0; d < value_dim; d += kWidth) {
    for (int64_t i = 0; i < kWidth; ++i) store(scaled + i * kWidth, load(context + (d + i) * kTileQueries) * factor);
    transpose_block(scaled, kWidth, lines, kWidth);
    for (int64_t i = 0; i < queries; ++i) {
      std::memcpy(to + i * stride + d, lines + i * kWidth, std::min<int64_t>(kWidth, value_dim - d) * sizeof(float));
    }
  }
}

// Copies rows of `width` elements to rows of `wide`, padded with zeros.
FASTGEN_TARGET inline void copy_rows(const float* from, int64_t stride, int64_t rows, int64_t width, float* to,
                                     int64_t wide) {
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(to + i * wide, from + i * stride, width * sizeof(float));
    for (int64_t d = width; d < wide; ++d) to[i * wide + d] = 0.0f;
  }
}

constexpr int64_t kTaskQueries = kTiles * kTileQueries;

FASTGEN_TARGET inline int64_t floats_of_scratch(const TextAttention& problem) {
  const int64_t numbers = padded(problem.dim) + padded(problem.value_dim);
  return (kBlock + kTaskQueries) * numbers + kBlock * kTileQueries + 2 * kTaskQueries;
}

// Attends for at most kTaskQueries queries of a head, from `first` on, to all tokens of their sequence.
FASTGEN_TARGET inline void attend(const TextAttention& problem, int64_t head, const Text& text, int64_t first,
                                  float* scratch) {
  const int64_t dim = padded(problem.dim), value_dim = padded(problem.value_dim);
  float *keys = scratch, *values = keys + kBlock * dim, *scores = values + kBlock * value_dim;
  float* state = scores + kBlock * kTileQueries;
  const int64_t count = std::min<int64_t>(kTaskQueries, text.length - first), tiles = (count + kTileQueries - 1) / kTileQueries;
  const int64_t kv_head = head / problem.group, size_of_tile = kTileQueries * (dim + value_dim + 2);
  const auto tile_of = [&](int64_t i) {
    float* query = state + i * size_of_tile;
    float* context = query + kTileQueries * dim;
    float* largest = context + kTileQueries * value_dim;
    return Tile{query, context, largest, largest + kTileQueries};
  };
  // The offset and the number of the queries in a vector of a tile.
  const auto vector_of = [&](int64_t tile, int64_t v) { return tile * kTileQueries + v * kWidth; };
  const auto queries_of = [&](int64_t tile, int64_t v) { return std::min<int64_t>(kWidth, count - vector_of(tile, v)); };
  for (int64_t i = 0; i < tiles; ++i) {
    const Tile tile = tile_of(i);
    for (int64_t v = 0; v < kVectors && queries_of(i, v) > 0; ++v) {
      const float* from = problem.query.row(head, text.begin + first + vector_of(i, v));
      lay_out(from, problem.query.token, queries_of(i, v), problem.dim, problem.scale, tile.query + v * kWidth);
    }
    for (int64_t n = 0; n < kTileQueries * value_dim; ++n) tile.context[n] = 0.0f;
    for (int64_t n = 0; n < kTileQueries; ++n) tile.largest[n] = kNegativeInfinity, tile.total[n] = 0.0f;
  }
  const int64_t blocks = (text.length + kBlock - 1) / kBlock;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = text.length * block / blocks, length = text.length * (block + 1) / blocks - begin;
    copy_rows(problem.keys.row(kv_head, text.begin + begin), problem.keys.token, length, problem.dim, keys,
              problem.dim);
    copy_rows(problem.values.row(kv_head, text.begin + begin), problem.values.token, length, problem.value_dim, values,
              value_dim);
    for (int64_t i = 0; i < tiles; ++i) {
      if (queries_of(i, 1) > 0) add_block<kVectors>(problem, tile_of(i), keys, values, length, scores);
      else add_block<1>(problem, tile_of(i), keys, values, length, scores);
    }
  }
  for (int64_t i = 0; i < tiles; ++i) {
    const Tile tile = tile_of(i);
    for (int64_t v = 0; v < kVectors && queries_of(i, v) > 0; ++v) {
      put(tile.context + v * kWidth, tile.total + v * kWidth, queries_of(i, v), problem.value_dim,
          problem.output + (text.begin + first + vector_of(i, v)) * problem.output_token + head * problem.value_dim,
          problem.output_token);
    }
  }
}

FASTGEN_TARGET inline TextKernels kernels() { return {kTaskQueries, floats_of_scratch, attend}; }
