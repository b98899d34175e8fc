// glibc 2.28 lacks this header. libstdc++ asks it whether reference counts may do without atomic operations: they may not.
#pragma once
static constexpr bool __libc_single_threaded = false;
