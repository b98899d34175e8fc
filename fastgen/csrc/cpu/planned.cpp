// Executes plans (planned.h). The schema is defined in fastgen/ops/planned.py.
#include "planned.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstring>

namespace {

using fastgen::Section;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void run_planned(Tensor plans) {
  STD_TORCH_CHECK(plans.scalar_type() == ScalarType::Byte && plans.dim() == 1 && plans.is_contiguous(),
                  "run_planned: plans must be bytes next to each other");
  const uint8_t* from = static_cast<const uint8_t*>(plans.const_data_ptr());
  int64_t left = plans.numel();
  while (left > 0) {
    Section section{};
    if (left >= static_cast<int64_t>(sizeof(section))) std::memcpy(&section, from, sizeof(section));
    STD_TORCH_CHECK(section.bytes >= static_cast<int64_t>(sizeof(section)) && section.bytes <= left,
                    "run_planned: this is no plan");
    switch (section.of) {
      case fastgen::kElementwise: fastgen::run_elementwise(from); break;
      case fastgen::kGroupedLinears: fastgen::run_grouped_linears(from); break;
      default: STD_TORCH_CHECK(false, "run_planned: this is no plan");
    }
    from += section.bytes, left -= section.bytes;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) { library.impl("run_planned", TORCH_BOX(&run_planned)); }
