"""The op level: functions over tensors, no nn.Module, no config. One contract, one oracle, several backends each."""

import fastbert.ops.layers.encoder_layers_training  # noqa: F401  (which registers its fused op)

# Layers, models and accelerate know no backend, and call these.
from fastbert.backend import transform_unsupported, try_fused, warn_of_missing_kernels
from fastbert.ops._common import at_least_fp32, compute_dtype
from fastbert.ops.attention.attention import attention, attention_from_probs, attention_probs
from fastbert.ops.attention.relative import Relative
from fastbert.ops.attention.rotary import Rotary, rotate
from fastbert.ops.dropout import dropout
from fastbert.ops.embedding import embed_layer_norm
from fastbert.ops.layer_norm import add_layer_norm, add_rms_norm, rms_norm
from fastbert.ops.layers.encoder import EncoderOperands, HeldEncoder
from fastbert.ops.layers.encoder_layers import LayerOperands, LayerWeights, LinearWeights, NormWeights
from fastbert.ops.linear.feed_forward import activation, feed_forward
from fastbert.ops.linear.linear import are_weights_packed, linear, linears, multiplies_bf16, repack
from fastbert.ops.linear.recorded_writes import only_recorded_writes
from fastbert.ops.loss import cross_entropy, logits_cross_entropy, sequence_cross_entropy
from fastbert.ops.maxsim import in_int8, maxsim
from fastbert.ops.normalize import normalize
from fastbert.ops.optim.adamw import DeferredRows, adamw, adamw_deferred
from fastbert.ops.packing import pack, unpack
from fastbert.ops.pooling import pooling
from fastbert.ops.seeds import StepSeeds, seeds_from, with_same_seeds

__all__ = [
    "DeferredRows",
    "EncoderOperands",
    "HeldEncoder",
    "LayerOperands",
    "LayerWeights",
    "LinearWeights",
    "NormWeights",
    "Relative",
    "Rotary",
    "StepSeeds",
    "activation",
    "adamw",
    "adamw_deferred",
    "add_layer_norm",
    "add_rms_norm",
    "are_weights_packed",
    "at_least_fp32",
    "attention",
    "attention_from_probs",
    "attention_probs",
    "compute_dtype",
    "cross_entropy",
    "dropout",
    "embed_layer_norm",
    "feed_forward",
    "in_int8",
    "linear",
    "linears",
    "logits_cross_entropy",
    "maxsim",
    "multiplies_bf16",
    "normalize",
    "only_recorded_writes",
    "pack",
    "pooling",
    "repack",
    "rms_norm",
    "rotate",
    "seeds_from",
    "sequence_cross_entropy",
    "transform_unsupported",
    "try_fused",
    "unpack",
    "warn_of_missing_kernels",
    "with_same_seeds",
]
