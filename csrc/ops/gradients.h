// Memory for the gradients of weights, kept from step to step.
#pragma once

#include "array.h"

namespace fastbert {

// An uninitialised tensor like `weight`, in the memory of that weight's last gradient if nothing holds it any more. A
// step that sets gradients to None gives hundreds of megabytes back to the system, and fresh pages for them cost more
// than what is written there: an eighth of a whole step of MiniLM. The memory is freed with the weight.
Array gradient_like(const Array& weight);

// The storage at this address goes.
void forget_gradients(const void* storage);

}  // namespace fastbert
