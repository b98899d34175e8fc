// Which positions a query may attend to. Part of kernel.h, which includes it once for each instruction set.

// The mask of one query, starting at some position.
struct MaskRow {
  const void* data;  // null: all positions are allowed
  int64_t stride;
  ElementType type;
};

FASTGEN_TARGET inline int64_t element_size(ElementType type) {
  return type == ElementType::kBool ? 1 : type == ElementType::kFloat ? 4 : 2;
}

// `matrix_row` counts in the order of AttentionProblem, from the first copy of `input` on.
FASTGEN_TARGET inline MaskRow mask_row(const AttentionProblem& problem, int64_t input, int64_t kv_head,
                                       int64_t matrix_row, int64_t position) {
  const Strided& mask = problem.mask;
  if (mask.data == nullptr) return {nullptr, 0, problem.mask_type};
  const int64_t row = input * problem.per_input + matrix_row / (problem.group * problem.queries);
  const int64_t head = kv_head * problem.group + matrix_row / problem.queries % problem.group;
  const int64_t query = matrix_row % problem.queries;
  const int64_t offset =
      row * mask.strides[0] + head * mask.strides[1] + query * mask.strides[2] + position * mask.strides[3];
  return {static_cast<const char*>(mask.data) + offset * element_size(problem.mask_type), mask.strides[3],
          problem.mask_type};
}

// Calls `use` with the mask's data in its type.
template <class Use>
FASTGEN_INLINE auto with_numbers(const MaskRow& mask, const Use& use) {
  switch (mask.type) {
    case ElementType::kBool: return use(static_cast<const uint8_t*>(mask.data));
    case ElementType::kHalf: return use(static_cast<const c10::Half*>(mask.data));
    case ElementType::kBFloat16: return use(static_cast<const c10::BFloat16*>(mask.data));
    default: return use(static_cast<const float*>(mask.data));
  }
}

FASTGEN_INLINE float masked(float score, uint8_t is_allowed) { return is_allowed ? score : kNegativeInfinity; }
template <typename mask_t>
FASTGEN_INLINE float masked(float score, mask_t added) {
  return score + to_float(added);
}

template <typename mask_t>
FASTGEN_TARGET inline void mask_scores(float* scores, int64_t length, const mask_t* mask, int64_t stride) {
  if (stride == 1) {  // a separate loop, so that the compiler vectorises it
    for (int64_t j = 0; j < length; ++j) scores[j] = masked(scores[j], mask[j]);
  } else {
    for (int64_t j = 0; j < length; ++j) scores[j] = masked(scores[j], mask[j * stride]);
  }
}

FASTGEN_TARGET inline void apply_mask(float* scores, int64_t length, const MaskRow& mask) {
  if (mask.data == nullptr) return;
  with_numbers(mask, [&](const auto* numbers) { mask_scores(scores, length, numbers, mask.stride); });
}

// Masks the positions after a query's own in the scores of a block, which begins at `position`.
FASTGEN_TARGET inline void hide_later(const AttentionProblem& problem, int64_t input, int64_t matrix_row,
                                      int64_t position, float* scores, int64_t length) {
  if (!problem.causal) return;
  const int64_t row = input * problem.per_input + matrix_row / (problem.group * problem.queries);
  const int64_t behind = problem.queries - 1 - matrix_row % problem.queries;
  const int64_t seen = problem.prefix_length + problem.length_of(row) - behind - position;
  for (int64_t j = std::max<int64_t>(seen, 0); j < length; ++j) scores[j] = kNegativeInfinity;
}

template <typename mask_t>
FASTGEN_TARGET inline bool any_allowed(const mask_t* mask, int64_t length, int64_t stride) {
  for (int64_t j = 0; j < length; ++j) {
    if (!(masked(0.0f, mask[j * stride]) == kNegativeInfinity)) return true;
  }
  return false;
}

// Returns whether the mask allows any of `length` positions.
FASTGEN_TARGET inline bool allows_any(const MaskRow& mask, int64_t length) {
  if (mask.data == nullptr) return length > 0;
  return with_numbers(mask, [&](const auto* numbers) { return any_allowed(numbers, length, mask.stride); });
}

// Returns whether any of the queries may attend to any of the positions. Blocks of padding are never read.
FASTGEN_TARGET inline bool is_visible(const AttentionProblem& problem, int64_t input, int64_t kv_head,
                                      int64_t first_row, int64_t rows, int64_t position, int64_t length) {
  const void* last = nullptr;
  for (int64_t i = 0; i < rows; ++i) {
    const MaskRow mask = mask_row(problem, input, kv_head, first_row + i, position);
    if (mask.data != nullptr && mask.data == last) continue;  // queries share this mask
    if (allows_any(mask, length)) return true;
    last = mask.data;
  }
  return false;
}
