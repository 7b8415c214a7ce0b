"""What transformers' PreTrainedModel, a base of ours where it is imported, would do wrongly or by half.

Each is given its meaning for our models here, or one clear error. A test goes through all that is inherited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from typing import Any, NoReturn

import torch
from torch import nn

from fastbert.checkpoint.arguments import left_over
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.layers.leaves import Container
from fastbert.layers.norms import ZeroCenteredRMSNorm
from fastbert.layers.rotary import RotaryFrequencies, RotaryTable
from fastbert.layers.sharded import whole_beside
from fastbert.models.hf.checkpoints import CheckpointMixin

_INITIALISED = "_is_hf_initialized"  # transformers' mark of a module, or a tensor, that post_init leaves as it is
# How a model is shared out over devices, and what calls of its modules are recorded: of ours, nothing.
_EMPTY_DICTS = ("_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_can_record_outputs")
# Modules that stay in float32, and keys that a file may lack or hold beyond the model's: none.
_EMPTY_SETS = (
    *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_save"),
    *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"),
)
# What has the weight 1 and the bias 0, and what is drawn as a Linear is (transformers has the same lists).
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
_PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd)


def _held(module: nn.Module) -> list[torch.Tensor]:
    """What a module itself holds."""
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _children_first(owner: nn.Module, module: nn.Module, seen: set[int]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The modules of a tree, each once, behind the model that initialises it."""
    seen.add(id(module))
    owner = module if hasattr(module, "_init_weights") else owner
    for child in module.children():
        if id(child) not in seen:
            yield from _children_first(owner, child, seen)
    yield owner, module


class TheirMethods(CheckpointMixin):
    """Methods and entries of a class that transformers' own code reads or calls."""

    base_model_prefix: str = ""  # of a family: the attribute that holds the base model of one with a head
    config_class = EncoderConfig
    _is_stateful = False
    supports_tp_plan = False
    supports_pp_plan = False

    def set_theirs(self) -> None:
        """What transformers' post_init sets on each model, whose code adds to it and reads it without asking first."""
        self._no_split_modules = {"EncoderLayer"}  # what FSDP wraps, and device maps keep together
        self._skip_keys_device_placement = {"cache"}
        for name in _EMPTY_DICTS:
            setattr(self, name, {})
        for name in _EMPTY_SETS:
            setattr(self, name, set())

    def tie_weights(self) -> None:
        raise NotImplementedError

    def init_weights(self) -> None:
        """Initialise modules that are new: not what a model's constructor has made, loaded or not (as transformers)."""
        self.draw_weights({id(t) for m in self.modules() if _INITIALISED in m.__dict__ for t in _held(m)})

    def mark_initialised(self) -> None:
        """All modules have their weights: a checkpoint has brought them."""
        for module in self.modules():
            module.__dict__[_INITIALISED] = True

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """As torch's: other memory, without values. init_weights draws all of them."""
        for module in self.modules() if recurse else [self]:
            module.__dict__.pop(_INITIALISED, None)
        return super().to_empty(device=device, recurse=recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Called by load_state_dict, of this model or of one around it: what is loaded after to_empty is not drawn."""
        super()._load_from_state_dict(state_dict, prefix, *others)  # type: ignore[misc]
        for name, module in self.named_modules(prefix=prefix.removesuffix(".")):
            own = {**module._parameters, **module._buffers}
            kept = [key for key, t in own.items() if t is not None and key not in module._non_persistent_buffers_set]
            if kept and all(f"{name}.{key}".removeprefix(".") in state_dict for key in kept):
                module.__dict__[_INITIALISED] = True

    @torch.no_grad()
    def draw_weights(self, kept: Set[int] = frozenset()) -> None:
        """Initialise what modules hold, children first, but for the tensors with an id in `kept`.

        Each by the rule of the model that is closest around it, as in transformers.
        """
        modules = list(_children_first(self, self, set()))
        held = Counter(id(p) for _, module in modules for p in module._parameters.values())
        # Where weights are tied by now, as to_empty leaves them under FSDP2, the embedding's row of padding is 0.
        modules.sort(key=lambda entry: isinstance(entry[1], nn.Embedding) and held[id(entry[1].weight)] > 1)
        for owner, module in modules:
            self._draw(owner, module, kept)
        self.tie_weights()

    def _draw(self, owner: Any, module: nn.Module, kept: Set[int]) -> None:
        """Initialise what a module itself holds. What is on the meta device has no values, and is new later on, too."""
        own = _held(module)
        if any([t.is_meta for t in own]):
            return
        # Marked tensors: loaded by transformers, into a model around this one.
        there = [t for t in own if id(t) in kept or _INITIALISED in t.__dict__]
        if len(there) < len(own):
            values = [t.clone() for t in there]
            owner._init_weights(module)
            for t, value in zip(there, values, strict=True):
                t.copy_(value)
        if own or module is not self:  # to which a subclass may add a parameter yet
            module.__dict__[_INITIALISED] = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """BERT's initialisation: normal with initializer_range, biases 0, norms 1 and 0, padding row 0; LSTMs as
        transformers has them. Modules of other kinds keep what their constructors made, if they are not ours.

        A subclass may override it, as in transformers, for modules of its own.
        """
        std = self.config.initializer_range
        if isinstance(module, (RotaryTable, RotaryFrequencies)):
            module.fill()
        elif isinstance(module, ZeroCenteredRMSNorm):
            module.weight.zero_()
        elif isinstance(module, _PRODUCTS):
            module.weight.normal_(0.0, std)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, std)
            if module.padding_idx is not None:
                rows = torch.arange(module.num_embeddings, device=module.weight.device)[:, None]
                module.weight.masked_fill_(whole_beside(module.weight, rows == module.padding_idx), 0)
        elif isinstance(module, nn.LSTM):
            for name, own in module.named_parameters():
                nn.init.xavier_uniform_(own) if "weight" in name else own.zero_()
        elif isinstance(module, _NORMS):
            for name, value in (("weight", 1.0), ("bias", 0.0)):  # neither need be there
                if (parameter := module._parameters.get(name)) is not None:
                    parameter.fill_(value)
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.reset_running_stats()
        elif isinstance(module, Container):  # biases
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.zero_()

    def post_init(self) -> None:
        """What a subclass calls at the end of its __init__: initialises what it has added, and ties weights."""
        self.init_weights()

    def initialize_weights(self) -> None:
        self.init_weights()

    @torch.no_grad()
    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """What the post_init of a model around this one calls for each module in it."""
        if _INITIALISED not in module.__dict__:
            self._draw(self, module, frozenset())

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
    def loss_type(self) -> str | None:
        """transformers' name of the loss that this class computes by itself; None: it has no name for it."""
        from transformers.loss.loss_utils import LOSS_MAPPING

        ends = (cls.__name__.rpartition("For")[2] for cls in type(self).__mro__ if "For" in cls.__name__)
        return next((f"For{end}" for end in ends if f"For{end}" in LOSS_MAPPING), None)

    @property
    def loss_function(self) -> Any:
        """transformers' function of that name."""
        from transformers.loss.loss_utils import LOSS_MAPPING

        return LOSS_MAPPING.get(self.loss_type or "")

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
