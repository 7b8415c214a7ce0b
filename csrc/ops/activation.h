// An activation by its name.
#pragma once

#include <string>

#include "../include/activation.h"
#include "array.h"

namespace fastbert {

inline Activation activation_of(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  if (name == "tanh") return Activation::kTanh;
  if (name == "silu") return Activation::kSilu;
  fail("activation is '", name, "', expected none, gelu, gelu_tanh, relu, tanh or silu");
}

}  // namespace fastbert
