// The activations that a GEMM can end in; fastbert.ops.activation describes them.
#pragma once

namespace fastbert {

enum class Activation { kNone, kGelu, kGeluTanh, kRelu, kTanh, kSilu };

}  // namespace fastbert
