// What headers of GCC 11 and later ask of libstdc++, and that of GCC 8 lacks: linked into the operators, and not exported.
#include <new>

namespace std {

[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
