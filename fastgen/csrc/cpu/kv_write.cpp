// Writes the K and V of a step into the KV cache. The schema is defined in fastgen/ops/kv_write.py.
#include "operator.h"

namespace {

using namespace fastgen;

void kv_write(Tensor keys, Tensor values, Tensor key_cache, Tensor value_cache, Tensor position,
              std::optional<Tensor> row_map) {
  Arguments("kv_write").writes(key_cache).writes(value_cache).reads(keys, values, position, row_map);
  STD_TORCH_CHECK(keys.dim() == 3 && OfRows::fits(position, keys.size(0)),
                  "kv_write: position must be one integer of int64, or one for each row");
  const auto check = [&](const Tensor& from, const Tensor& to) {
    STD_TORCH_CHECK(from.dim() == 3 && to.dim() == 4 && (row_map || from.size(0) == to.size(0)) &&
                        from.size(1) == to.size(1) && from.size(2) == to.size(3) &&
                        from.scalar_type() == to.scalar_type() &&
                        (from.size(2) <= 1 || (from.stride(2) == 1 && to.stride(3) == 1)),
                    "kv_write: takes [rows, heads, dim] and a cache [rows, heads, capacity, dim] of the same type");
  };
  check(keys, key_cache);
  check(values, value_cache);
  STD_TORCH_CHECK(values.size(0) == keys.size(0) && value_cache.size(0) == key_cache.size(0),
                  "kv_write: as many rows of values as of keys");
  const OfRows positions(position);
  std::vector<int64_t> rows;
  if (row_map) rows = row_map_of("kv_write", *row_map, keys.size(0), key_cache.size(0));
  const auto write = [&](const Tensor& from, Tensor& to) {
    if (from.numel() == 0) return;
    const int64_t size = from.element_size();
    const char* source = numbers_of<const char>(from);
    char* target = numbers_of<char>(to);
    for (int64_t row = 0; row < from.size(0); ++row) {
      const int64_t at = positions[row];
      if (at < 0 || at >= to.size(2)) continue;
      const int64_t target_row = rows.empty() ? row : rows[row];
      for (int64_t head = 0; head < from.size(1); ++head) {
        std::memcpy(target + (target_row * to.stride(0) + head * to.stride(1) + at * to.stride(2)) * size,
                    source + (row * from.stride(0) + head * from.stride(1)) * size, from.size(2) * size);
      }
    }
  };
  write(keys, key_cache);
  write(values, value_cache);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("kv_write", FASTGEN_PLANNED(kv_write));
}
