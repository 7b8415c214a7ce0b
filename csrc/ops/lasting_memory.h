// Memory for what stays from call to call: packed weights, gradients, a thread's workspaces.
#pragma once

#include <cstddef>

namespace fastbert {

// `bytes`, a multiple of 64, from a cache line's begin on, not initialised; to be given back with the same size. Any
// thread may take and give. Raises std::bad_alloc.
char* take_lasting(size_t bytes);
void give_lasting(char* data, size_t bytes);

}  // namespace fastbert
