"""What transformers' PreTrainedModel, a base of ours where it is imported, would do wrongly or by half.

Each is given its meaning for our models here, or one clear error. A test goes through all that is inherited.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from fastbert.checkpoint.arguments import left_over
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.layers.rotary import RotaryFrequencies, RotaryTable
from fastbert.models.hf.checkpoints import CheckpointMixin

_INITIALISED = "_is_hf_initialized"  # transformers' mark of a module that post_init leaves as it is


class TheirMethods(CheckpointMixin):
    """Methods and entries of a class that transformers' own code reads or calls."""

    base_model_prefix: str = ""  # of a family: the attribute that holds the base model of one with a head
    config_class = EncoderConfig
    _no_split_modules = ("EncoderLayer",)  # what FSDP wraps, and device maps keep together
    _is_stateful = False
    supports_tp_plan = False
    supports_pp_plan = False

    def tie_weights(self) -> None:
        raise NotImplementedError

    def init_weights(self) -> None:
        """Initialise modules that are new: not what a model's constructor has made, loaded or not (as transformers)."""
        self._draw_weights([module for module in self.modules() if _INITIALISED not in module.__dict__])

    @torch.no_grad()
    def _draw_weights(self, modules: Iterable[nn.Module]) -> None:
        """BERT's initialisation: normal with initializer_range, biases 0, LayerNorm 1 and 0, padding row 0."""
        for module in modules:
            self._init_leaf(module)
            module.__dict__[_INITIALISED] = True
        self.tie_weights()

    def _init_leaf(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, (RotaryTable, RotaryFrequencies)):
            module.fill()
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            module.weight.normal_(0.0, std)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, std)
            if module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            for parameter, value in ((module._parameters["weight"], 1.0), (module._parameters.get("bias"), 0.0)):
                if parameter is not None:  # neither need be there
                    parameter.fill_(value)
        else:  # the decoder bias's second name
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.zero_()

    def post_init(self) -> None:
        """What a subclass calls at the end of its __init__: initialises what it has added, and ties weights."""
        self.init_weights()

    def initialize_weights(self) -> None:
        self.init_weights()

    def _init_weights(self, module: nn.Module) -> None:
        self._init_leaf(module)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """What the post_init of a model around this one calls for each module in it: all have their weights."""

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> Any:
        return cls.from_config(config, **options)

    @property
    def _tied_weights_keys(self) -> dict[str, str] | None:
        return self.tied_keys() or None

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        return self.tied_keys()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        return self.tied_keys()

    def get_correct_attn_implementation(self, requested_attention: str | None, *others: Any, **options: Any) -> str:
        """A name that may be asked for, itself; fastbert runs its own attention, whichever it is."""
        left_over({"attn_implementation": requested_attention})
        return requested_attention or "sdpa"

    def set_attn_implementation(self, attn_implementation: str, allow_all_kernels: bool = False) -> None:
        """As the argument of from_pretrained: any exact attention may be named, and fastbert runs its own."""
        self.config._attn_implementation = self.get_correct_attn_implementation(attn_implementation)

    def get_experts_implementation(self) -> dict[str, str | None]:
        return {}

    def set_experts_implementation(self, experts_implementation: Any) -> NoReturn:
        raise ConfigError(f"experts_implementation={experts_implementation!r} is not supported: there are no experts")

    def set_use_kernels(self, use_kernels: bool, *others: Any, **options: Any) -> None:
        left_over({"use_kernels": use_kernels})

    @property
    def loss_function(self) -> Any:
        """transformers' function for the loss that this class computes by itself."""
        from transformers.loss.loss_utils import LOSS_MAPPING

        ends = (kind.__name__.rpartition("For")[2] for kind in type(self).__mro__ if "For" in kind.__name__)
        return next((LOSS_MAPPING[f"For{end}"] for end in ends if f"For{end}" in LOSS_MAPPING), None)

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        raise ConfigError(
            "loss_function cannot be assigned: fastbert computes a loss over real tokens. Call the model without"
            " labels, and your function with its logits"
        )

    def dequantize(self, dtype: Any = None) -> NoReturn:
        raise ValueError("a model holds no weights beside its int8 ones: load what was quantised again")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> NoReturn:
        raise ConfigError(f"{cls.__name__} cannot be registered: fastbert saves and runs no code of a checkpoint")

    def save_distributed_checkpoint(self, *others: Any, **options: Any) -> NoReturn:
        raise ConfigError("distributed checkpoints are not supported: save_pretrained(state_dict=the gathered tensors)")
