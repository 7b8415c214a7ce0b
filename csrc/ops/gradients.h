// Memory for the gradients of weights, kept from step to step.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "array.h"

namespace fastbert {

// A weight's gradient, to be written.
struct NewGradient {
  // An uninitialised tensor like the weight, in the memory of one of its last two gradients if nothing holds that any
  // more. A step that sets gradients to None gives hundreds of megabytes back to the system, and fresh pages for them
  // cost more than what is written there: an eighth of a whole step of MiniLM. The memory is freed with the weight.
  Array gradient;
  // Sums of squares of its parts, which its writer may leave here: empty at first.
  std::shared_ptr<std::vector<double>> squares;
};

NewGradient new_gradient(const Array& weight);

// The sum of the squares of a weight's gradient, where it is the last that new_gradient made, its writer left them, and
// it was not changed since, as far as torch counts changes: to be asked only where it counts all of them.
std::optional<double> known_squares(const Array& weight, const Array& gradient);

// The storage at this address goes.
void forget_gradients(const void* storage);

}  // namespace fastbert
