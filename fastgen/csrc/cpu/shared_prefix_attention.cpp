// Shared-prefix attention on the CPU. The schema is defined in fastgen/ops/attention.py.
//
// All queries that read the K/V of one input and kv head, those of every copy and of every head of the group, are a
// matrix that goes over it once. Long prefixes are read in chunks that are put together afterwards, so that there is
// work for every thread even with one input (Dao et al., "Flash-Decoding for long-context inference", 2023). How a
// prefix is divided depends on shapes alone: the result is the same for any number of threads.
#include "attention/kernels.h"
#include "checks.h"
#include "parallel.h"
#include "plan.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

namespace {

using fastgen::AttentionProblem;
using fastgen::ElementType;
using fastgen::Strided;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A prefix is divided until there are about so many tasks, enough for the cores of a socket to end at the same time. A
// chunk has at least kMinChunk positions, which take some hundred times as long to read as its state does to merge.
constexpr int64_t kTasks = 256;
constexpr int64_t kMinChunk = 256;
// About as many multiplications as it takes to pay for waking a thread.
constexpr int64_t kProductsPerTask = 1 << 17;
// Numbers of a head, at most. Without keys, a tensor that takes no memory may have any number.
constexpr int64_t kMaxDim = 1 << 20;

// These keep the kernel inside the memory of its arguments, whoever calls the operator.
void check_part(const char* name, const Tensor& part, const Tensor& query, int64_t rows, int64_t kv_heads) {
  STD_TORCH_CHECK(part.is_cpu() && part.scalar_type() == query.scalar_type(), "shared_prefix_attention: ", name,
                  " must have the device and the type of the query");
  STD_TORCH_CHECK(part.dim() == 4 && part.size(0) == rows && part.size(1) == kv_heads, "shared_prefix_attention: ",
                  name, " must be [", rows, ", ", kv_heads, ", length, dim]");
  STD_TORCH_CHECK(part.stride(3) == 1 || part.size(3) <= 1, "shared_prefix_attention: the last dimension of ", name,
                  " must be contiguous");
}

void check_pair(const char* name, const Tensor& keys, const Tensor& values, int64_t dim, int64_t value_dim) {
  STD_TORCH_CHECK(keys.size(2) == values.size(2), "shared_prefix_attention: keys and values of the ", name,
                  " must have the same length");
  STD_TORCH_CHECK(keys.size(3) == dim && values.size(3) == value_dim,
                  "shared_prefix_attention: the dims of the ", name, " do not fit");
  STD_TORCH_CHECK(dim <= kMaxDim && value_dim <= kMaxDim, "shared_prefix_attention: a head of more than ", kMaxDim,
                  " numbers");
}

// The table may have more columns than there are positions, and rows may have fewer positions than others.
void check_ancestry(const Tensor& ancestry, int64_t rows, const AttentionProblem& problem) {
  const int64_t length = problem.suffix_length;
  STD_TORCH_CHECK(ancestry.is_cpu() && ancestry.scalar_type() == ScalarType::Int && ancestry.dim() == 2 &&
                      ancestry.size(0) == rows && ancestry.size(1) >= length,
                  "shared_prefix_attention: ancestry must be an int32 tensor [", rows, ", ", length, "] on the CPU");
  const auto* table = static_cast<const int32_t*>(ancestry.const_data_ptr());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < problem.length_of(i); ++j) {
      const int32_t row = table[i * ancestry.stride(0) + j * ancestry.stride(1)];
      STD_TORCH_CHECK(row >= 0 && row < rows, "shared_prefix_attention: ancestry names row ", row, " of ", rows);
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

// The mask as if it had been expanded to the shape of the scores.
Strided strided_mask(const Tensor& mask, const int64_t (&scores)[4]) {
  STD_TORCH_CHECK(mask.dim() <= 4, "shared_prefix_attention: the mask has ", mask.dim(), " dimensions");
  Strided result;
  result.data = mask.const_data_ptr();
  const int64_t missing = 4 - mask.dim();
  for (int64_t i = 0; i < mask.dim(); ++i) {
    const int64_t size = mask.size(i), wanted = scores[missing + i];
    STD_TORCH_CHECK(size == wanted || size == 1, "shared_prefix_attention: dimension ", i, " of the mask is ", size,
                    " and cannot be expanded to ", wanted);
    result.strides[missing + i] = size == 1 ? 0 : mask.stride(i);
  }
  return result;
}

// The second dimension, of heads with `queries` queries each, as heads and queries.
void split_heads(Strided& x, int64_t queries) {
  x.strides[2] = x.strides[1];
  x.strides[1] *= queries;
}

void divide(AttentionProblem& problem, int64_t threads) {
  const int64_t matrices = problem.batch * problem.kv_heads;
  const int64_t longest = std::max<int64_t>(1, (problem.prefix_length + kMinChunk - 1) / kMinChunk);
  problem.chunks = std::clamp<int64_t>(kTasks / matrices, 1, longest);
  problem.chunk_length = (problem.prefix_length + problem.chunks - 1) / problem.chunks;
  // Suffixes that are longer than the prefix are worth tasks of their own where the matrices are too few.
  const bool long_suffixes = matrices < 4 * threads && problem.suffix_length * problem.per_input > problem.prefix_length;
  problem.fused = problem.chunks == 1 && !long_suffixes;
}

void attend(AttentionProblem& problem, ElementType type) {
  const auto kernels = fastgen::choose_kernels(type);
  divide(problem, torch::stable::get_num_threads());
  const int64_t tasks = problem.batch * problem.kv_heads * problem.chunks;
  // What the threads and the chunks work in, in bytes: more than that is not asked for.
  fastgen::product_of("attention", tasks, problem.per_input, problem.group, problem.queries, sizeof(float),
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
  fastgen::parallel_for(0, tasks, grain(chunk_products + (problem.fused ? suffix_products * problem.per_input : 0)),
                              [&](int64_t begin, int64_t end) { kernels.attend_prefix(problem, begin, end); });
  if (problem.fused) return;
  fastgen::parallel_for(0, problem.batch * problem.kv_heads * problem.per_input, grain(suffix_products),
                              [&](int64_t begin, int64_t end) { kernels.attend_suffix(problem, begin, end); });
}

Tensor shared_prefix_attention_cpu(Tensor query, Tensor prefix_keys, Tensor prefix_values,
                                   std::optional<Tensor> suffix_keys, std::optional<Tensor> suffix_values,
                                   std::optional<Tensor> mask, std::optional<double> scale,
                                   std::optional<Tensor> ancestry) {
  fastgen::Arguments("shared_prefix_attention")
      .reads(query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, ancestry);
  const ScalarType type = query.scalar_type();
  STD_TORCH_CHECK(query.is_cpu() && query.dim() == 4, "shared_prefix_attention: query must be [rows, heads, Q, dim]");
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16,
                  "shared_prefix_attention: query must be float32, float16 or bfloat16");
  STD_TORCH_CHECK(prefix_keys.dim() == 4 && prefix_values.dim() == 4,
                  "shared_prefix_attention: the prefix must be [batch, kv heads, N, dim]");
  const int64_t rows = query.size(0), heads = query.size(1), queries = query.size(2), dim = query.size(3);
  const int64_t batch = prefix_keys.size(0), kv_heads = prefix_keys.size(1);
  STD_TORCH_CHECK(batch > 0 ? rows % batch == 0 : rows == 0, "shared_prefix_attention: the ", rows,
                  " rows of the query must be a multiple of the ", batch, " rows of the prefix");
  STD_TORCH_CHECK(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, "shared_prefix_attention: the ", heads,
                  " heads of the query must be a multiple of the ", kv_heads, " heads of the prefix");
  check_part("prefix_keys", prefix_keys, query, batch, kv_heads);
  check_part("prefix_values", prefix_values, query, batch, kv_heads);
  const int64_t value_dim = prefix_values.size(3);
  check_pair("prefix", prefix_keys, prefix_values, dim, value_dim);
  STD_TORCH_CHECK(suffix_keys.has_value() == suffix_values.has_value(),
                  "shared_prefix_attention: a suffix needs both keys and values");
  STD_TORCH_CHECK(suffix_keys || !ancestry, "shared_prefix_attention: ancestry needs a suffix");
  int64_t suffix_length = 0;
  if (suffix_keys) {
    check_part("suffix_keys", *suffix_keys, query, rows, kv_heads);
    check_part("suffix_values", *suffix_values, query, rows, kv_heads);
    check_pair("suffix", *suffix_keys, *suffix_values, dim, value_dim);
    suffix_length = suffix_keys->size(2);
  }
  if (ancestry) {
    STD_TORCH_CHECK(ancestry->dim() == 2 && ancestry->size(1) == suffix_length,
                    "shared_prefix_attention: ancestry must be [", rows, ", ", suffix_length, "]");
  }

  AttentionProblem problem{};
  problem.batch = batch;
  problem.kv_heads = kv_heads;
  problem.queries = queries;
  problem.prefix_length = prefix_keys.size(2);
  problem.suffix_length = suffix_length;
  problem.dim = dim;
  problem.value_dim = value_dim;
  problem.mask_type = ElementType::kBool;
  if (mask) {
    const ScalarType mask_type = mask->scalar_type();
    STD_TORCH_CHECK(mask->is_cpu() &&
                        (mask_type == ScalarType::Bool || mask_type == type || mask_type == ScalarType::Float),
                    "shared_prefix_attention: the mask must be bool, float32 or of the type of the query, on the CPU");
    problem.mask = strided_mask(*mask, {rows, heads, queries, problem.prefix_length + suffix_length});
    problem.mask_type = element_type(mask_type);
  }
  Tensor output = torch::stable::new_empty(query, {rows, heads, queries, value_dim});
  if (output.numel() == 0) return output;

  if (ancestry) check_ancestry(*ancestry, rows, problem);
  problem.per_input = rows / batch;
  problem.stored = rows;
  problem.group = heads / kv_heads;
  problem.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(dim)));
  problem.query = strided(query);
  problem.prefix_keys = strided(prefix_keys);
  problem.prefix_values = strided(prefix_values);
  if (suffix_keys) {
    problem.suffix_keys = strided(*suffix_keys);
    problem.suffix_values = strided(*suffix_values);
  }
  if (ancestry) problem.ancestry = strided(*ancestry);
  problem.output = output.mutable_data_ptr();
  attend(problem, element_type(type));
  return output;
}

const int32_t* bounds(const char* name, const std::optional<Tensor>& given, int64_t batch) {
  if (!given) return nullptr;
  STD_TORCH_CHECK(given->is_cpu() && given->scalar_type() == ScalarType::Int && given->dim() == 1 &&
                      given->size(0) == batch && given->is_contiguous(),
                  "decode_attention: ", name, " must be int32, [", batch, "], on the CPU");
  return static_cast<const int32_t*>(given->const_data_ptr());
}

// One int64 for all rows, or one for each.
struct OfRows {
  const int64_t* data;
  int64_t stride;

  static bool fits(const Tensor& x, int64_t rows) {
    return x.is_cpu() && x.scalar_type() == ScalarType::Long && (x.numel() == 1 || (x.dim() == 1 && x.size(0) == rows));
  }
  explicit OfRows(const Tensor& x)
      : data(static_cast<const int64_t*>(x.const_data_ptr())), stride(x.numel() == 1 ? 0 : x.stride(0)) {}
  int64_t operator[](int64_t row) const { return data[row * stride]; }
};

// A copy: the kernel uses what has been checked.
std::vector<int64_t> owners_of(const Tensor& owners, int64_t rows, int64_t stored) {
  STD_TORCH_CHECK(owners.is_cpu() && owners.scalar_type() == ScalarType::Long && owners.dim() == 1 &&
                      owners.size(0) == rows && owners.is_contiguous(),
                  "decode_attention: owners must be int64, [", rows, "], on the CPU");
  const auto* first = static_cast<const int64_t*>(owners.const_data_ptr());
  const std::vector<int64_t> found(first, first + rows);
  for (const int64_t owner : found) {
    STD_TORCH_CHECK(owner >= 0 && owner < stored, "decode_attention: owner ", owner, " of ", stored);
  }
  return found;
}

// The schema is defined in fastgen/ops/decode_attention.py.
void decode_attention_out(Tensor output, Tensor query, Tensor prefix_keys, Tensor prefix_values,
                          std::optional<Tensor> suffix_keys, std::optional<Tensor> suffix_values,
                          std::optional<Tensor> starts, std::optional<Tensor> ends, std::optional<Tensor> suffix_length,
                          std::optional<Tensor> ancestry, std::optional<Tensor> bias, std::optional<double> scale,
                          std::optional<int64_t> window, int64_t queries, std::optional<Tensor> owners) {
  fastgen::Arguments("decode_attention")
      .writes(output)
      .reads(query, prefix_keys, prefix_values, suffix_keys, suffix_values, starts, ends, suffix_length, ancestry, bias,
             owners);
  const ScalarType type = query.scalar_type();
  STD_TORCH_CHECK(query.is_cpu() && query.dim() == 3 && prefix_keys.dim() == 4 && prefix_values.dim() == 4 &&
                      (type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16),
                  "decode_attention: query must be [rows, heads, dim] and the prefix [batch, kv heads, N, dim]");
  const int64_t rows = query.size(0), heads = query.size(1), dim = query.size(2);
  const int64_t batch = prefix_keys.size(0), kv_heads = prefix_keys.size(1), value_dim = prefix_values.size(3);
  // Rows of the store: those of the query, where it has no owners.
  const int64_t stored = owners && suffix_keys ? suffix_keys->size(0) : owners ? batch : rows;
  STD_TORCH_CHECK(batch > 0 && stored % batch == 0 && kv_heads > 0 && heads % kv_heads == 0,
                  "decode_attention: rows and heads must be multiples of those of the prefix");
  STD_TORCH_CHECK(queries > 0 && heads % (kv_heads * queries) == 0 && (queries == 1 || (suffix_keys && !window)),
                  "decode_attention: several queries need a suffix and no window, and heads that are a multiple of them");
  check_part("prefix_keys", prefix_keys, query, batch, kv_heads);
  check_part("prefix_values", prefix_values, query, batch, kv_heads);
  check_pair("prefix", prefix_keys, prefix_values, dim, value_dim);
  STD_TORCH_CHECK(output.scalar_type() == type && output.is_contiguous() && output.dim() == 3 &&
                      output.size(0) == rows && output.size(1) == heads && output.size(2) == value_dim,
                  "decode_attention: the result must be [rows, heads, dim of the values]");
  AttentionProblem problem{};
  problem.batch = batch;
  problem.kv_heads = kv_heads;
  problem.queries = queries;
  problem.causal = queries > 1;
  problem.prefix_length = prefix_keys.size(2);
  problem.dim = dim;
  problem.value_dim = value_dim;
  problem.starts = bounds("starts", starts, batch);
  problem.ends = bounds("ends", ends, batch);
  int64_t capacity = 0;
  std::vector<int64_t> lengths, owner_of_row;
  const bool is_empty = output.numel() == 0;
  if (suffix_keys) {
    STD_TORCH_CHECK(suffix_values && suffix_length && OfRows::fits(*suffix_length, rows),
                    "decode_attention: a suffix needs keys, values, and a length of int64, or one for each row");
    check_part("suffix_keys", *suffix_keys, query, stored, kv_heads);
    check_part("suffix_values", *suffix_values, query, stored, kv_heads);
    check_pair("suffix", *suffix_keys, *suffix_values, dim, value_dim);
    capacity = suffix_keys->size(2);
    const OfRows filled(*suffix_length);
    for (int64_t row = 0; !is_empty && row < suffix_length->numel(); ++row) {
      lengths.push_back(std::clamp<int64_t>(filled[row], 0, capacity));
      problem.suffix_length = std::max(problem.suffix_length, lengths.back());
    }
    if (lengths.size() > 1) problem.lengths = lengths.data();
    problem.suffix_keys = strided(*suffix_keys);
    problem.suffix_values = strided(*suffix_values);
  }
  if (ancestry && !is_empty) {
    check_ancestry(*ancestry, rows, problem);
    problem.ancestry = strided(*ancestry);
  }
  problem.has_window = window.has_value();
  problem.window = std::max<int64_t>(window.value_or(0), 0);
  problem.mask_type = ElementType::kBool;
  if (bias) {
    STD_TORCH_CHECK(bias->is_cpu() && bias->dim() <= 3 &&
                        (bias->scalar_type() == type || bias->scalar_type() == ScalarType::Float),
                    "decode_attention: the bias must be float32 or of the type of the query, with three dimensions at most");
    const int64_t sizes[3] = {rows, heads, problem.prefix_length + capacity};
    problem.mask.data = bias->const_data_ptr();
    const int64_t missing = 3 - bias->dim();
    for (int64_t i = missing; i < 3; ++i) {
      const int64_t size = bias->size(i - missing);
      STD_TORCH_CHECK(size == sizes[i] || size == 1, "decode_attention: the bias does not fit");
      problem.mask.strides[i == 2 ? 3 : i] = size == 1 ? 0 : bias->stride(i - missing);
    }
    split_heads(problem.mask, queries);
    problem.mask_type = element_type(bias->scalar_type());
  }
  if (is_empty) return;
  problem.per_input = stored / batch;
  problem.stored = stored;
  if (owners) {
    owner_of_row = owners_of(*owners, rows, stored);
    problem.owners = owner_of_row.data();
    STD_TORCH_CHECK(!ancestry && queries == 1, "decode_attention: owners go with one query, and without an ancestry");
    problem.copies = problem.per_input;
    problem.batch = rows;
    problem.per_input = 1;
  }
  problem.group = heads / queries / kv_heads;
  problem.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(dim)));
  problem.query = strided(query);
  problem.query.strides[3] = problem.query.strides[2];
  split_heads(problem.query, queries);
  problem.prefix_keys = strided(prefix_keys);
  problem.prefix_values = strided(prefix_values);
  problem.output = output.mutable_data_ptr();
  attend(problem, element_type(type));
}

// The schema is defined in fastgen/ops/kv_write.py.
void kv_write(Tensor keys, Tensor values, Tensor key_cache, Tensor value_cache, Tensor position) {
  // Rows of different lengths have one cache in which they overlap (decoding/speculation/ragged.py): each writes to places
  // of its own.
  fastgen::Arguments("kv_write").writes_distinct(key_cache).writes_distinct(value_cache).reads(keys, values, position);
  STD_TORCH_CHECK(keys.dim() == 3 && OfRows::fits(position, keys.size(0)),
                  "kv_write: position must be one integer of int64, or one for each row");
  const auto check = [](const Tensor& from, const Tensor& to) {
    STD_TORCH_CHECK(from.dim() == 3 && to.dim() == 4 && from.size(0) == to.size(0) && from.size(1) == to.size(1) &&
                        from.size(2) == to.size(3) && from.scalar_type() == to.scalar_type() &&
                        (from.size(2) <= 1 || (from.stride(2) == 1 && to.stride(3) == 1)),
                    "kv_write: takes [rows, heads, dim] and a cache [rows, heads, capacity, dim] of the same type");
  };
  check(keys, key_cache);
  check(values, value_cache);
  STD_TORCH_CHECK(values.size(0) == keys.size(0), "kv_write: as many rows of values as of keys");
  const OfRows positions(position);
  const auto write = [positions](const Tensor& from, Tensor& to) {
    if (from.numel() == 0) return;
    const int64_t size = from.element_size();
    const char* source = static_cast<const char*>(from.const_data_ptr());
    char* target = static_cast<char*>(to.mutable_data_ptr());
    for (int64_t row = 0; row < from.size(0); ++row) {
      const int64_t at = positions[row];
      if (at < 0 || at >= to.size(2)) continue;
      for (int64_t head = 0; head < from.size(1); ++head) {
        std::memcpy(target + (row * to.stride(0) + head * to.stride(1) + at * to.stride(2)) * size,
                    source + (row * from.stride(0) + head * from.stride(1)) * size, from.size(2) * size);
      }
    }
  };
  write(keys, key_cache);
  write(values, value_cache);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("decode_attention_out", FASTGEN_PLANNED(decode_attention_out));
  library.impl("kv_write", FASTGEN_PLANNED(kv_write));
  library.impl("shared_prefix_attention", TORCH_BOX(&shared_prefix_attention_cpu));
}
