"""Contextual vectors of words, layer by layer: which senses a layer tells apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import torch
from tokenizers import Encoding
from torch import nn

from fastbert.errors import InputError
from fastbert.execution.request import Wanted
from fastbert.inspect.attention import numbers_of
from fastbert.inspect.live import as_ours
from fastbert.models.base import EncoderModel
from fastbert.packed_inputs import ModelInputs, PackedInputs


@torch.no_grad()
def hidden_states(
    model: nn.Module, batch: PackedInputs, layers: Iterable[int] | None = None, *, causal: bool = False
) -> list[torch.Tensor]:
    """What stands at each token: of each text (layers, tokens, hidden_size).

    Args:
        model: one of fastbert's, or transformers', with or without a head, in eval mode.
        batch: packed texts (`fastbert.pack_inputs`).
        layers: 0 is what goes into the first layer, 1 what comes out of it, and so on; below 0 from the end; None: all.
        causal: no token sees those behind it, as in a language model that writes from left to right.

    Raises:
        InputError: the model has no such layer; it is in training mode.
    """
    base: EncoderModel = as_ours(model).base_model
    if base.training:
        raise InputError("the model is in training mode: call model.eval()")
    chosen = numbers_of("layer", layers, len(base.running_config.layer_paths) + 1)
    inputs = base.prepare(ModelInputs(batch))
    wanted = Wanted(frozenset(chosen), stops=True, is_causal=causal)
    states = base.encode(inputs, wanted).hidden_states or ()
    return list(torch.stack(states).split(inputs.batch.cu_seqlens.diff().tolist(), 1))


def tokens_of_word(encoding: Encoding, start: int, end: int) -> list[int]:
    """The places of the tokens that stand for the characters [start, end) of a text; of a pair's first text.

    Raises InputError: no token does, since the text was cut, or the tokenizer leaves these characters out.
    """

    def stands_for_it(first: int, last: int) -> bool:
        # Byte-level tokenizers count the blank that they put before a word as the word's first character, and leave it
        # out: a word of one character gets an empty span, right behind it.
        return start < first <= end if first == last else first < end and last > start

    indices = [i for i, at in enumerate(encoding.offsets) if encoding.sequence_ids[i] == 0 and stands_for_it(*at)]
    if not indices:
        raise InputError(f"no token stands for the characters {start} to {end} of the text: it may have been cut")
    return indices


def word_vectors(states: Sequence[torch.Tensor], places: Sequence[Sequence[int]]) -> torch.Tensor:
    """A word's vector in each text: the mean of its tokens'. states: of `hidden_states`; places: of `tokens_of_word`.

    Returns (layers, texts, hidden_size), float32.
    """
    return torch.stack([x[:, list(at)].float().mean(1) for x, at in zip(states, places, strict=True)], 1)


def cosines(vectors: torch.Tensor) -> torch.Tensor:
    """(..., n, width) -> the cosine of each two, (..., n, n)."""
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    return unit @ unit.mT


def neighbour_accuracy(vectors: torch.Tensor, senses: Sequence[Hashable]) -> torch.Tensor:
    """How often the nearest other vector, by its cosine, has the same sense (leave one out).

    vectors: (layers, n, width); senses: of each of the n. Returns (layers,). Raises ValueError for fewer than two
    vectors, or as many senses as there are not vectors.
    """
    count = vectors.shape[-2]
    if count != len(senses) or count < 2:
        raise ValueError(f"{len(senses)} senses of {count} vectors; one each is needed, and at least 2")
    near = cosines(vectors)
    near.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    numbers = {sense: i for i, sense in enumerate(dict.fromkeys(senses))}
    of = torch.tensor([numbers[sense] for sense in senses], device=vectors.device)
    return (of[near.argmax(-1)] == of).float().mean(-1)


def linear_probe(vectors: torch.Tensor, labels: Sequence[Hashable], folds: int = 5) -> torch.Tensor:
    """How well a linear classifier tells labels from the vectors of each layer: accuracy on what it has not seen, the
    mean over `folds` parts that are held out in turn, each with its share of every label.

    vectors: (layers, n, width), of texts or words; labels: of each of the n. Returns (layers,). Needs scikit-learn.
    Raises ValueError: as many labels as there are not vectors, or a label that has fewer than `folds` of them.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if vectors.shape[-2] != len(labels):
        raise ValueError(f"{len(labels)} labels of {vectors.shape[-2]} vectors; one each is needed")
    counts = Counter(labels)
    rarest, count = min(counts.items(), key=lambda item: item[1]) if counts else (None, 0)
    if count < folds or len(counts) < 2:
        raise ValueError(
            f"label {rarest!r} has {count} vectors; cross-validation in {folds} folds needs two labels or more, each"
            f" with at least {folds} vectors"
        )
    names = [str(label) for label in labels]
    parts = StratifiedKFold(folds, shuffle=True, random_state=0)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    accuracies = [cross_val_score(model, x.float().cpu().numpy(), names, cv=parts).mean() for x in vectors]
    return torch.tensor(accuracies, dtype=torch.float32)


def principal_components(vectors: torch.Tensor, count: int = 2) -> torch.Tensor:
    """A map of vectors (n, width): (n, count), by principal component analysis. A component's sign is free: its largest
    number is positive.
    """
    centred = vectors.double() - vectors.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    projected = (u * s)[:, :count]
    largest = projected.gather(0, projected.abs().argmax(0, keepdim=True))
    projected = projected * torch.where(largest < 0, -1.0, 1.0)
    return torch.nn.functional.pad(projected, (0, count - projected.shape[1])).to(vectors.dtype)
