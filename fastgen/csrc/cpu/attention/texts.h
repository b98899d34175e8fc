// Attention over all tokens of a text, for one instruction set. Compiled for each by each_isa.h, included by
// packed_attention.cpp. No include guard: it is meant to be included several times.
//
// A vector holds one number of as many queries: an element of a key, in every place of a vector, times a vector of the
// queries is what it adds to their scores, and an element of a value, times a vector of weights, what it adds to their
// contexts. So nothing is ever added up or compared across a vector. The softmax is computed online, block by block
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", NeurIPS
// 2022).

#include "operations.h"

// Positions per block: their keys, and their scores with kVectors vectors of queries, share the first-level cache.
constexpr int64_t kBlock = 128;
// Queries are taken kVectors vectors at a time, and so many of these tiles share what is copied of keys and values.
constexpr int kVectors = 2;
constexpr int64_t kTiles = 8;
constexpr int64_t kTileQueries = kVectors * kWidth;
// Keys whose scores, and numbers of values whose sums, are held in registers at the same time.
constexpr int kKeys = kWidth == 16 ? 12 : kWidth == 8 ? 6 : 4;
constexpr int kNumbers = kWidth == 16 ? 8 : 4;

// What transposed squares fill.
FASTGEN_TARGET inline int64_t padded(int64_t dim) { return (dim + kWidth - 1) / kWidth * kWidth; }

// Some queries of one head, next to each other: what they have seen of keys and values so far.
struct Tile {
  float* query;    // [dim, kTileQueries], scaled
  float* context;  // [value dim, kTileQueries]: the sum of exp(score - largest) * value
  float* largest;  // [kTileQueries]
  float* total;    // [kTileQueries]: the sum of exp(score - largest)
};

// scores[kCount, kTileQueries] of as many keys, [kCount, dim] next to each other. `largest`: of these and what it was.
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

// The same of `count` keys, at most kCount.
template <int kCount, int kWide>
FASTGEN_TARGET inline void score_some(int64_t count, const float* query, const float* keys, int64_t dim, float* scores,
                                      Vector (&largest)[kVectors]) {
  if constexpr (kCount > 1) {
    if (count < kCount) return score_some<kCount - 1, kWide>(count, query, keys, dim, scores, largest);
  }
  score<kCount, kWide>(query, keys, dim, scores, largest);
}

// context[kNumbers, kTileQueries] times `factor`, and the weights of `length` positions times their values.
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

// A block of positions for a tile of which kWide vectors hold queries.
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

// Some queries, at most kWidth, of `dim` numbers each, as a vector for each number.
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

// The contexts of some queries, at most kWidth, divided by the sums of their weights.
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

// Rows of `width` numbers as rows of `wide`, with zeros behind.
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

// At most kTaskQueries queries of a head, from `first` on, over all tokens of their text.
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
  // [begin, end) of the queries that a vector of a tile holds.
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
