// Attention within each of several packed sequences. The schema is defined in fastgen/ops/packed_attention.py.
#include "isa.h"
#include "operator.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <limits>

namespace {

using namespace fastgen;

// [heads, tokens, dim], the last one contiguous.
struct Rows {
  const float* data;
  int64_t head, token;
  const float* row(int64_t h, int64_t t) const { return data + h * head + t * token; }
};

struct TextAttention {
  Rows query, keys, values;
  int64_t group, dim, value_dim;  // group: query heads that share one of keys
  float scale;
  float* output;  // [tokens, heads, value dim]; tokens are `output_token` apart, the rest is contiguous
  int64_t output_token;
};

struct Text {
  int64_t begin, length;
};

// `attend` processes at most `queries` queries of a head and a sequence, with this many floats of scratch memory.
struct TextKernels {
  int64_t queries;
  int64_t (*floats_of_scratch)(const TextAttention&);
  void (*attend)(const TextAttention&, int64_t head, const Text&, int64_t first, float* scratch);
};

#define FASTGEN_KERNELS "attention/texts.h"
#define FASTGEN_LOOPS
#include "each_isa.h"

// About as many multiplications as pay for waking a thread.
constexpr int64_t kProductsPerTask = 1 << 17;

void check(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 3 && x.scalar_type() == ScalarType::Float && x.size(2) > 0 &&
                      (x.stride(2) == 1 || x.size(2) == 1),
                  "packed_attention: ", name,
                  " must be [heads, tokens, dim] of float32, its last dimension contiguous");
}

Rows rows_of(const Tensor& x) {
  return {numbers_of<const float>(x), x.stride(0), x.stride(1)};
}

std::vector<Text> texts_of(const Tensor& lengths, int64_t tokens) {
  const int64_t* numbers =
      checked<const int64_t>(lengths, {lengths.numel()}, "packed_attention: lengths must be [texts] of int64");
  std::vector<Text> texts;
  int64_t begin = 0;
  for (int64_t i = 0; i < lengths.numel(); ++i) {
    const int64_t length = numbers[i];
    STD_TORCH_CHECK(length >= 0 && length <= tokens - begin, "packed_attention: lengths do not fit");
    if (length > 0) texts.push_back({begin, length});
    begin += length;
  }
  STD_TORCH_CHECK(begin == tokens, "packed_attention: lengths of ", begin, " tokens, and not of ", tokens);
  return texts;
}

// Some queries of one head and one sequence.
struct Task {
  int64_t head, text, first;
};

Tensor packed_attention_out(Tensor query, Tensor keys, Tensor values, Tensor lengths, double scale, Tensor out) {
  Arguments("packed_attention").writes(out).reads(query, keys, values, lengths);
  check(query, "the query"), check(keys, "keys"), check(values, "values");
  const int64_t heads = query.size(0), tokens = query.size(1), kv_heads = keys.size(0), value_dim = values.size(2);
  STD_TORCH_CHECK(keys.size(1) == tokens && values.size(1) == tokens && keys.size(2) == query.size(2) &&
                      values.size(0) == kv_heads && kv_heads > 0 && heads % kv_heads == 0,
                  "packed_attention: query, keys and values do not fit together");
  float* result = checked<float>(out, {tokens, heads, value_dim},
                                 "packed_attention: the result must be [tokens, heads, dim of the values] of float32");
  const std::vector<Text> texts = texts_of(lengths, tokens);
  const TextAttention problem{rows_of(query),
                              rows_of(keys),
                              rows_of(values),
                              heads / kv_heads,
                              query.size(2),
                              value_dim,
                              static_cast<float>(scale),
                              result,
                              heads * value_dim};
  const TextKernels kernels = FASTGEN_CHOOSE(kernels());
  std::vector<Task> tasks;
  int64_t products = 0;
  for (int64_t text = 0; text < static_cast<int64_t>(texts.size()); ++text) {
    const int64_t length = texts[text].length;
    products += heads * length * length * (problem.dim + value_dim);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t first = 0; first < length; first += kernels.queries) tasks.push_back({head, text, first});
    }
  }
  const int64_t count = static_cast<int64_t>(tasks.size());
  const int64_t grain = std::max<int64_t>(1, count * kProductsPerTask / std::max<int64_t>(products, 1));
  parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    const Aligned<float> scratch(kernels.floats_of_scratch(problem));
    for (int64_t i = begin; i < end; ++i) {
      const auto& [head, text, first] = tasks[i];
      kernels.attend(problem, head, texts[text], first, scratch.data());
    }
  });
  return out;
}

Tensor packed_attention(Tensor query, Tensor keys, Tensor values, Tensor lengths, double scale) {
  check(query, "the query"), check(values, "values");
  Tensor out = torch::stable::new_empty(query, {query.size(1), query.size(0), values.size(2)});
  return packed_attention_out(query, keys, values, lengths, scale, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("packed_attention", TORCH_BOX(&packed_attention));
  library.impl("packed_attention.out", FASTGEN_PLANNED(packed_attention_out));
}
