"""How a command loads a model that it only runs, and what is said of the run: its rate, and what was not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fastbert.sentences.text_model import TextModel

Model = TypeVar("Model", bound="TextModel")


def load_to_run(model_class: type[Model], options: Any) -> Model:
    """The model that `options` name, and the dtype and device for it. Raises the errors of `from_pretrained`.

    Nothing else holds it, and it is only run: the half of its weights' memory goes of which the kernels read packed
    copies.
    """
    from fastbert.packed_weights import keep_packed_only

    model = model_class.from_pretrained(options.model, dtype=options.dtype, device=options.device)
    keep_packed_only(model)
    return model


def rate_of(tokens: int, seconds: float) -> str:
    """What the last line says of a run's tokens; nothing where all was encoded before."""
    return f", {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s" if tokens else ""


def say_cut(count: int, limit: int, say: Callable[[str], None], how: str = "--windows") -> None:
    """How many texts lost their ends, if any did, and what reads all of them."""
    if count:
        what = f"{count:,} text{' was' if count == 1 else 's were'} cut to the model's {limit} tokens"
        say(f"{what}; {how} reads all of them")
