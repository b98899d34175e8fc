// Decode attention on the CPU: one call of the operator as its kernels see it, for any instruction set.
#pragma once

#include <cstdint>

namespace fastgen {

enum class ElementType { kBool, kFloat, kHalf, kBFloat16 };

// A tensor of up to four dimensions: its memory, and its strides in elements; broadcast dimensions have stride 0.
struct Strided {
  const void* data = nullptr;
  int64_t strides[4] = {0, 0, 0, 0};
};

// Shapes: query [rows, heads, queries, dim], prefix [batch, kv heads, prefix length, dim], suffix
// [rows, kv heads, suffix length, dim], mask [rows, heads, queries, prefix + suffix length], ancestry
// [rows, suffix length], with rows = batch * per_input and heads = kv heads * group.
//
// All queries that read the K/V of one input and kv head are processed together, as a matrix of
// per_input * group * queries rows in that order.
struct AttentionProblem {
  int64_t batch, per_input, kv_heads, group, queries, prefix_length, suffix_length, dim, value_dim;
  float scale;
  Strided query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, ancestry;
  ElementType mask_type;
  // Valid positions [starts, ends) of each input's prefix; all of them if these are null.
  const int32_t *starts, *ends;
  // The valid length of each row's suffix, at most `suffix_length`; if null, `suffix_length` for all rows.
  const int64_t* lengths;
  // With a window, only the last `window` positions of prefix and suffix together are valid.
  bool has_window;
  int64_t window;
  // Row r reads the suffix of row row_map[r] of the KV cache, and the prefix of that row's input, which `copies` rows
  // share; null: its own. With a row map, each row counts as an input, and `starts` and `ends` belong to the cache's
  // inputs.
  const int64_t* row_map;
  int64_t copies;
  int64_t stored;  // rows of the KV cache
  // The queries of a row belong to its last positions, one each: none of them sees later positions.
  bool causal;
  void* output;  // [rows, heads, queries, value_dim], contiguous

  // The prefix is read in chunks, possibly in parallel. Each results in a state, see `State` in block.h; `states` holds
  // [batch * kv heads, chunks] of them. With `fused`, there is one chunk, and its task also reads the suffixes and
  // writes the output.
  int64_t chunks, chunk_length;
  bool fused;
  float* states;

  // Returns the cache row that has a position of the suffix of `row`: its own if another thread has changed the
  // ancestry table since it was checked.
  int64_t named_row(int32_t named, int64_t row) const { return named >= 0 && named < stored ? named : row; }
  int64_t suffix_of(int64_t row) const { return row_map == nullptr ? row : row_map[row]; }
  int64_t prefix_of(int64_t input) const { return row_map == nullptr ? input : row_map[input] / copies; }
  // The valid positions of an input's prefix. They are divided into chunks from the first one on, so that the buffer's
  // size does not change a bit of the result.
  int64_t start_of(int64_t input) const {
    const int64_t start = starts == nullptr ? 0 : starts[prefix_of(input)];
    return start > 0 ? start : 0;
  }
  int64_t end_of(int64_t input) const {
    const int64_t end = ends == nullptr ? prefix_length : ends[prefix_of(input)];
    return end < prefix_length ? end : prefix_length;
  }
  int64_t start_of(int64_t input, int64_t chunk) const { return start_of(input) + chunk * chunk_length; }
  int64_t length_of(int64_t row) const { return lengths == nullptr ? suffix_length : lengths[row]; }
  // Returns the first valid position of a row, over prefix and suffix together.
  int64_t first_of(int64_t row) const {
    const int64_t first = has_window ? prefix_length + length_of(row) - window : 0;
    return first > 0 ? first : 0;
  }
  int64_t matrix_rows() const { return per_input * group * queries; }
  // Pads rows in scratch memory to whole vectors of the largest width.
  static int64_t padded(int64_t width) { return (width + 15) / 16 * 16; }
  int64_t state_size() const { return matrix_rows() * (padded(value_dim) + 2); }
};

// A kernel for one element type. Tasks of `attend_prefix` are (input, kv head, chunk), those of `attend_suffix` are
// (input, kv head, copy), the last varying fastest.
struct AttentionKernels {
  void (*attend_prefix)(const AttentionProblem& problem, int64_t begin, int64_t end);
  void (*attend_suffix)(const AttentionProblem& problem, int64_t begin, int64_t end);
};

}  // namespace fastgen
