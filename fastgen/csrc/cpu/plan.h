// Plans: operators with their arguments, which one call from Python executes. The schemas are in fastgen/ops/command_list.py.
//
// While a thread has a plan open, an operator that is registered with FASTGEN_PLANNED is not executed: it is added to the
// plan, with what it was given. So an operator knows nothing of plans, and reads its arguments in one way. A few do that
// themselves, and keep what they have found out about their arguments.
#pragma once

#include <functional>
#include <tuple>
#include <type_traits>

namespace fastgen {

// Whether the calling thread has a plan open.
bool plan_is_open();
void add_to_plan(std::function<void()> work);

template <auto function>
struct Planned;

// Tensors are references: what they refer to lives as long as the plan. Where its numbers lie, an operator asks each time.
// The operator returns nothing, or its last argument.
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Planned<function> {
  static Result call(Arguments... arguments) {
    if (!plan_is_open()) return function(arguments...);
    add_to_plan([=] { function(arguments...); });
    if constexpr (!std::is_void_v<Result>) return std::get<sizeof...(Arguments) - 1>(std::tie(arguments...));
  }
};

}  // namespace fastgen

// In place of TORCH_BOX.
#define FASTGEN_PLANNED(function) TORCH_BOX(&fastgen::Planned<&function>::call)
