"""Forwards of what is around an accelerated base model and makes something of padding: they see what it does not, a
head its labels, sentence-transformers' Transformer which texts are queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastbert.acceleration.forward import Forward
from fastbert.acceleration.instance import OnInstance, argument_names, put_by_us
from fastbert.acceleration.unsupported import FLATTENED
from fastbert.layers.leaves import in_use
from fastbert.layers.sharded import class_of
from fastbert.packing import NOT_ONE_GRAPH

_POSITIONS = ("start_positions", "end_positions")


class HeadForward(OnInstance):
    """The forward of a model with a head over the accelerated base model at `base`, an attribute.

    Where tokens of padding have labels, transformers trains on their hidden states: such a call is transformers' own.
    `spans_over_real_tokens`: the head's softmax runs over columns, and leaves padding out.
    """

    def __init__(self, module: nn.Module, base: str, spans_over_real_tokens: bool):
        super().__init__(module, base, spans_over_real_tokens)
        self._base, self.spans_over_real_tokens = base, spans_over_real_tokens
        self._tell = torch.compiler.disable(self.tell, reason=NOT_ONE_GRAPH)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        args = args[1:] if args and args[0] is module else args  # as in Forward
        if not self.is_recorded() and self._tell(module, args, kwargs):
            return _spans(module, {**dict(zip(argument_names(type(module)), args)), **kwargs})  # noqa: B905
        return type(module).forward(module, *args, **kwargs)

    def tell(self, module: Any, args: tuple, kwargs: dict) -> bool:
        """Whether padding is to be left out of spans. Otherwise the base model is told of the labels of tokens: it
        looks at the mask anyway, and no device is waited for a second time.
        """
        call_args = {**dict(zip(argument_names(type(module)), args)), **kwargs} if args else kwargs  # noqa: B905
        mask, labels = call_args.get("attention_mask"), call_args.get("labels")
        has_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2
        if self.spans_over_real_tokens:
            return has_mask
        base = put_by_us(in_use(module._modules[self._base]))
        if isinstance(base, Forward):
            are_of_tokens = has_mask and isinstance(labels, torch.Tensor)
            flattened = (
                {name: call_args[name] for name in FLATTENED if name in call_args}
                if "cu_seq_lens_q" in call_args
                else {}
            )
            base.expect(labels=labels if are_of_tokens else None, given=flattened)
        return False


class QueryForward(OnInstance):
    """The forward of sentence-transformers' Transformer over accelerated base models.

    With `query_expansion` of `attend: False` a MultiVectorEncoder reads, of queries, the hidden states of [MASK] tokens
    that the mask leaves out: they attend, and nothing attends to them. The base model is told which these are.
    """

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self._tell = torch.compiler.disable(self.tell, reason=NOT_ONE_GRAPH)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        args = args[1:] if args and args[0] is module else args  # as in Forward
        features = args[0] if args else kwargs.get("features", {})
        if "query_expansion_positions" in features and reads_masked_tokens(module) and not self.is_recorded():
            self._tell(module, features["query_expansion_positions"])
        return type(module).forward(module, *args, **kwargs)

    def tell(self, module: Any, positions: torch.Tensor) -> None:
        for base in map(put_by_us, module.modules()):
            if isinstance(base, Forward):
                base.expect(query_only=positions)


def is_expander(module: nn.Module) -> bool:
    """Whether it is sentence-transformers' Transformer, of a version that expands queries."""
    return hasattr(class_of(module), "query_expansion")


def reads_masked_tokens(module: Any) -> bool:
    """Whether such a Transformer is set so that the tokens which queries are expanded by are masked."""
    return module.query_expansion is not None and not module.query_expansion["attend"]


def _spans(module: Any, call_args: dict) -> Any:
    """What the class's forward gives, with its softmax over real tokens only, as fastbert's own head has it.

    Logits at padding are the least number. Positions count as in transformers, and those at padding do not.
    """
    positions = [call_args.pop(name, None) for name in _POSITIONS]
    as_dict = call_args.pop("return_dict", None)
    as_dict = module.config.return_dict if as_dict is None else as_dict
    output = type(module).forward(module, **call_args, return_dict=True)
    real = call_args["attention_mask"].to(output.start_logits.device) != 0
    losses = []
    for name, at in zip(("start_logits", "end_logits"), positions, strict=True):
        logits = output[name].masked_fill(~real, torch.finfo(output[name].dtype).min)
        output[name] = logits
        if at is not None:
            at = at.reshape(-1, 1).clamp(0, real.shape[1])  # one behind the last column does not count
            counts = F.pad(real, (0, 1)).gather(1, at)
            losses.append(F.cross_entropy(logits, at.where(counts, -100)[:, 0]))
    if len(losses) == 2:
        output = type(output)(loss=(losses[0] + losses[1]) / 2, **{k: v for k, v in output.items() if k != "loss"})
    return output if as_dict else output.to_tuple()
