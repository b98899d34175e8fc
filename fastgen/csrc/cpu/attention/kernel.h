// Decode attention for one instruction set. Included once for each, inside a namespace of its own that defines
// Vector and the operations on it (vector_*.h). For that reason there is no include guard, and nothing of the standard
// library is called but memcpy: a function that the linker merges with its twins of other files must not be compiled
// for an instruction set that the machine may lack.
//
// The softmax is computed online, block by block (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018; Dao et al., "FlashAttention", NeurIPS 2022): scores exist for one block of positions at a time, and what has
// been summed up so far is scaled whenever a larger score is met.

// Positions per block. Their K or V at the usual head size of 64 is half of a first-level cache of 32 KiB.
constexpr int64_t kBlock = 64;
static_assert(kBlock % kLanes == 0 && kBlock % 4 == 0, "the kernels work on whole vectors, and on four keys at a time");

// Keys and values of up to kBlock positions, which may lie anywhere. Behind the last one it is repeated up to a multiple
// of four.
template <typename scalar_t>
struct Block {
  int64_t length;
  int64_t next_keys;  // so many elements behind the keys of this block lie those that come next; 0 if there are none
  const scalar_t* keys[kBlock];
  const scalar_t* values[kBlock];
};

// What a matrix of queries has seen of K and V so far.
struct State {
  float* context;  // [rows, width]: the sum of exp(score - largest) * value
  float* largest;  // [rows]
  float* total;    // [rows]: the sum of exp(score - largest)
  int64_t rows, width;

  State from_row(int64_t row, int64_t count) const {
    return {context + row * width, largest + row, total + row, count, width};
  }
};

// Memory that a thread works in.
struct Scratch {
  float* query;    // [rows, padded dim], scaled, padded with zeros
  float* scores;   // [rows, kBlock]
  float* factors;  // [rows]
  float* state;
};

inline State state_in(float* memory, const AttentionProblem& problem) {
  const int64_t rows = problem.matrix_rows(), width = AttentionProblem::padded(problem.value_dim);
  return {memory, memory + rows * width, memory + rows * (width + 1), rows, width};
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <typename scalar_t>
inline const scalar_t* at(const Strided& x, int64_t i, int64_t j, int64_t k = 0, int64_t l = 0) {
  return static_cast<const scalar_t*>(x.data) + i * x.strides[0] + j * x.strides[1] + k * x.strides[2] +
         l * x.strides[3];
}

// Asks for `count` elements to be brought near, whether or not they exist. The keys and the values of a head are two
// streams that are read in turns, a block at a time, which is too short for the machine to run ahead of by itself: from
// main memory, the kernel takes half as long again without it. What a block needs next is asked for while the
// products of what is there are computed.
template <typename scalar_t>
inline void prefetch(const scalar_t* from, int64_t offset, int64_t count) {
#if defined(__GNUC__)
  const uintptr_t address = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(offset) * sizeof(scalar_t);
  for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(scalar_t)); i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + static_cast<uintptr_t>(i)), 0, 2);
  }
#endif
}

// How many elements lie between two places, which may be in different memory; 0 if the second one is null.
template <typename scalar_t>
inline int64_t distance(const scalar_t* from, const scalar_t* to) {
  if (to == nullptr) return 0;
  const auto bytes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
  return bytes / static_cast<int64_t>(sizeof(scalar_t));
}

// The first `count` lanes, fewer than there are, and zeros.
template <typename scalar_t>
inline Vector load_first(const scalar_t* from, int64_t count) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = to_float(from[i]);
  return load(lanes);
}

inline float exponential(float x) {
  float lanes[kLanes];
  store(lanes, exponential(broadcast(x)));
  return lanes[0];
}

// ---- scores: queries times keys

template <int kRows, typename scalar_t>
inline void score_rows(const float* query, int64_t query_width, const Block<scalar_t>& block, int64_t dim,
                       int64_t ahead, float* scores) {
  const int64_t whole = dim / kLanes * kLanes;
  for (int64_t j = 0; j < block.length; j += 4) {
    const scalar_t* const* keys = block.keys + j;
    for (int k = 0; k < 4; ++k) prefetch(block.values[j + k], 0, ahead);
    Vector sums[kRows][4];
    FASTGEN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      FASTGEN_UNROLL
      for (int k = 0; k < 4; ++k) sums[r][k] = broadcast(0.0f);
    }
    for (int64_t d = 0; d < whole; d += kLanes) {
      const Vector key[4] = {load(keys[0] + d), load(keys[1] + d), load(keys[2] + d), load(keys[3] + d)};
      FASTGEN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Vector q = load(query + r * query_width + d);
        FASTGEN_UNROLL
        for (int k = 0; k < 4; ++k) sums[r][k] = multiply_add(q, key[k], sums[r][k]);
      }
    }
    if (whole < dim) {
      FASTGEN_UNROLL
      for (int k = 0; k < 4; ++k) {
        const Vector key = load_first(keys[k] + whole, dim - whole);
        FASTGEN_UNROLL
        for (int r = 0; r < kRows; ++r) {
          sums[r][k] = multiply_add(load(query + r * query_width + whole), key, sums[r][k]);
        }
      }
    }
    FASTGEN_UNROLL
    for (int r = 0; r < kRows; ++r) store_sums(scores + r * kBlock + j, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
}

// scores[r][j] = query r times key j. The values of the block are prefetched.
template <typename scalar_t>
void score(const float* query, int64_t query_width, int64_t rows, const Block<scalar_t>& block, int64_t dim,
           int64_t value_dim, float* scores) {
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

// context[r][column ...] = factors[r] * context + weights * values. Of the last vector, `last` lanes are values if
// kPartial.
template <int kRows, int kVectors, bool kPartial, typename scalar_t>
inline void add_values_tile(const float* weights, const Block<scalar_t>& block, int64_t column, int64_t last,
                            int64_t ahead, const float* factors, float* context, int64_t width) {
  Vector sums[kRows][kVectors];
  FASTGEN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    FASTGEN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load(context + r * width + column + v * kLanes) * broadcast(factors[r]);
    }
  }
  for (int64_t j = 0; j < block.length; ++j) {
    const scalar_t* from = block.values[j] + column;
    prefetch(block.keys[j], block.next_keys, ahead);
    Vector value[kVectors];
    FASTGEN_UNROLL
    for (int v = 0; v < kVectors; ++v) value[v] = kPartial ? load_first(from, last) : load(from + v * kLanes);
    FASTGEN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vector weight = broadcast(weights[r * kBlock + j]);
      FASTGEN_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(weight, value[v], sums[r][v]);
    }
  }
  FASTGEN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    FASTGEN_UNROLL
    for (int v = 0; v < kVectors; ++v) store(context + r * width + column + v * kLanes, sums[r][v]);
  }
}

template <int kRows, typename scalar_t>
void add_values_rows(const float* weights, const Block<scalar_t>& block, int64_t value_dim, int64_t ahead,
                     const float* factors, float* context, int64_t width) {
  int64_t column = 0;
  for (; column + kContextVectors * kLanes <= value_dim; column += kContextVectors * kLanes, ahead = 0) {
    add_values_tile<kRows, kContextVectors, false>(weights, block, column, 0, ahead, factors, context, width);
  }
  for (; column + kLanes <= value_dim; column += kLanes, ahead = 0) {
    add_values_tile<kRows, 1, false>(weights, block, column, 0, ahead, factors, context, width);
  }
  if (column < value_dim) {
    add_values_tile<kRows, 1, true>(weights, block, column, value_dim - column, ahead, factors, context, width);
  }
}

// state.context[r] = factors[r] * state.context[r] + weights[r] * values. The keys of the next block are prefetched.
template <typename scalar_t>
void add_values(const float* weights, const Block<scalar_t>& block, int64_t value_dim, int64_t dim,
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

// Turns the scores of a block into weights, and makes the state ready for them; `factor` is what the context has to be
// scaled by. Scores behind the last one, up to a whole vector, are overwritten.
inline void weigh(float* scores, int64_t length, float* largest_so_far, float* total, float* factor) {
  const int64_t padded = (length + kLanes - 1) / kLanes * kLanes;
  for (int64_t j = length; j < padded; ++j) scores[j] = kNegativeInfinity;
  Vector top = broadcast(*largest_so_far);
  for (int64_t j = 0; j < padded; j += kLanes) top = maximum(load(scores + j), top);
  const float largest_now = largest(top);
  // While nothing has been allowed, -inf - -inf must not make NaN. A score that is NaN itself is not skipped.
  const float reference = largest_now == kNegativeInfinity ? 0.0f : largest_now;
  const Vector shift = broadcast(reference);
  Vector sums = broadcast(0.0f);
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vector weight = exponential(load(scores + j) - shift);
    store(scores + j, weight);
    sums = sums + weight;
  }
  *factor = *largest_so_far == largest_now ? 1.0f : exponential(*largest_so_far - reference);
  *total = *total * *factor + sum(sums);
  *largest_so_far = largest_now;
}

// Adds the positions of a block to what the queries `first_row`, ... of the matrix have seen.
template <typename scalar_t>
void attend(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t first_row, int64_t position,
            Block<scalar_t>& block, const Scratch& scratch, const State& state) {
  for (int64_t j = block.length; j % 4 != 0; ++j) {
    block.keys[j] = block.keys[block.length - 1];
    block.values[j] = block.values[block.length - 1];
  }
  const int64_t query_width = AttentionProblem::padded(problem.dim);
  score(scratch.query + first_row * query_width, query_width, state.rows, block, problem.dim,
        problem.value_dim, scratch.scores);
  for (int64_t i = 0; i < state.rows; ++i) {
    float* scores = scratch.scores + i * kBlock;
    apply_mask(scores, block.length, mask_row(problem, input, kv_head, first_row + i, position));
    hide_later(problem, input, first_row + i, position, scores, block.length);
    weigh(scores, block.length, state.largest + i, state.total + i, scratch.factors + i);
  }
  add_values(scratch.scores, block, problem.value_dim, problem.dim, scratch.factors, state);
}

// ---- a matrix of queries, its start and its end

inline void clear(const State& state) {
  for (int64_t i = 0; i < state.rows * state.width; ++i) state.context[i] = 0.0f;
  for (int64_t i = 0; i < state.rows; ++i) {
    state.largest[i] = kNegativeInfinity;
    state.total[i] = 0.0f;
  }
}

// Copies rows `first_row`, ... of the matrix of queries to the same rows of the scratch memory.
template <typename scalar_t>
void gather_queries(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t first_row, int64_t rows,
                    const Scratch& scratch) {
  const int64_t width = AttentionProblem::padded(problem.dim);
  for (int64_t i = first_row; i < first_row + rows; ++i) {
    const int64_t row = input * problem.per_input + i / (problem.group * problem.queries);
    const int64_t head = kv_head * problem.group + i / problem.queries % problem.group;
    const scalar_t* from = at<scalar_t>(problem.query, row, head, i % problem.queries);
    const int64_t stride = problem.query.strides[3];
    float* to = scratch.query + i * width;
    for (int64_t d = 0; d < problem.dim; ++d) to[d] = to_float(from[d * stride]) * problem.scale;
    for (int64_t d = problem.dim; d < width; ++d) to[d] = 0.0f;
  }
}

// Adds what `other` has seen to `state`.
inline void merge(const State& state, const State& other) {
  for (int64_t i = 0; i < state.rows; ++i) {
    const float a = state.largest[i], b = other.largest[i];
    const float top = a > b ? a : b;
    const float reference = top == kNegativeInfinity ? 0.0f : top;
    const float factor = a == top ? 1.0f : exponential(a - reference);
    const float other_factor = b == top ? 1.0f : exponential(b - reference);
    state.largest[i] = top;
    state.total[i] = state.total[i] * factor + other.total[i] * other_factor;
    const Vector scale = broadcast(factor), other_scale = broadcast(other_factor);
    float* context = state.context + i * state.width;
    const float* more = other.context + i * state.width;
    for (int64_t d = 0; d < state.width; d += kLanes) {
      store(context + d, multiply_add(load(more + d), other_scale, load(context + d) * scale));
    }
  }
}

// `after` are keys that are read after those of the last copy, or null.
template <typename scalar_t>
void attend_suffix_of(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t copy,
                      const Scratch& scratch, const State& state, const scalar_t* after) {
  const int64_t first_row = copy * problem.group * problem.queries;
  const int64_t row = input * problem.per_input + copy, stored = problem.suffix_of(row);
  Block<scalar_t> block;
  const int64_t begin = larger(problem.first_of(row) - problem.prefix_length, 0), length = problem.length_of(row);
  for (int64_t start = begin; start < length; start += kBlock) {
    block.length = smaller(kBlock, length - start);
    const bool last_block = start + kBlock >= length, last_copy = copy + 1 == problem.per_input;
    if (!last_block) {
      block.next_keys = kBlock * problem.suffix_keys.strides[2];
    } else if (last_copy) {
      block.next_keys = distance(at<scalar_t>(problem.suffix_keys, stored, kv_head, start), after);
    } else {
      block.next_keys = start == begin ? problem.suffix_keys.strides[0] : 0;
    }
    const int64_t position = problem.prefix_length + start;
    if (!is_visible(problem, input, kv_head, first_row, state.rows, position, block.length)) continue;
    for (int64_t j = 0; j < block.length; ++j) {
      const int64_t owner = problem.ancestry.data == nullptr
                                ? stored
                                : problem.named_row(*at<int32_t>(problem.ancestry, row, start + j), stored);
      block.keys[j] = at<scalar_t>(problem.suffix_keys, owner, kv_head, start + j);
      block.values[j] = at<scalar_t>(problem.suffix_values, owner, kv_head, start + j);
    }
    attend(problem, input, kv_head, first_row, position, block, scratch, state);
  }
}

// One chunk of the prefix, for the copies [copy, end_copy) of an input, which see it from the same position on. `after` are
// keys that are read after it, or null.
template <typename scalar_t>
void attend_chunk_of(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t chunk, int64_t copy,
                     int64_t end_copy, const Scratch& scratch, const State& all, const scalar_t* after) {
  const int64_t rows_per_copy = problem.group * problem.queries, first_row = copy * rows_per_copy;
  const State state = all.from_row(first_row, (end_copy - copy) * rows_per_copy);
  int64_t begin = larger(chunk * problem.chunk_length, problem.first_of(input * problem.per_input + copy));
  int64_t stop = smaller(problem.prefix_length, (chunk + 1) * problem.chunk_length);
  const int64_t stored = problem.prefix_of(input);
  if (problem.starts != nullptr) begin = larger(begin, problem.starts[stored]);
  if (problem.ends != nullptr) stop = smaller(stop, problem.ends[stored]);
  Block<scalar_t> block;
  for (int64_t start = begin; start < stop; start += kBlock) {
    block.length = smaller(kBlock, stop - start);
    block.next_keys = start + kBlock < stop
                          ? kBlock * problem.prefix_keys.strides[2]
                          : distance(at<scalar_t>(problem.prefix_keys, stored, kv_head, start), after);
    if (!is_visible(problem, input, kv_head, first_row, state.rows, start, block.length)) continue;
    for (int64_t j = 0; j < block.length; ++j) {
      block.keys[j] = at<scalar_t>(problem.prefix_keys, stored, kv_head, start + j);
      block.values[j] = at<scalar_t>(problem.prefix_values, stored, kv_head, start + j);
    }
    attend(problem, input, kv_head, first_row, start, block, scratch, state);
  }
}

// Divides by the sums of the weights, and writes the output of some rows of the matrix.
template <typename scalar_t>
void finish(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t first_row, const State& state) {
  const int64_t heads = problem.kv_heads * problem.group;
  for (int64_t i = 0; i < state.rows; ++i) {
    const int64_t matrix_row = first_row + i;
    const int64_t row = input * problem.per_input + matrix_row / (problem.group * problem.queries);
    const int64_t head = kv_head * problem.group + matrix_row / problem.queries % problem.group;
    const int64_t place = (row * heads + head) * problem.queries + matrix_row % problem.queries;
    scalar_t* to = static_cast<scalar_t*>(problem.output) + place * problem.value_dim;
    const float* context = state.context + i * state.width;
    // Without a weight nothing was attended to, and the context is zeros.
    const float total = state.total[i] == 0.0f ? 1.0f : state.total[i];
    for (int64_t d = 0; d < problem.value_dim; ++d) to[d] = scalar_t(context[d] / total);
  }
}

// ---- tasks

// Memory for a thread, aligned to cache lines.
class Workspace {
 public:
  explicit Workspace(const AttentionProblem& problem) {
    const int64_t rows = problem.matrix_rows();
    const int64_t query = rows * AttentionProblem::padded(problem.dim), scores = rows * kBlock;
    const int64_t factors = AttentionProblem::padded(rows);
    const int64_t size = query + scores + factors + problem.state_size();
    memory_ = allocate_floats(size);
    scratch = {memory_, memory_ + query, memory_ + query + scores, memory_ + query + scores + factors};
  }
  ~Workspace() { free_floats(memory_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  Scratch scratch;

 private:
  float* memory_;
};

// The keys with which a task begins; null if there are none.
template <typename scalar_t>
inline const scalar_t* first_keys(const AttentionProblem& problem, int64_t task) {
  const int64_t kv_head = task / problem.chunks % problem.kv_heads, input = task / problem.chunks / problem.kv_heads;
  int64_t begin = larger(task % problem.chunks * problem.chunk_length, problem.first_of(input * problem.per_input));
  const int64_t stored = problem.prefix_of(input);
  if (problem.starts != nullptr) begin = larger(begin, problem.starts[stored]);
  return begin < problem.prefix_length ? at<scalar_t>(problem.prefix_keys, stored, kv_head, begin) : nullptr;
}

template <typename scalar_t>
void attend_prefix(const AttentionProblem& problem, int64_t begin, int64_t end) {
  const Workspace workspace(problem);
  const Scratch& scratch = workspace.scratch;
  const int64_t rows = problem.matrix_rows(), rows_per_copy = problem.group * problem.queries;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t chunk = task % problem.chunks;
    const int64_t kv_head = task / problem.chunks % problem.kv_heads;
    const int64_t input = task / problem.chunks / problem.kv_heads;
    const State state =
        state_in(problem.fused ? scratch.state : problem.states + task * problem.state_size(), problem);
    clear(state);
    gather_queries<scalar_t>(problem, input, kv_head, 0, rows, scratch);
    const int64_t row = input * problem.per_input;
    const scalar_t* next = task + 1 < end ? first_keys<scalar_t>(problem, task + 1) : nullptr;
    const bool has_suffix = problem.fused && problem.length_of(row) > 0;
    const scalar_t* suffix = has_suffix ? at<scalar_t>(problem.suffix_keys, problem.suffix_of(row), kv_head) : next;
    for (int64_t copy = 0, end_copy; copy < problem.per_input; copy = end_copy) {
      for (end_copy = copy + 1; end_copy < problem.per_input; ++end_copy) {
        if (problem.first_of(row + end_copy) != problem.first_of(row + copy)) break;
      }
      attend_chunk_of<scalar_t>(problem, input, kv_head, chunk, copy, end_copy, scratch, state, suffix);
    }
    if (!problem.fused) continue;
    for (int64_t copy = 0; copy < problem.per_input; ++copy) {
      attend_suffix_of<scalar_t>(problem, input, kv_head, copy, scratch,
                                 state.from_row(copy * rows_per_copy, rows_per_copy), next);
    }
    finish<scalar_t>(problem, input, kv_head, 0, state);
  }
}

template <typename scalar_t>
void attend_suffix(const AttentionProblem& problem, int64_t begin, int64_t end) {
  const Workspace workspace(problem);
  const int64_t rows_per_copy = problem.group * problem.queries;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t copy = task % problem.per_input, matrix = task / problem.per_input;
    const int64_t kv_head = matrix % problem.kv_heads, input = matrix / problem.kv_heads;
    const int64_t first_row = copy * rows_per_copy;
    float* states = problem.states + matrix * problem.chunks * problem.state_size();
    const State state = state_in(states, problem).from_row(first_row, rows_per_copy);
    for (int64_t chunk = 1; chunk < problem.chunks; ++chunk) {
      merge(state, state_in(states + chunk * problem.state_size(), problem).from_row(first_row, rows_per_copy));
    }
    if (problem.length_of(input * problem.per_input + copy) > 0) {
      gather_queries<scalar_t>(problem, input, kv_head, first_row, rows_per_copy, workspace.scratch);
      attend_suffix_of<scalar_t>(problem, input, kv_head, copy, workspace.scratch, state, nullptr);
    }
    finish<scalar_t>(problem, input, kv_head, first_row, state);
  }
}

inline AttentionKernels kernels(ElementType type) {
  switch (type) {
    case ElementType::kHalf: return {attend_prefix<c10::Half>, attend_suffix<c10::Half>};
    case ElementType::kBFloat16: return {attend_prefix<c10::BFloat16>, attend_suffix<c10::BFloat16>};
    default: return {attend_prefix<float>, attend_suffix<float>};
  }
}
