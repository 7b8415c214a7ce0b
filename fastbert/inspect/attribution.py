"""Which words decided: integrated gradients (Sundararajan et al. 2017) of packed texts, many points in a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from fastbert.errors import InputError
from fastbert.models.base import PreTrainedModel
from fastbert.models.outputs import ModelOutput
from fastbert.packed_inputs import ModelInputs, PackedInputs

# (the model's output for packed texts, their cu_seqlens) -> a number for each text, (texts,).
Target = Callable[[ModelOutput, torch.Tensor], torch.Tensor]


def label(index: int) -> Target:
    """The logit of a label, of a model that classifies whole texts."""
    return lambda output, cu_seqlens: output["logits"][:, index]


def token_label(place: int, index: int) -> Target:
    """The logit of a label of the token at `place`, counted in each text; for a masked LM of a word."""
    return lambda output, cu_seqlens: output["logits"][cu_seqlens[:-1] + place, index]


def span(start: int, end: int) -> Target:
    """The score of an answer from the token `start` to the token `end`: the sum of its two logits."""

    def score(output: ModelOutput, cu_seqlens: torch.Tensor) -> torch.Tensor:
        first = cu_seqlens[:-1]
        return output["start_logits"][first + start] + output["end_logits"][first + end]

    return score


@dataclass(frozen=True)
class Attribution:
    """How much each token of a text adds to a number.

    scores: (tokens,), float32. value, baseline_value: the number for the text, and for the baseline where the path
    begins; the scores add up to their difference, but for what `steps` points miss of the path.
    """

    scores: torch.Tensor
    value: float
    baseline_value: float

    @property
    def completeness_error(self) -> float:
        """What the scores miss of the difference, as a share of it."""
        difference = self.value - self.baseline_value
        missed = abs(float(self.scores.sum()) - difference)
        return missed / abs(difference) if difference else missed


def integrated_gradients(
    model: PreTrainedModel,
    batch: PackedInputs,
    target: Target | int,
    *,
    baseline_id: int | None = None,
    kept_ids: Collection[int] = (),
    steps: int = 50,
    batch_tokens: int = 8192,
) -> list[Attribution]:
    """Integrated gradients of each text of a batch, with respect to its word embeddings.

    The path goes straight from the embeddings of a baseline to those of the text; the gradients along it are summed by
    the Gauss-Legendre rule.

    Args:
        model: one of fastbert's, in eval mode. Its weights get no gradients.
        batch: packed texts (`fastbert.pack_inputs`).
        target: what is explained: `label(i)`, for which the number i stands, `token_label`, `span`, or another function
            of that kind.
        baseline_id: the token that stands at every place of the baseline; default: the padding token.
        kept_ids: tokens that stand in the baseline as in the text ([CLS] and [SEP]).
        steps: points of the path.
        batch_tokens: how many tokens run at once, of all points and texts.

    Raises:
        InputError: the model is in training mode; it adds nothing to `inputs_embeds` (ESM); a text has padding between
            its tokens; there is no padding token, and no baseline_id; steps is below 1.
    """
    base = model.base_model
    if model.training:
        raise InputError("the model is in training mode: call model.eval()")
    if steps < 1:
        raise InputError(f"steps is {steps}; at least 1 point of the path is needed")
    config = base.config
    if config.embeddings.skips_given:
        raise InputError(
            f"{config.model_type} takes inputs_embeds for the sum of its embeddings, not for those of words"
        )
    fill = config.pad_token_id if baseline_id is None else baseline_id
    if fill is None:
        raise InputError("the model has no padding token: give baseline_id")
    inputs = base.prepare(ModelInputs(batch))
    if inputs.window_positions is not None:
        raise InputError("a text has padding between its tokens: pack its tokens alone")
    words = model.get_input_embeddings()
    ids, ends = inputs.ids, inputs.batch.cu_seqlens.tolist()
    assert ids.input_ids is not None  # a PackedInputs has them
    kept = torch.isin(ids.input_ids, torch.tensor(sorted(kept_ids), device=base.device, dtype=torch.int64))
    with torch.no_grad():
        text = words(ids.input_ids)
        start = torch.where(kept[:, None], text, words(torch.full_like(ids.input_ids, fill)))
    named = (
        ("position_ids", ids.position_ids),
        ("token_type_ids", ids.token_type_ids),
        ("task_type_ids", ids.task_type_ids),
    )
    others = {name: t for name, t in named if t is not None}
    score = label(target) if isinstance(target, int) else target
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    points = [0.0, *((1 + nodes) / 2).tolist(), 1.0]
    shares = [0.0, *(weights / 2).tolist(), 0.0]  # of the two ends only the values are wanted
    total, values = torch.zeros_like(text, dtype=torch.float32), torch.zeros(len(ends) - 1, len(points))
    with _frozen(model):
        for part in _parts(ends, len(points), batch_tokens):
            places = torch.cat([torch.arange(ends[i], ends[i + 1], device=base.device) for i, _ in part])
            lengths = torch.tensor([ends[i + 1] - ends[i] for i, _ in part])
            at = torch.repeat_interleave(torch.tensor([points[k] for _, k in part]), lengths).to(text)[:, None]
            embeds = (start[places] + at * (text - start)[places]).requires_grad_()
            cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(base.device, torch.int32)
            given = {name: t[places] for name, t in others.items()}
            output = model(
                inputs_embeds=embeds, cu_seqlens=cu_seqlens, max_seqlen=int(lengths.max()), return_dict=True, **given
            )
            scores = score(output, cu_seqlens.long())
            if scores.shape != (len(part),):
                raise InputError(f"the target gives shape {tuple(scores.shape)} for {len(part)} texts: one number each")
            (gradient,) = torch.autograd.grad(scores.sum(), embeds)
            share = torch.repeat_interleave(torch.tensor([shares[k] for _, k in part]), lengths)
            total.index_add_(0, places, gradient.float() * share.to(base.device)[:, None])
            for (i, k), value in zip(part, scores.tolist(), strict=True):
                values[i, k] = value
    added = ((text - start).float() * total).sum(-1)
    return [
        Attribution(added[ends[i] : ends[i + 1]], float(values[i, -1]), float(values[i, 0])) for i in range(len(values))
    ]


def _parts(ends: list[int], points: int, batch_tokens: int) -> Iterator[list[tuple[int, int]]]:
    """Lists of (text, point) with at most `batch_tokens` tokens, or one text. Texts without tokens are in none."""
    part, tokens = list[tuple[int, int]](), 0
    for i in range(len(ends) - 1):
        length = ends[i + 1] - ends[i]
        for k in range(points if length else 0):
            if part and tokens + length > batch_tokens:
                yield part
                part, tokens = [], 0
            part.append((i, k))
            tokens += length
    if part:
        yield part


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Gradients of inputs alone: those of weights would take two thirds of backward."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for p in trained:
            p.requires_grad_(True)
