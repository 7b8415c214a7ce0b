"""Live transformers models, read as fastbert's."""

from __future__ import annotations

from torch import nn

from fastbert.errors import InputError
from fastbert.models.base import PreTrainedModel
from fastbert.models.classes import CLASSES


def as_ours(model: nn.Module) -> PreTrainedModel:
    """The model itself, if it is one of fastbert's; of transformers' model of the same name one of ours, with a copy of
    its weights.

    Raises InputError: it is neither, or in training mode. Raises CheckpointError or ConfigError: it is changed so that
    its config does not say what it is.
    """
    if isinstance(model, PreTrainedModel):
        return model
    model_class = {cls.__name__: cls for cls in CLASSES.values()}.get(type(model).__name__)
    config = getattr(model, "config", None)
    if model_class is None or config is None:
        raise InputError(f"{type(model).__name__} is none of fastbert's models, nor of transformers' that it has")
    if model.training:
        raise InputError("the model is in training mode: call model.eval()")
    has_pooler = None if model_class.family.pooler is None else "pooler" in model._modules and model.pooler is not None
    ours = model_class.from_pretrained(
        None,
        config=config,
        state_dict=model.state_dict(),
        add_pooling_layer=has_pooler if model.base_model is model else None,
    )
    return ours.to(next(model.parameters()).device)
