// An activation by its name.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/string_view.h>

#include "../include/activation.h"

namespace fastbert {

inline Activation activation_of(c10::string_view name) {
  if (name == "none") return Activation::kNone;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  if (name == "tanh") return Activation::kTanh;
  if (name == "silu") return Activation::kSilu;
  TORCH_CHECK(false, "activation is '", name, "', expected none, gelu, gelu_tanh, relu, tanh or silu");
}

}  // namespace fastbert
