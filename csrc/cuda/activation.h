// The activations of feed-forwards and their derivatives, in fp32; fastbert.ops.activation describes them.
#pragma once

#include "../include/activation.h"
#include "runtime.h"

namespace fastbert {

struct Sigmoid {
  float value;
  float slope;  // value (1 - value), of which the difference would leave few digits
};

__device__ __forceinline__ Sigmoid sigmoid(float x) {
  const float e = expf(-fabsf(x)), share = 1.0f / (1.0f + e);
  return {x < 0.0f ? e * share : share, e * share * share};
}

// 0.5 (1 + tanh(u)) = sigmoid(2 u)
__device__ __forceinline__ float gelu_tanh_argument(float x) { return 1.5957691f * (x + 0.044715f * x * x * x); }

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kGelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  if constexpr (kActivation == Activation::kGeluTanh) return x * sigmoid(gelu_tanh_argument(x)).value;
  if constexpr (kActivation == Activation::kRelu) return x < 0.0f ? 0.0f : x;  // NaN stays NaN
  if constexpr (kActivation == Activation::kTanh) return tanhf(x);
  if constexpr (kActivation == Activation::kSilu) return x * sigmoid(x).value;
  return x;
}

template <Activation kActivation>
__device__ __forceinline__ float activation_slope(float x) {
  if constexpr (kActivation == Activation::kGelu) {  // Phi(x) + x phi(x)
    return 0.5f * (1.0f + erff(x * 0.70710678f)) + x * 0.39894228f * expf(-0.5f * x * x);
  }
  if constexpr (kActivation == Activation::kGeluTanh) {
    const Sigmoid s = sigmoid(gelu_tanh_argument(x));
    return s.value + x * s.slope * (1.5957691f + 0.21406445f * x * x);
  }
  if constexpr (kActivation == Activation::kRelu) return x > 0.0f ? 1.0f : 0.0f;
  if constexpr (kActivation == Activation::kTanh) return 1.0f - tanhf(x) * tanhf(x);
  if constexpr (kActivation == Activation::kSilu) {
    const Sigmoid s = sigmoid(x);
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
