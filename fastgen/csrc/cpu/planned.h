// Operators whose operands stay where they are. What they are to do is written down once, as a plan: bytes with the
// addresses of all operands, which have been checked. Plans behind each other are executed in one call, which takes less
// time than finding out in each call what is where. A plan is valid in this process, as long as that memory is there.
#pragma once

#include <cstdint>

namespace fastgen {

// What a plan begins with: which operator it is of, and how long it is, a multiple of eight bytes.
enum Operator : uint64_t { kElementwise = 0x656c656d656e7477u, kGroupedLinears = 0x67726f757065646cu };
struct Section {
  uint64_t of;
  int64_t bytes;
};

void run_elementwise(const uint8_t* plan);
void run_grouped_linears(const uint8_t* plan);

}  // namespace fastgen
