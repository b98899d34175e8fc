// Blocks of keys and values for one instruction set: scores, online softmax, and the weighted sum of values. kernel.h
// includes it once for each instruction set, therefore without an include guard.

// Positions per block. At the usual head size of 64, their K or V take half of a first-level cache of 32 KiB.
constexpr int64_t kBlock = 64;
static_assert(kBlock % kWidth == 0 && kBlock % 4 == 0, "the kernels work on whole vectors, and on four keys at a time");

// Keys and values of up to kBlock positions, which may lie anywhere. The last one is repeated up to a multiple of four.
template <typename scalar_t>
struct Block {
  int64_t length;
  int64_t next_keys;  // distance in elements from this block's keys to the next ones; 0 if there are none
  const scalar_t* keys[kBlock];
  const scalar_t* values[kBlock];
};

// The result so far of a matrix of queries.
struct State {
  float* context;  // [rows, width]: the sum of exp(score - largest) * value
  float* largest;  // [rows]
  float* total;    // [rows]: the sum of exp(score - largest)
  int64_t rows, width;

  State from_row(int64_t row, int64_t count) const {
    return {context + row * width, largest + row, total + row, count, width};
  }
};

// Scratch memory of a thread.
struct Scratch {
  float* query;    // [rows, padded dim], scaled, padded with zeros
  float* scores;   // [rows, kBlock]
  float* factors;  // [rows]
  float* state;
};

FASTGEN_TARGET inline State state_in(float* memory, const AttentionProblem& problem) {
  const int64_t rows = problem.matrix_rows(), width = AttentionProblem::padded(problem.value_dim);
  return {memory, memory + rows * width, memory + rows * (width + 1), rows, width};
}

template <typename scalar_t>
FASTGEN_TARGET inline const scalar_t* at(const Strided& x, int64_t i, int64_t j, int64_t k = 0, int64_t l = 0) {
  return static_cast<const scalar_t*>(x.data) + i * x.strides[0] + j * x.strides[1] + k * x.strides[2] +
         l * x.strides[3];
}

// Prefetches `count` elements, whether or not they exist. The keys and the values of a head are two streams that are
// read alternately, a block at a time, which is too short for the hardware prefetcher: from main memory, the kernel
// takes half as long again without this. The next block's data is prefetched during the multiplications of the current
// one.
template <typename scalar_t>
FASTGEN_TARGET inline void prefetch(const scalar_t* from, int64_t offset, int64_t count) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(offset) * sizeof(scalar_t);
  for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(scalar_t)); i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + static_cast<uintptr_t>(i)), 0, 2);
  }
}

// Returns the distance in elements between two pointers, possibly into different memory; 0 if the second one is null.
template <typename scalar_t>
FASTGEN_TARGET inline int64_t distance(const scalar_t* from, const scalar_t* to) {
  if (to == nullptr) return 0;
  const auto bytes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
  return bytes / static_cast<int64_t>(sizeof(scalar_t));
}

// Loads the first `count` lanes, fewer than a vector has, and fills up with zeros.
template <typename scalar_t>
FASTGEN_TARGET inline Vector load_first(const scalar_t* from, int64_t count) {
  float lanes[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = to_float(from[i]);
  return load(lanes);
}

FASTGEN_TARGET inline float exponential(float x) {
  float lanes[kWidth];
  store(lanes, exponential(broadcast(x)));
  return lanes[0];
}

// ---- scores: queries times keys

template <int kRows, typename scalar_t>
FASTGEN_TARGET inline void score_rows(const float* query, int64_t query_width, const Block<scalar_t>& block,
                                      int64_t dim, int64_t ahead, float* scores) {
  const int64_t whole = dim / kWidth * kWidth;
  for (int64_t j = 0; j < block.length; j += 4) {
    const scalar_t* const* keys = block.keys + j;
    for (int k = 0; k < 4; ++k) prefetch(block.values[j + k], 0, ahead);
    Vector sums[kRows][4];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
  #pragma GCC unroll 16
      for (int k = 0; k < 4; ++k) sums[r][k] = broadcast(0.0f);
    }
    for (int64_t d = 0; d < whole; d += kWidth) {
      const Vector key[4] = {load(keys[0] + d), load(keys[1] + d), load(keys[2] + d), load(keys[3] + d)};
  #pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vector q = load(query + r * query_width + d);
    #pragma GCC unroll 16
        for (int k = 0; k < 4; ++k) sums[r][k] = multiply_add(q, key[k], sums[r][k]);
      }
    }
    if (whole < dim) {
  #pragma GCC unroll 16
      for (int k = 0; k < 4; ++k) {
        const Vector key = load_first(keys[k] + whole, dim - whole);
    #pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          sums[r][k] = multiply_add(load(query + r * query_width + whole), key, sums[r][k]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) store_sums(scores + r * kBlock + j, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
}

// scores[r][j] = query r times key j. Prefetches the values of the block.
template <typename scalar_t>
FASTGEN_TARGET void score(const float* query, int64_t query_width, int64_t rows, const Block<scalar_t>& block,
                          int64_t dim, int64_t value_dim, float* scores) {
  int64_t row = 0;
  int64_t ahead = value_dim;  // for the first rows only
  for (; row + kScoreRows <= rows; row += kScoreRows, ahead = 0) {
    score_rows<kScoreRows>(query + row * query_width, query_width, block, dim, ahead, scores + row * kBlock);
  }
  if constexpr (kScoreRows > 3) {
    if (row + 3 == rows) {
      return score_rows<3>(query + row * query_width, query_width, block, dim, ahead, scores + row * kBlock);
    }
  }
  for (; row + 2 <= rows; row += 2, ahead = 0) {
    score_rows<2>(query + row * query_width, query_width, block, dim, ahead, scores + row * kBlock);
  }
  if (row < rows) score_rows<1>(query + row * query_width, query_width, block, dim, ahead, scores + row * kBlock);
}

// ---- context: weights times values

// context[r][column ...] = factors[r] * context + weights * values. If kPartial, only the first `last` lanes of the
// last vector are values.
template <int kRows, int kVectors, bool kPartial, typename scalar_t>
FASTGEN_TARGET inline void add_values_tile(const float* weights, const Block<scalar_t>& block, int64_t column,
                                           int64_t last, int64_t ahead, const float* factors, float* context,
                                           int64_t width) {
  Vector sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load(context + r * width + column + v * kWidth) * broadcast(factors[r]);
    }
  }
  for (int64_t j = 0; j < block.length; ++j) {
    const scalar_t* from = block.values[j] + column;
    prefetch(block.keys[j], block.next_keys, ahead);
    Vector value[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) value[v] = kPartial ? load_first(from, last) : load(from + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector weight = broadcast(weights[r * kBlock + j]);
  #pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(weight, value[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(context + r * width + column + v * kWidth, sums[r][v]);
  }
}

template <int kRows, typename scalar_t>
FASTGEN_TARGET void add_values_rows(const float* weights, const Block<scalar_t>& block, int64_t value_dim,
                                    int64_t ahead, const float* factors, float* context, int64_t width) {
  int64_t column = 0;
  for (; column + kContextVectors * kWidth <= value_dim; column += kContextVectors * kWidth, ahead = 0) {
    add_values_tile<kRows, kContextVectors, false>(weights, block, column, 0, ahead, factors, context, width);
  }
  for (; column + kWidth <= value_dim; column += kWidth, ahead = 0) {
    add_values_tile<kRows, 1, false>(weights, block, column, 0, ahead, factors, context, width);
  }
  if (column < value_dim) {
    add_values_tile<kRows, 1, true>(weights, block, column, value_dim - column, ahead, factors, context, width);
  }
}

// state.context[r] = factors[r] * state.context[r] + weights[r] * values. Prefetches the keys of the next block.
template <typename scalar_t>
FASTGEN_TARGET void add_values(const float* weights, const Block<scalar_t>& block, int64_t value_dim, int64_t dim,
                               const float* factors, const State& state) {
  int64_t row = 0;
  int64_t ahead = block.next_keys != 0 ? dim : 0;  // for the first rows only
  for (; row + kContextRows <= state.rows; row += kContextRows, ahead = 0) {
    add_values_rows<kContextRows>(weights + row * kBlock, block, value_dim, ahead, factors + row,
                                  state.context + row * state.width, state.width);
  }
  if constexpr (kContextRows > 3) {
    if (row + 3 == state.rows) {
      return add_values_rows<3>(weights + row * kBlock, block, value_dim, ahead, factors + row,
                                state.context + row * state.width, state.width);
    }
  }
  for (; row + 2 <= state.rows; row += 2, ahead = 0) {
    add_values_rows<2>(weights + row * kBlock, block, value_dim, ahead, factors + row,
                       state.context + row * state.width, state.width);
  }
  if (row < state.rows) {
    add_values_rows<1>(weights + row * kBlock, block, value_dim, ahead, factors + row,
                       state.context + row * state.width, state.width);
  }
}

#include "masks.h"

// ---- softmax

// Turns the scores of a block into weights, and updates the state; the context has to be scaled by `factor`. Overwrites
// the padding of the scores up to a whole vector.
FASTGEN_TARGET inline void weigh(float* scores, int64_t length, float* largest_so_far, float* total, float* factor) {
  const int64_t padded = (length + kWidth - 1) / kWidth * kWidth;
  for (int64_t j = length; j < padded; ++j) scores[j] = kNegativeInfinity;
  Vector top = broadcast(*largest_so_far);
  for (int64_t j = 0; j < padded; j += kWidth) top = maximum(load(scores + j), top);
  const float largest_now = largest(top);
  // Before any position is allowed, avoids -inf - -inf, which is NaN. A score that is NaN itself is kept.
  const float reference = largest_now == kNegativeInfinity ? 0.0f : largest_now;
  const Vector shift = broadcast(reference);
  Vector sums = broadcast(0.0f);
  for (int64_t j = 0; j < padded; j += kWidth) {
    const Vector weight = exponential(load(scores + j) - shift);
    store(scores + j, weight);
    sums = sums + weight;
  }
  *factor = *largest_so_far == largest_now ? 1.0f : exponential(*largest_so_far - reference);
  *total = *total * *factor + sum(sums);
  *largest_so_far = largest_now;
}
