// Decode attention on the CPU. The schema is defined in fastgen/ops/attention.py.
//
// All queries that read the K/V of one input and kv head, those of every copy and every head of the group, form a
// matrix that reads them once. Long prefixes are read in chunks that are merged afterwards, so that every thread has
// work even for one input (Dao et al., "Flash-Decoding for long-context inference", 2023). The division of a prefix
// only depends on the number of valid positions: the result is the same for any number of threads, and for buffers of
// any size.
#include "attention/problem.h"
#include "isa.h"
#include "operator.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <limits>
#include <memory>

namespace {

using namespace fastgen;

#define FASTGEN_KERNELS "attention/kernel.h"
#define FASTGEN_LOOPS
#include "each_isa.h"

// A prefix is divided until there are about this many tasks, enough for the cores of a socket to end at the same time.
// A chunk has at least kMinChunk positions, which take some hundred times as long to read as its state takes to merge.
constexpr int64_t kTasks = 256;
constexpr int64_t kMinChunk = 256;
// About as many multiplications as pay for waking a thread.
constexpr int64_t kProductsPerTask = 1 << 17;
// The largest head size. Without keys, a tensor that takes no memory may have any size.
constexpr int64_t kMaxDim = 1 << 20;

// These checks keep the kernel inside the memory of its arguments, for any caller.
void check_part(const char* name, const Tensor& part, const Tensor& query, int64_t rows, int64_t kv_heads) {
  STD_TORCH_CHECK(part.scalar_type() == query.scalar_type(), "decode_attention: ", name,
                  " must have the type of the query");
  STD_TORCH_CHECK(part.dim() == 4 && part.size(0) == rows && part.size(1) == kv_heads, "decode_attention: ",
                  name, " must be [", rows, ", ", kv_heads, ", length, dim]");
  STD_TORCH_CHECK(part.stride(3) == 1 || part.size(3) <= 1, "decode_attention: the last dimension of ", name,
                  " must be contiguous");
}

void check_pair(const char* name, const Tensor& keys, const Tensor& values, int64_t dim, int64_t value_dim) {
  STD_TORCH_CHECK(keys.size(2) == values.size(2), "decode_attention: keys and values of the ", name,
                  " must have the same length");
  STD_TORCH_CHECK(keys.size(3) == dim && values.size(3) == value_dim,
                  "decode_attention: the dims of the ", name, " do not fit");
  STD_TORCH_CHECK(dim <= kMaxDim && value_dim <= kMaxDim, "decode_attention: a head of more than ", kMaxDim,
                  " numbers");
}

// The table may have more columns than positions, and rows may have different numbers of positions.
void check_ancestry(const Tensor& ancestry, int64_t rows, const AttentionProblem& problem) {
  STD_TORCH_CHECK(ancestry.scalar_type() == ScalarType::Int && ancestry.size(0) == rows,
                  "decode_attention: ancestry must be an int32 tensor [", rows, ", ", problem.suffix_length, "]");
  const auto* table = numbers_of<const int32_t>(ancestry);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < problem.length_of(i); ++j) {
      const int32_t row = table[i * ancestry.stride(0) + j * ancestry.stride(1)];
      STD_TORCH_CHECK(row >= 0 && row < rows, "decode_attention: ancestry names row ", row, " of ", rows);
    }
  }
}

ElementType element_type(ScalarType type) {
  switch (type) {
    case ScalarType::Bool: return ElementType::kBool;
    case ScalarType::Half: return ElementType::kHalf;
    case ScalarType::BFloat16: return ElementType::kBFloat16;
    default: return ElementType::kFloat;
  }
}

Strided strided(const Tensor& x) {
  Strided result;
  result.data = x.const_data_ptr();
  for (int64_t i = 0; i < x.dim(); ++i) result.strides[i] = x.stride(i);
  return result;
}

// Returns the mask as if it had been expanded to the shape of the scores.
Strided strided_mask(const Tensor& mask, const int64_t (&scores)[4]) {
  STD_TORCH_CHECK(mask.dim() <= 4, "decode_attention: the mask has ", mask.dim(), " dimensions");
  Strided result;
  result.data = mask.const_data_ptr();
  const int64_t missing = 4 - mask.dim();
  for (int64_t i = 0; i < mask.dim(); ++i) {
    const int64_t size = mask.size(i), wanted = scores[missing + i];
    STD_TORCH_CHECK(size == wanted || size == 1, "decode_attention: dimension ", i, " of the mask is ", size,
                    " and cannot be expanded to ", wanted);
    result.strides[missing + i] = size == 1 ? 0 : mask.stride(i);
  }
  return result;
}

void divide(AttentionProblem& problem, int64_t threads) {
  const int64_t matrices = problem.batch * problem.kv_heads;
  int64_t longest = 1;
  for (int64_t input = 0; input < problem.batch; ++input) {
    longest = std::max(longest, problem.end_of(input) - problem.start_of(input));
  }
  problem.chunks = std::clamp<int64_t>(kTasks / matrices, 1, quotient(longest, kMinChunk));
  problem.chunk_length = quotient(longest, problem.chunks);
  // Suffixes longer than the prefix get tasks of their own if there are too few matrices.
  const bool long_suffixes = matrices < 4 * threads && problem.suffix_length * problem.per_input > longest;
  problem.fused = problem.chunks == 1 && !long_suffixes;
}

void attend(AttentionProblem& problem, ElementType type) {
  const AttentionKernels kernels = FASTGEN_CHOOSE(kernels(type));
  divide(problem, torch::stable::get_num_threads());
  const int64_t tasks = problem.batch * problem.kv_heads * problem.chunks;
  // Checks that the scratch memory of threads and chunks, in bytes, does not overflow.
  product_of("attention", tasks, problem.per_input, problem.group, problem.queries, sizeof(float),
                      problem.dim + problem.value_dim + 256);
  std::unique_ptr<float[]> states;
  if (!problem.fused) {
    states.reset(new float[tasks * problem.state_size()]);
    problem.states = states.get();
  }
  const int64_t products_per_position = problem.group * problem.queries * (problem.dim + problem.value_dim);
  const auto grain = [](int64_t products) { return 1 + kProductsPerTask / (1 + products); };
  const int64_t suffix_products = products_per_position * problem.suffix_length;
  const int64_t chunk_products = products_per_position * problem.per_input * problem.chunk_length;
  parallel_for(0, tasks, grain(chunk_products + (problem.fused ? suffix_products * problem.per_input : 0)),
               [&](int64_t begin, int64_t end) { kernels.attend_prefix(problem, begin, end); });
  if (problem.fused) return;
  parallel_for(0, problem.batch * problem.kv_heads * problem.per_input, grain(suffix_products),
               [&](int64_t begin, int64_t end) { kernels.attend_suffix(problem, begin, end); });
}

const int32_t* bounds(const char* name, const std::optional<Tensor>& given, int64_t batch) {
  if (!given) return nullptr;
  return checked<const int32_t>(*given, {batch}, "decode_attention: ", name, " must be int32, [", batch, "]");
}

void decode_attention_out(Tensor output, Tensor query, Tensor prefix_keys, Tensor prefix_values,
                          std::optional<Tensor> suffix_keys, std::optional<Tensor> suffix_values,
                          std::optional<Tensor> mask, std::optional<double> scale, std::optional<Tensor> starts,
                          std::optional<Tensor> ends, std::optional<Tensor> suffix_lengths,
                          std::optional<Tensor> ancestry, std::optional<int64_t> window, bool causal,
                          std::optional<Tensor> row_map) {
  Arguments("decode_attention")
      .writes(output)
      .reads(query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, starts, ends, suffix_lengths, ancestry,
             row_map);
  const ScalarType type = query.scalar_type();
  STD_TORCH_CHECK(query.dim() == 4, "decode_attention: query must be [rows, heads, Q, dim]");
  STD_TORCH_CHECK(is_floating(type), "decode_attention: query must be float32, float16 or bfloat16");
  STD_TORCH_CHECK(prefix_keys.dim() == 4 && prefix_values.dim() == 4,
                  "decode_attention: the prefix must be [batch, kv heads, N, dim]");
  const int64_t rows = query.size(0), heads = query.size(1), queries = query.size(2), dim = query.size(3);
  const int64_t batch = prefix_keys.size(0), kv_heads = prefix_keys.size(1), value_dim = prefix_values.size(3);
  STD_TORCH_CHECK(suffix_keys.has_value() == suffix_values.has_value(),
                  "decode_attention: a suffix needs both keys and values");
  STD_TORCH_CHECK(suffix_keys || (!ancestry && !suffix_lengths && !causal),
                  "decode_attention: lengths, ancestry and the order of queries are those of a suffix");
  STD_TORCH_CHECK(!causal || (!window && !row_map), "decode_attention: a causal call has no window and no row map");
  STD_TORCH_CHECK(!ancestry || !row_map, "decode_attention: a row map goes without an ancestry");
  // Rows of the KV cache: those of the query, if it has no row map.
  const int64_t stored = !row_map ? rows : suffix_keys && suffix_keys->dim() == 4 ? suffix_keys->size(0) : batch;
  STD_TORCH_CHECK(batch > 0 ? stored % batch == 0 : stored == 0 && rows == 0, "decode_attention: the ", stored,
                  " rows must be a multiple of the ", batch, " rows of the prefix");
  STD_TORCH_CHECK(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, "decode_attention: the ", heads,
                  " heads of the query must be a multiple of the ", kv_heads, " heads of the prefix");
  check_part("prefix_keys", prefix_keys, query, batch, kv_heads);
  check_part("prefix_values", prefix_values, query, batch, kv_heads);
  check_pair("prefix", prefix_keys, prefix_values, dim, value_dim);
  STD_TORCH_CHECK(is_like(output, type, {rows, heads, queries, value_dim}),
                  "decode_attention: the result must be [rows, heads, Q, dim of the values]");
  AttentionProblem problem{};
  problem.batch = batch;
  problem.kv_heads = kv_heads;
  problem.queries = queries;
  problem.causal = causal;
  problem.prefix_length = prefix_keys.size(2);
  problem.dim = dim;
  problem.value_dim = value_dim;
  problem.starts = bounds("starts", starts, batch);
  problem.ends = bounds("ends", ends, batch);
  problem.has_window = window.has_value();
  problem.window = std::max<int64_t>(window.value_or(0), 0);
  int64_t capacity = 0;
  if (suffix_keys) {
    check_part("suffix_keys", *suffix_keys, query, stored, kv_heads);
    check_part("suffix_values", *suffix_values, query, stored, kv_heads);
    check_pair("suffix", *suffix_keys, *suffix_values, dim, value_dim);
    capacity = suffix_keys->size(2);
    problem.suffix_keys = strided(*suffix_keys);
    problem.suffix_values = strided(*suffix_values);
  }
  STD_TORCH_CHECK(!suffix_lengths || OfRows::fits(*suffix_lengths, rows),
                  "decode_attention: the length of the suffix must be one int64, or one for each row");
  problem.mask_type = ElementType::kBool;
  if (mask) {
    const ScalarType mask_type = mask->scalar_type();
    STD_TORCH_CHECK(mask_type == ScalarType::Bool || mask_type == type || mask_type == ScalarType::Float,
                    "decode_attention: the mask must be bool, float32 or of the type of the query");
    problem.mask = strided_mask(*mask, {rows, heads, queries, problem.prefix_length + capacity});
    problem.mask_type = element_type(mask_type);
  }
  STD_TORCH_CHECK(!ancestry || (ancestry->dim() == 2 && ancestry->size(1) >= capacity),
                  "decode_attention: ancestry must have a row of the positions of the suffix, ", capacity);
  if (output.numel() == 0) return;

  std::vector<int64_t> lengths, cache_rows;
  problem.suffix_length = capacity;
  if (suffix_lengths) {
    problem.suffix_length = 0;
    const OfRows given(*suffix_lengths);
    for (int64_t row = 0; row < suffix_lengths->numel(); ++row) {
      lengths.push_back(std::clamp<int64_t>(given[row], 0, capacity));
      problem.suffix_length = std::max(problem.suffix_length, lengths.back());
    }
    if (lengths.size() > 1) problem.lengths = lengths.data();
  }
  if (ancestry) {
    check_ancestry(*ancestry, rows, problem);
    problem.ancestry = strided(*ancestry);
  }
  problem.per_input = stored / batch;
  problem.stored = stored;
  if (row_map) {
    cache_rows = row_map_of("decode_attention", *row_map, rows, stored);
    problem.row_map = cache_rows.data();
    problem.copies = problem.per_input;
    problem.batch = rows;
    problem.per_input = 1;
  }
  problem.group = heads / kv_heads;
  problem.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(dim)));
  problem.query = strided(query);
  problem.prefix_keys = strided(prefix_keys);
  problem.prefix_values = strided(prefix_values);
  problem.output = output.mutable_data_ptr();
  attend(problem, element_type(type));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("decode_attention_out", FASTGEN_PLANNED(decode_attention_out));
}
