// Decode attention for one instruction set. decode_attention.cpp compiles it for each with each_isa.h, therefore
// without an include guard.
//
// The softmax is computed online, block by block (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018; Dao et al., "FlashAttention", NeurIPS 2022): only one block's scores exist at a time, and the sums so far are
// rescaled whenever a larger score occurs.

#include "operations.h"

#include "block.h"

// Adds the positions of a block to the state of the queries `first_row`, ... of the matrix.
template <typename scalar_t>
FASTGEN_TARGET void attend(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t first_row,
                           int64_t position, Block<scalar_t>& block, const Scratch& scratch, const State& state) {
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

// ---- initialising and finishing a matrix of queries

FASTGEN_TARGET inline void clear(const State& state) {
  for (int64_t i = 0; i < state.rows * state.width; ++i) state.context[i] = 0.0f;
  for (int64_t i = 0; i < state.rows; ++i) {
    state.largest[i] = kNegativeInfinity;
    state.total[i] = 0.0f;
  }
}

// Copies rows `first_row`, ... of the matrix of queries to the same rows of the scratch memory.
template <typename scalar_t>
FASTGEN_TARGET void gather_queries(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t first_row,
                                   int64_t rows, const Scratch& scratch) {
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

// Merges `other` into `state`.
FASTGEN_TARGET inline void merge(const State& state, const State& other) {
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
    for (int64_t d = 0; d < state.width; d += kWidth) {
      store(context + d, multiply_add(load(more + d), other_scale, load(context + d) * scale));
    }
  }
}

// `after`: the keys to read after those of the last copy, or null.
template <typename scalar_t>
FASTGEN_TARGET void attend_suffix_of(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t copy,
                                     const Scratch& scratch, const State& state, const scalar_t* after) {
  const int64_t first_row = copy * problem.group * problem.queries;
  const int64_t row = input * problem.per_input + copy, stored = problem.suffix_of(row);
  Block<scalar_t> block;
  const int64_t begin = std::max<int64_t>(problem.first_of(row) - problem.prefix_length, 0), length = problem.length_of(row);
  for (int64_t start = begin; start < length; start += kBlock) {
    block.length = std::min<int64_t>(kBlock, length - start);
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

// Attends to one chunk of the prefix for the copies [copy, end_copy) of an input, which see it from the same position
// on. `after`: the keys to read next, or null.
template <typename scalar_t>
FASTGEN_TARGET void attend_chunk_of(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t chunk,
                                    int64_t copy, int64_t end_copy, const Scratch& scratch, const State& all,
                                    const scalar_t* after) {
  const int64_t rows_per_copy = problem.group * problem.queries, first_row = copy * rows_per_copy;
  const State state = all.from_row(first_row, (end_copy - copy) * rows_per_copy);
  const int64_t stored = problem.prefix_of(input);
  const int64_t begin =
      std::max<int64_t>(problem.start_of(input, chunk), problem.first_of(input * problem.per_input + copy));
  const int64_t stop = std::min<int64_t>(problem.end_of(input), problem.start_of(input, chunk + 1));
  Block<scalar_t> block;
  for (int64_t start = begin; start < stop; start += kBlock) {
    block.length = std::min<int64_t>(kBlock, stop - start);
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
FASTGEN_TARGET void finish(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t first_row,
                           const State& state) {
  const int64_t heads = problem.kv_heads * problem.group;
  for (int64_t i = 0; i < state.rows; ++i) {
    const int64_t matrix_row = first_row + i;
    const int64_t row = input * problem.per_input + matrix_row / (problem.group * problem.queries);
    const int64_t head = kv_head * problem.group + matrix_row / problem.queries % problem.group;
    const int64_t place = (row * heads + head) * problem.queries + matrix_row % problem.queries;
    scalar_t* to = static_cast<scalar_t*>(problem.output) + place * problem.value_dim;
    const float* context = state.context + i * state.width;
    // Without any weight the context is zeros.
    const float total = state.total[i] == 0.0f ? 1.0f : state.total[i];
    for (int64_t d = 0; d < problem.value_dim; ++d) to[d] = scalar_t(context[d] / total);
  }
}

// ---- tasks

// Scratch memory of a thread for a problem.
struct Workspace {
  explicit Workspace(const AttentionProblem& problem)
      : query(problem.matrix_rows() * AttentionProblem::padded(problem.dim)), scores(problem.matrix_rows() * kBlock),
        factors(AttentionProblem::padded(problem.matrix_rows())), memory(query + scores + factors + problem.state_size()),
        scratch{memory.data(), memory.data() + query, memory.data() + query + scores,
                memory.data() + query + scores + factors} {}

  const int64_t query, scores, factors;
  const Aligned<float> memory;
  const Scratch scratch;
};

// Returns the first keys of a task; null if there are none.
template <typename scalar_t>
FASTGEN_TARGET inline const scalar_t* first_keys(const AttentionProblem& problem, int64_t task) {
  const int64_t kv_head = task / problem.chunks % problem.kv_heads, input = task / problem.chunks / problem.kv_heads;
  const int64_t begin =
      std::max<int64_t>(problem.start_of(input, task % problem.chunks), problem.first_of(input * problem.per_input));
  return begin < problem.prefix_length ? at<scalar_t>(problem.prefix_keys, problem.prefix_of(input), kv_head, begin) : nullptr;
}

template <typename scalar_t>
FASTGEN_TARGET void attend_prefix(const AttentionProblem& problem, int64_t begin, int64_t end) {
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
FASTGEN_TARGET void attend_suffix(const AttentionProblem& problem, int64_t begin, int64_t end) {
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

FASTGEN_TARGET inline AttentionKernels kernels(ElementType type) {
  switch (type) {
    case ElementType::kHalf: return {attend_prefix<c10::Half>, attend_suffix<c10::Half>};
    case ElementType::kBFloat16: return {attend_prefix<c10::BFloat16>, attend_suffix<c10::BFloat16>};
    default: return {attend_prefix<float>, attend_suffix<float>};
  }
}
