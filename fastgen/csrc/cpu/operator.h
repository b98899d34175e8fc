// What every operator on the CPU is made of: checks of its arguments, threads, its place in plans, and its registration.
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

// Memory that begins with a cache line: a vector that lies in two of them takes twice as long to load. It is not filled.
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
