// Inputs whose products are summed among themselves before they are added to the others, in all products with panels of a
// weight: what easily fits into the second-level cache of a panel. A multiple of the inputs of a group, whose numbers share a scale.
#pragma once

#include <cstdint>

constexpr int64_t kDepth = 256;
