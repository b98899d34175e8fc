// Command lists of operators. The schemas are defined in fastgen/ops/runtime.py.
#include "plan.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace {

using Plan = std::vector<std::function<void()>>;

// A command list is identified by its index. There is no lock, because a fork could inherit it locked by a thread that
// it lacks. The caller must not drop a list that is being executed; existing lists are only read.
constexpr int64_t kMost = 4096;
std::array<std::atomic<Plan*>, kMost> plans{};
thread_local std::unique_ptr<Plan> open;

void open_plan() {
  STD_TORCH_CHECK(open == nullptr, "open_plan: this thread has a plan open");
  open = std::make_unique<Plan>();
}

// Returns the number of the command list with `expected` operators; -1 if it has more or fewer, or if there are too
// many.
int64_t close_plan(int64_t expected) {
  STD_TORCH_CHECK(open != nullptr, "close_plan: this thread has no plan open");
  std::unique_ptr<Plan> plan = std::move(open);
  if (static_cast<int64_t>(plan->size()) != expected) return -1;
  for (int64_t place = 0; place < kMost; ++place) {
    Plan* none = nullptr;
    if (plans[place].compare_exchange_strong(none, plan.get())) {
      plan.release();
      return place;
    }
  }
  return -1;
}

std::atomic<Plan*>& place_of(int64_t plan) {
  STD_TORCH_CHECK(plan >= 0 && plan < kMost, "a plan's number must be from 0 to ", kMost - 1);
  return plans[plan];
}

void run_plan(int64_t number) {
  const Plan* plan = place_of(number).load();
  STD_TORCH_CHECK(plan != nullptr, "run_plan: there is no such plan");
  for (const auto& work : *plan) work();
}

void drop_plan(int64_t number) { delete place_of(number).exchange(nullptr); }

}  // namespace

namespace fastgen {

bool plan_is_open() { return open != nullptr; }

void add_to_plan(std::function<void()> work) { open->push_back(std::move(work)); }

}  // namespace fastgen

// They have no tensors, so that no device chooses the kernel.
STABLE_TORCH_LIBRARY_IMPL(fastgen, CompositeExplicitAutograd, library) {
  library.impl("open_plan", TORCH_BOX(&open_plan));
  library.impl("close_plan", TORCH_BOX(&close_plan));
  library.impl("run_plan", TORCH_BOX(&run_plan));
  library.impl("drop_plan", TORCH_BOX(&drop_plan));
}
