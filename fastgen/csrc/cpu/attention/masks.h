// Which positions a query may attend to. Part of kernel.h, which includes it once for each instruction set.

// The mask of one query, from some position on.
struct MaskRow {
  const void* data;  // null: everything may be attended to
  int64_t stride;
  ElementType type;
};

inline int64_t element_size(ElementType type) {
  return type == ElementType::kBool ? 1 : type == ElementType::kFloat ? 4 : 2;
}

// `matrix_row` counts in the order of AttentionProblem, from the first copy of `input` on.
inline MaskRow mask_row(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t matrix_row,
                        int64_t position) {
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

template <typename mask_t>
inline void add_mask(float* scores, int64_t length, const mask_t* mask, int64_t stride) {
  if (stride == 1) {  // said apart, so that the compiler vectorises it
    for (int64_t j = 0; j < length; ++j) scores[j] += to_float(mask[j]);
  } else {
    for (int64_t j = 0; j < length; ++j) scores[j] += to_float(mask[j * stride]);
  }
}

inline void apply_mask(float* scores, int64_t length, const MaskRow& mask) {
  if (mask.data == nullptr) return;
  switch (mask.type) {
    case ElementType::kBool: {
      const auto* allowed = static_cast<const uint8_t*>(mask.data);
      if (mask.stride == 1) {
        for (int64_t j = 0; j < length; ++j) scores[j] = allowed[j] ? scores[j] : kNegativeInfinity;
      } else {
        for (int64_t j = 0; j < length; ++j) scores[j] = allowed[j * mask.stride] ? scores[j] : kNegativeInfinity;
      }
      break;
    }
    case ElementType::kFloat: return add_mask(scores, length, static_cast<const float*>(mask.data), mask.stride);
    case ElementType::kHalf: return add_mask(scores, length, static_cast<const c10::Half*>(mask.data), mask.stride);
    case ElementType::kBFloat16:
      return add_mask(scores, length, static_cast<const c10::BFloat16*>(mask.data), mask.stride);
  }
}

// Takes the positions behind a query's own out of the scores of a block, which begins at `position`.
inline void hide_later(const AttentionProblem& problem, int64_t input, int64_t matrix_row, int64_t position,
                       float* scores, int64_t length) {
  if (!problem.causal) return;
  const int64_t row = input * problem.per_input + matrix_row / (problem.group * problem.queries);
  const int64_t behind = problem.queries - 1 - matrix_row % problem.queries;
  const int64_t seen = problem.prefix_length + problem.length_of(row) - behind - position;
  for (int64_t j = larger(seen, 0); j < length; ++j) scores[j] = kNegativeInfinity;
}

template <typename mask_t>
inline bool any_above_negative_infinity(const mask_t* mask, int64_t length, int64_t stride) {
  for (int64_t j = 0; j < length; ++j) {
    if (!(to_float(mask[j * stride]) == kNegativeInfinity)) return true;
  }
  return false;
}

// Whether the mask allows any of `length` positions.
inline bool allows_any(const MaskRow& mask, int64_t length) {
  if (mask.data == nullptr) return length > 0;
  switch (mask.type) {
    case ElementType::kBool: {
      const auto* allowed = static_cast<const uint8_t*>(mask.data);
      for (int64_t j = 0; j < length; ++j) {
        if (allowed[j * mask.stride]) return true;
      }
      return false;
    }
    case ElementType::kFloat:
      return any_above_negative_infinity(static_cast<const float*>(mask.data), length, mask.stride);
    case ElementType::kHalf:
      return any_above_negative_infinity(static_cast<const c10::Half*>(mask.data), length, mask.stride);
    case ElementType::kBFloat16:
      return any_above_negative_infinity(static_cast<const c10::BFloat16*>(mask.data), length, mask.stride);
  }
  return true;
}

// Whether any of the queries may attend to any of the positions. Padding, which none of them may, is not read.
inline bool is_visible(const AttentionProblem& problem, int64_t input, int64_t kv_head, int64_t first_row, int64_t rows,
                       int64_t position, int64_t length) {
  const void* last = nullptr;
  for (int64_t i = 0; i < rows; ++i) {
    const MaskRow mask = mask_row(problem, input, kv_head, first_row + i, position);
    if (mask.data != nullptr && mask.data == last) continue;  // a mask that queries share
    if (allows_any(mask, length)) return true;
    last = mask.data;
  }
  return false;
}
