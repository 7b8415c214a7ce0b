// The activations of feed-forwards and their derivatives, in fp32; fastbert.ops.activation describes them.
#pragma once

#include "../include/activation.h"
#include "runtime.h"

namespace fastbert {

// kShort: what is rounded to 16 bits anyway takes a shorter way. The exact one has more instructions than the memory
// traffic of an elementwise kernel hides.
template <bool kShort>
__device__ __forceinline__ float exponential(float x) {
  return kShort ? __expf(x) : expf(x);
}

template <bool kShort>
__device__ __forceinline__ float inverse(float x) {
  return kShort ? __fdividef(1.0f, x) : 1.0f / x;
}

struct Sigmoid {
  float value;
  float slope;  // value (1 - value), of which the difference would leave few digits
};

template <bool kShort>
__device__ __forceinline__ Sigmoid sigmoid(float x) {
  const float e = exponential<kShort>(-fabsf(x)), share = inverse<kShort>(1.0f + e);
  return {x < 0.0f ? e * share : share, e * share * share};
}

// 0.5 (1 + tanh(u)) = sigmoid(2 u)
__device__ __forceinline__ float gelu_tanh_argument(float x) { return 1.5957691f * (x + 0.044715f * x * x * x); }

struct Normal {
  float probability;  // Phi(x)
  float density;      // phi(x) times the square root of 2 pi
};

template <bool kShort>
__device__ __forceinline__ Normal normal(float x) {
  const float density = exponential<kShort>(-0.5f * x * x);
  if constexpr (!kShort) return {0.5f * (1.0f + erff(x * 0.70710678f)), density};
  // Abramowitz & Stegun 1964, 7.1.26: off by 1.5e-7 at most, and its exponential is the density.
  const float t = inverse<kShort>(1.0f + 0.23164189f * fabsf(x));
  const float sum = 0.127414796f + t * (-0.142248368f + t * (0.71070687f + t * (-0.72657601f + t * 0.53070271f)));
  const float tail = density * t * sum;
  return {x < 0.0f ? tail : 1.0f - tail, density};
}

// Where the functions have long reached their limits: beyond, x may be infinite, of which 0 times is NaN. NaN stays.
constexpr float kGeluEnd = 20.0f, kSiluEnd = 200.0f;
__device__ __forceinline__ float from_below(float x, float lowest) { return x < lowest ? lowest : x; }
__device__ __forceinline__ float between(float x, float limit) { return from_below(x > limit ? limit : x, -limit); }

template <Activation kActivation, bool kShort>
__device__ __forceinline__ float activate(float x) {
  // The share of x is that of the bounded x on both sides, as in the slope: backward computes it once for the two.
  constexpr float kEnd = kActivation == Activation::kSilu ? kSiluEnd : kGeluEnd;
  const float bounded = between(x, kEnd);
  if constexpr (kActivation == Activation::kGelu) return from_below(x, -kEnd) * normal<kShort>(bounded).probability;
  if constexpr (kActivation == Activation::kGeluTanh)
    return from_below(x, -kEnd) * sigmoid<kShort>(gelu_tanh_argument(bounded)).value;
  if constexpr (kActivation == Activation::kRelu) return x < 0.0f ? 0.0f : x;  // NaN stays NaN
  if constexpr (kActivation == Activation::kTanh) return tanhf(x);
  if constexpr (kActivation == Activation::kSilu) return from_below(x, -kEnd) * sigmoid<kShort>(bounded).value;
  return x;
}

template <Activation kActivation, bool kShort>
__device__ __forceinline__ float activation_slope(float x) {
  if constexpr (kActivation == Activation::kGelu || kActivation == Activation::kGeluTanh) x = between(x, kGeluEnd);
  if constexpr (kActivation == Activation::kSilu) x = between(x, kSiluEnd);
  if constexpr (kActivation == Activation::kGelu) {  // Phi(x) + x phi(x)
    const Normal n = normal<kShort>(x);
    return n.probability + x * 0.39894228f * n.density;
  }
  if constexpr (kActivation == Activation::kGeluTanh) {
    const Sigmoid s = sigmoid<kShort>(gelu_tanh_argument(x));
    return s.value + x * s.slope * (1.5957691f + 0.21406445f * x * x);
  }
  if constexpr (kActivation == Activation::kRelu) return x <= 0.0f ? 0.0f : 1.0f;
  if constexpr (kActivation == Activation::kTanh) return 1.0f - tanhf(x) * tanhf(x);
  if constexpr (kActivation == Activation::kSilu) {
    const Sigmoid s = sigmoid<kShort>(x);
    return s.value + x * s.slope;
  }
  return 1.0f;
}

template <Activation kActivation>
struct ActivationConstant {
  static constexpr Activation value = kActivation;
};

// f with the activation as a type: the choice is made once for many elements.
template <typename F>
__device__ __forceinline__ void with_activation(Activation activation, const F& f) {
  switch (activation) {
    case Activation::kGelu:
      return f(ActivationConstant<Activation::kGelu>{});
    case Activation::kGeluTanh:
      return f(ActivationConstant<Activation::kGeluTanh>{});
    case Activation::kRelu:
      return f(ActivationConstant<Activation::kRelu>{});
    case Activation::kTanh:
      return f(ActivationConstant<Activation::kTanh>{});
    case Activation::kSilu:
      return f(ActivationConstant<Activation::kSilu>{});
    default:
      return f(ActivationConstant<Activation::kNone>{});
  }
}

}  // namespace fastbert
