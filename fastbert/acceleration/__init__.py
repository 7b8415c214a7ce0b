"""fastbert.accelerate(hf_model) makes a live transformers model faster, in place. Its parameters stay its own.

Each base model in the tree gets a new forward, on the instance. Nothing is registered in the module tree. Before
anything is launched it looks for what it would not honour. Such a call runs in transformers' own forward, and a warning
says why, once.
"""

from __future__ import annotations

import warnings
from typing import TypeVar

from torch import nn

from fastbert import ops
from fastbert.acceleration.forward import Forward
from fastbert.acceleration.objections import tree_objection
from fastbert.acceleration.plan import MODEL_TYPES, live, make_plan
from fastbert.families import FAMILIES

M = TypeVar("M", bound=nn.Module)
_SUPPORTED = f"base models, alone or under a head, of {', '.join(sorted(FAMILIES))} (transformers' own classes)"


def _relation(module: nn.Module) -> str | None:
    """Base models of ours are "base", classes made from one "derived", transformers' other models "other"."""
    kinds = [(kind.__module__, kind.__name__) for kind in type(module).__mro__]
    if not MODEL_TYPES.keys().isdisjoint(kinds):
        return "base" if kinds[0] in MODEL_TYPES else "derived"
    return "other" if ("transformers.modeling_utils", "PreTrainedModel") in kinds else None


def _is_accelerated(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(getattr(forward, "__func__", forward), Forward)


def accelerate(hf_model: M) -> M:
    """Speed up a live transformers model in place: its base models run packed, on fastbert's ops.

    Parameters, state dict, config, saving and training stay those of transformers. Modules that replace a Linear, a
    LayerNorm or an Embedding (LoRA, quantised ones), and hooks on these, are called with packed tensors.

    Outputs are those of transformers at every real token, and zeros at padding. A call that needs more than that (a
    mask of another shape, a cache, hooks on an inner container, a head that reads padding, torch.export) runs in
    transformers' own forward, and a warning says why. An id out of range raises InputError before any launch.

    Args:
        hf_model: any module that holds base models of BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ALBERT, ELECTRA or
            Megatron-BERT: a base model, a model with a head, a SentenceTransformer, a PEFT model.

    Returns `hf_model`; `restore` undoes it. Raises ValueError if there is nothing to accelerate, and says why.
    """
    ops.warn_of_missing_kernels()
    modules = dict(hf_model.named_modules()) if isinstance(hf_model, nn.Module) else {}
    heads: dict[int, list[str]] = {}
    for parent in modules.values():
        for child in parent.children():
            if _relation(parent) == "other" and _relation(child) == "base":
                heads.setdefault(id(child), []).append(type(parent).__name__)
    reasons, others = list[str](), tuple[str, ...]()
    for path, module in modules.items():
        label = f"{path} ({type(module).__name__})" if path else type(module).__name__
        relation = _relation(module)
        if relation == "derived":
            reasons.append(f"{label}: a class of its own, whose forward may differ from transformers'")
        elif relation == "other" and not path.startswith(others):
            if not any(_relation(child) in ("base", "derived") for child in module.modules()):
                others += (f"{path}." if path else "",)
                reasons.append(f"{label}: fastbert does not have this model")
        elif relation == "base" and not _is_accelerated(module):
            plan = make_plan(module, label, heads.get(id(module), []))
            if isinstance(plan, str):
                reasons.append(f"{label}: {plan}")
                continue
            module.forward = Forward(module, plan)
            if (objection := tree_objection(module, plan, live(module, plan)[0])) is not None:
                module.forward.say(objection)
    if not any(map(_is_accelerated, modules.values())):
        kind, why = type(hf_model).__name__, "; ".join(reasons) or "it holds no model of transformers"
        raise ValueError(f"{kind} has nothing to accelerate ({why}); fastbert speeds up {_SUPPORTED}")
    for reason in reasons:
        warnings.warn(f"fastbert: not accelerated: {reason}", stacklevel=2)
    return hf_model


def restore(hf_model: M) -> M:
    """Undo `accelerate`: every base model in `hf_model` runs its class's forward again. Returns `hf_model`."""
    for module in hf_model.modules():
        if _is_accelerated(module):
            del module.forward
    return hf_model
