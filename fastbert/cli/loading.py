"""How a command loads a model that it only runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fastbert.sentences.text_model import TextModel

Model = TypeVar("Model", bound="TextModel")


def load_to_run(kind: type[Model], options: Any) -> Model:
    """The model that `options` name, and the dtype and device for it. Raises the errors of `from_pretrained`.

    Nobody else holds it, and nothing but running is done with it: the half of its weights' memory goes of which the
    kernels read packed copies.
    """
    from fastbert.packed_weights import keep_packed_only

    model = kind.from_pretrained(options.model, dtype=options.dtype, device=options.device)
    keep_packed_only(model)
    return model
