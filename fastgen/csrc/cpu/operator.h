// The common parts of all CPU operators: argument checks, threads, command lists, and registration.
#pragma once

#include "checks.h"
#include "parallel.h"
#include "plan.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

namespace fastgen {

// Memory aligned to a cache line: a vector that crosses two lines takes twice as long to load. Uninitialised.
template <class T>
class Aligned {
 public:
  explicit Aligned(int64_t count) : first_(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)))) {}
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { ::operator delete(first_, std::align_val_t(64)); }
  T* data() const { return first_; }

 private:
  T* first_;
};

}  // namespace fastgen
