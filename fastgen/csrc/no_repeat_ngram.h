// No-repeat n-gram: the code that the CPU and the CUDA kernel share, which is all but the distribution of rows.
//
// It only uses torch's stable C interface (torch/csrc/stable), so that one binary serves every Python version and every
// torch from TORCH_TARGET_VERSION on.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <numeric>
#include <optional>

#ifdef __CUDACC__
#define FASTGEN_HOST_DEVICE __host__ __device__
#else
#define FASTGEN_HOST_DEVICE
#endif

namespace fastgen {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The valid length of each row. It is read where the rows are processed (on a GPU, in the kernel), so that a captured
// graph sees the lengths at replay.
struct Lengths {
  const void* data;  // null: every row is full
  bool wide;         // int64, else int32
  int64_t stride;
  int64_t full;

  // Clamps a length outside the row: refusing it would need to wait for the device, and it must not be followed.
  FASTGEN_HOST_DEVICE int64_t operator[](int64_t row) const {
    if (data == nullptr) return full;
    const int64_t length = wide ? static_cast<const int64_t*>(data)[row * stride]
                                : static_cast<const int32_t*>(data)[row * stride];
    return length < 0 ? 0 : (length > full ? full : length);
  }
};

template <typename token_t>
struct Tokens {
  const token_t* data;
  int64_t row_stride;
  int64_t stride;
  Lengths lengths;
};

// One call of the operator as a kernel sees it. Scores are only overwritten with one constant, so that only the size of
// their type matters: word_t is an unsigned integer of that size.
template <typename word_t, typename token_t>
struct Problem {
  word_t* scores;
  word_t negative_infinity;
  int64_t rows, vocabulary;
  int64_t score_row_stride, score_stride;
  Tokens<token_t> tokens;  // they end with the prefix that the next token continues
  Tokens<token_t> source;  // the source of the n-grams: the context, or the tokens themselves
  int64_t rows_per_source_row;
  int64_t n;

  // The index of a row's last n - 1 tokens, which the next one would complete to an n-gram; negative if it has fewer.
  FASTGEN_HOST_DEVICE int64_t first_of_prefix(int64_t row) const { return tokens.lengths[row] - (n - 1); }

  // Those tokens, tokens.stride apart. Another thread may have changed the length since `first` was computed.
  FASTGEN_HOST_DEVICE const token_t* prefix(int64_t row, int64_t first) const {
    return tokens.data + row * tokens.row_stride + first * tokens.stride;
  }

  // Bans the token after each occurrence of the prefix; checks the windows first, first + step, ... of the row.
  FASTGEN_HOST_DEVICE void ban(int64_t row, const token_t* prefix, int64_t prefix_stride, int64_t first,
                               int64_t step) const {
    const int64_t source_row = row / rows_per_source_row;
    const token_t* window = source.data + source_row * source.row_stride;
    const int64_t windows = source.lengths[source_row] - n + 1;
    for (int64_t i = first; i < windows; i += step) {
      // Backwards, because the newest token of the prefix is the least likely to match.
      int64_t k = n - 1;
      while (k > 0 && window[(i + k - 1) * source.stride] == prefix[(k - 1) * prefix_stride]) --k;
      if (k > 0) continue;
      const int64_t token = window[(i + n - 1) * source.stride];
      if (token >= 0 && token < vocabulary) {
        scores[row * score_row_stride + token * score_stride] = negative_infinity;
      }
    }
  }
};

// Limits a dimension: expanded tensors may have any size, and would take years to traverse.
constexpr int64_t kLargest = (int64_t{1} << 31) - 1;

inline bool is_integer(ScalarType type) { return type == ScalarType::Int || type == ScalarType::Long; }

// Two different elements of a matrix share memory exactly if some non-zero move by (rows, columns) within its bounds
// does not move in memory; the shortest such move is (column stride / g, row stride / g) with g their common divisor.
inline bool overlaps_itself(const Tensor& matrix) {
  if (matrix.numel() < 2) return false;
  const int64_t row_stride = matrix.stride(0), column_stride = matrix.stride(1);
  const int64_t divisor = std::gcd(row_stride, column_stride);
  if (divisor == 0) return true;
  return column_stride / divisor < matrix.size(0) && row_stride / divisor < matrix.size(1);
}

inline void check_lengths(const char* name, const std::optional<Tensor>& lengths, int64_t rows) {
  if (!lengths) return;
  STD_TORCH_CHECK(lengths->dim() == 1 && lengths->size(0) == rows, "no_repeat_ngram_: ", name,
                  " must have one element for each of the ", rows, " rows");
  STD_TORCH_CHECK(is_integer(lengths->scalar_type()), "no_repeat_ngram_: ", name, " must be int32 or int64");
}

// Keep in step with `_check` in fastgen/ops/no_repeat_ngram.py, which checks the same for the reference.
inline void check(const Tensor& scores, const Tensor& tokens, const std::optional<Tensor>& lengths, int64_t n,
                  const std::optional<Tensor>& context, const std::optional<Tensor>& context_lengths) {
  const ScalarType type = scores.scalar_type();
  STD_TORCH_CHECK(n >= 1, "no_repeat_ngram_: n must be at least 1, but is ", n);
  STD_TORCH_CHECK(scores.dim() == 2, "no_repeat_ngram_: scores must be [rows, vocabulary], but has ", scores.dim(),
                  " dimensions");
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16 ||
                      type == ScalarType::Double,
                  "no_repeat_ngram_: scores must be float32, float16, bfloat16 or float64");
  STD_TORCH_CHECK(!overlaps_itself(scores),
                  "no_repeat_ngram_: elements of scores share memory (an expanded tensor?); pass a copy");
  STD_TORCH_CHECK(tokens.dim() == 2 && tokens.size(0) == scores.size(0),
                  "no_repeat_ngram_: tokens must be [rows, length] with the ", scores.size(0), " rows of scores");
  STD_TORCH_CHECK(is_integer(tokens.scalar_type()), "no_repeat_ngram_: tokens must be int32 or int64");
  check_lengths("lengths", lengths, tokens.size(0));
  for (const Tensor* each : {&scores, &tokens, context ? &*context : &tokens}) {
    for (int64_t dim = 0; dim < each->dim(); ++dim) {
      STD_TORCH_CHECK(each->size(dim) <= kLargest, "no_repeat_ngram_: a size beyond 32 bits: ", each->size(dim));
    }
  }
  STD_TORCH_CHECK(context || !context_lengths, "no_repeat_ngram_: context_lengths needs a context");
  if (context) {
    STD_TORCH_CHECK(context->dim() == 2, "no_repeat_ngram_: context must be [context rows, length]");
    STD_TORCH_CHECK(context->scalar_type() == tokens.scalar_type(),
                    "no_repeat_ngram_: context must have the type of tokens");
    STD_TORCH_CHECK(context->size(0) > 0 ? scores.size(0) % context->size(0) == 0 : scores.size(0) == 0,
                    "no_repeat_ngram_: the ", scores.size(0), " rows of scores must be a multiple of the ",
                    context->size(0), " rows of context");
    check_lengths("context_lengths", context_lengths, context->size(0));
  }
  const auto here = [&](const Tensor& other) {
    return other.is_cuda() == scores.is_cuda() && other.is_cpu() == scores.is_cpu() &&
           other.get_device_index() == scores.get_device_index();
  };
  STD_TORCH_CHECK(here(tokens) && (!lengths || here(*lengths)) && (!context || here(*context)) &&
                      (!context_lengths || here(*context_lengths)),
                  "no_repeat_ngram_: all tensors must be on the device of scores");
}

inline Lengths lengths_of(const std::optional<Tensor>& lengths, int64_t full) {
  if (!lengths) return {nullptr, false, 0, full};
  return {lengths->const_data_ptr(), lengths->scalar_type() == ScalarType::Long, lengths->stride(0), full};
}

template <typename token_t>
Tokens<token_t> tokens_of(const Tensor& tokens, const std::optional<Tensor>& lengths) {
  return {static_cast<const token_t*>(tokens.const_data_ptr()), tokens.stride(0), tokens.stride(1),
          lengths_of(lengths, tokens.size(1))};
}

// Checks the arguments and calls `run` with the Problem, unless no row can have a banned token.
template <typename Run>
void solve(const Tensor& scores, const Tensor& tokens, const std::optional<Tensor>& lengths, int64_t n,
           const std::optional<Tensor>& context, const std::optional<Tensor>& context_lengths, const Run& run) {
  check(scores, tokens, lengths, n, context, context_lengths);
  const Tensor& source = context ? *context : tokens;
  if (scores.numel() == 0 || n > source.size(1) || n - 1 > tokens.size(1)) return;

  const auto with_types = [&](auto negative_infinity, auto token) {
    using word_t = decltype(negative_infinity);
    using token_t = decltype(token);
    run(Problem<word_t, token_t>{
        static_cast<word_t*>(scores.mutable_data_ptr()), negative_infinity,
        scores.size(0), scores.size(1), scores.stride(0), scores.stride(1),
        tokens_of<token_t>(tokens, lengths), tokens_of<token_t>(source, context ? context_lengths : lengths),
        scores.size(0) / source.size(0), n});
  };
  const auto with_score = [&](auto negative_infinity) {
    if (tokens.scalar_type() == ScalarType::Long) {
      with_types(negative_infinity, int64_t{});
    } else {
      with_types(negative_infinity, int32_t{});
    }
  };
  switch (scores.scalar_type()) {  // check() allows these four types
    case ScalarType::Half: return with_score(uint16_t{0xFC00});
    case ScalarType::BFloat16: return with_score(uint16_t{0xFF80});
    case ScalarType::Double: return with_score(uint64_t{0xFFF0000000000000});
    default: return with_score(uint32_t{0xFF800000});
  }
}

}  // namespace fastgen
