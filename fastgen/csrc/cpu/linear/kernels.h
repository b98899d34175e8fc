// The inner loops of linear layers for one instruction set. Included once per instruction set by
// cpu/linear.cpp, inside a namespace of its own, with these defined, and what its parts name:
//   FASTGEN_TARGET     the attribute that lets the compiler use the instruction set
//   FASTGEN_WIDTH      floats of a vector
//   FASTGEN_TRANSPOSE  (from, stride, to, stride): FASTGEN_WIDTH lines of as many floats, transposed
// No include guard: it is meant to be included several times.

#include "tiles.h"

#include "lines.h"

#undef FASTGEN_TARGET
#undef FASTGEN_WIDTH
#undef FASTGEN_TRANSPOSE
#undef FASTGEN_VECTORS
#undef FASTGEN_ROWS
#undef FASTGEN_OUTPUTS
#undef FASTGEN_ROW_VECTORS
#undef FASTGEN_HALF
#undef FASTGEN_REPEAT4
#undef FASTGEN_SPREAD
#undef FASTGEN_ONE_OF4
