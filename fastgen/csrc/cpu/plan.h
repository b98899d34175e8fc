// Command lists: operators with their arguments, executed by one call from Python. The schemas are in
// fastgen/ops/runtime.py.
//
// While a thread has a list open, an operator that is registered with FASTGEN_PLANNED is not executed, but appended
// with its arguments. Operators therefore need no code for lists, and read their arguments in one way. A few append
// themselves, and keep what they have derived from their arguments.
#pragma once

#include <functional>
#include <tuple>
#include <type_traits>

namespace fastgen {

// Whether the calling thread has a command list open.
bool plan_is_open();
void add_to_plan(std::function<void()> work);

template <auto function>
struct Planned;

// Tensors are references, which live as long as the list. An operator reads their addresses each time it runs. It
// returns nothing, or its last argument.
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Planned<function> {
  static Result call(Arguments... arguments) {
    if (!plan_is_open()) return function(arguments...);
    add_to_plan([=] { function(arguments...); });
    if constexpr (!std::is_void_v<Result>) return std::get<sizeof...(Arguments) - 1>(std::tie(arguments...));
  }
};

}  // namespace fastgen

// Replaces TORCH_BOX.
#define FASTGEN_PLANNED(function) TORCH_BOX(&fastgen::Planned<&function>::call)
