// A step of AdamW (Loshchilov & Hutter 2017, algorithm 2), and the gradients' norm that it is clipped by.
#pragma once

#include <cstdint>

namespace fastbert {

// What a step of a weight goes by, beside its elements' own numbers.
template <typename T>
struct AdamWStep {
  T keep;                  // times the weight: 1 - learning rate * weight decay
  T rate;                  // the learning rate, by the bias correction of the mean
  T root_scale;            // times the root of the square: by its bias correction
  T new_mean, new_square;  // the shares of the gradient and of its square: 1 - beta
  T eps;
};

template <typename T>
struct AdamWArgs {
  T* weight;  // as many as gradient, mean (of gradients) and square (mean of their squares)
  const T* gradient;
  T* mean;
  T* square;
  T clip;              // times the gradient
  bool mean_outlives;  // beta1^2 > beta2: without gradients the square falls faster than the mean's square
  AdamWStep<T> step;
};

// Elements [begin, end). Where gradient and square are zero (rows of a table that no batch had yet), the mean is zero,
// too, or so small that it moves no weight: only the decay is left, and a third of the memory is not touched. Where the
// mean outlives the square, it is looked at.
template <typename T>
void adamw(const AdamWArgs<T>& args, int64_t begin, int64_t end);

// The same elements through `count` steps without a gradient, which `steps` has instead of args.step: the bits of so
// many calls with zeros, for one reading and one writing of the memory.
template <typename T>
void adamw_deferred(const AdamWArgs<T>& args, const AdamWStep<T>* steps, int64_t count, int64_t begin, int64_t end);

// *out = the sum of x[begin]^2 to x[end - 1]^2.
template <typename T>
void sum_of_squares(const T* x, int64_t begin, int64_t end, double* out);

}  // namespace fastbert
