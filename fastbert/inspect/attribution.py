"""Which words decided: integrated gradients and gradient-weighted attention of packed texts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fastbert.data.budget import token_batches
from fastbert.errors import InputError
from fastbert.inspect.live import as_ours
from fastbert.inspect.texts import PackedTexts, frozen
from fastbert.models.base import PreTrainedModel
from fastbert.models.outputs import ModelOutput
from fastbert.packed_inputs import PackedInputs

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


def similarity(vector: torch.Tensor, pool: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Target:
    """The cosine of a text's vector and another one, (width,): why two texts are close.

    `pool` makes the vectors (texts, width) of packed hidden states (total_tokens, hidden_size) and cu_seqlens.
    """

    def score(output: ModelOutput, cu_seqlens: torch.Tensor) -> torch.Tensor:
        pooled = pool(output["last_hidden_state"], cu_seqlens)
        return torch.nn.functional.cosine_similarity(pooled.float(), vector.float()[None])

    return score


def _texts_to_embed(model: PreTrainedModel, batch: PackedInputs) -> PackedTexts:
    texts, config = PackedTexts.of(model, batch), model.base_model.config
    if config.embeddings.skips_given:
        raise InputError(
            f"{config.model_type} takes inputs_embeds for the sum of its embeddings, not for those of words"
        )
    return texts


def _scores(target: Target | int, output: ModelOutput, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """(texts,); a number stands for its `label`."""
    scores = (label(target) if isinstance(target, int) else target)(output, cu_seqlens.long())
    texts = cu_seqlens.shape[0] - 1
    if scores.shape != (texts,):
        raise InputError(
            f"target gives shape {tuple(scores.shape)} for {texts} texts; it must be ({texts},), a number for each text"
        )
    return scores


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
    model: nn.Module,
    batch: PackedInputs,
    target: Target | int,
    *,
    baseline_id: int | None = None,
    kept_ids: Collection[int] = (),
    steps: int = 50,
    batch_tokens: int = 8192,
) -> list[Attribution]:
    """Integrated gradients (Sundararajan et al. 2017) of each text of a batch, with respect to its word embeddings.

    The path goes straight from the embeddings of a baseline to those of the text; the gradients along it are summed by
    the Gauss-Legendre rule. Points of the path, of all texts, run as packed batches.

    Args:
        model: one of fastbert's, or transformers', in eval mode. Its weights get no gradients.
        batch: packed texts (`fastbert.pack_inputs`).
        target: what is explained: `label(i)`, for which the number i stands, `token_label`, `span`, `similarity`, or
            another function of that kind.
        baseline_id: the token that stands at every place of the baseline; default: the padding token.
        kept_ids: tokens that stand in the baseline as in the text ([CLS] and [SEP]).
        steps: points of the path.
        batch_tokens: how many tokens run at once, of all points and texts.

    Raises:
        InputError: the model is in training mode; it adds nothing to `inputs_embeds` (ESM); a text has padding between
            its tokens; there is no padding token, and no baseline_id; steps is below 1.
    """
    if steps < 1:
        raise InputError(f"steps is {steps}; at least 1 point of the path is needed")
    model = as_ours(model)
    texts, words = _texts_to_embed(model, batch), model.get_input_embeddings()
    fill = model.base_model.config.pad_token_id if baseline_id is None else baseline_id
    if fill is None:
        raise InputError("the model has no padding token: give baseline_id")
    kept = torch.isin(texts.ids, torch.tensor(sorted(kept_ids), device=texts.ids.device, dtype=torch.int64))
    with torch.no_grad():
        there = words(texts.ids)
        start = torch.where(kept[:, None], there, words(torch.full_like(texts.ids, fill)))
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    points = [0.0, *((1 + nodes) / 2).tolist(), 1.0]
    shares = [0.0, *(weights / 2).tolist(), 0.0]  # of the two ends only the values are wanted
    lengths = texts.lengths
    total, values = torch.zeros_like(there, dtype=torch.float32), torch.zeros(len(lengths), len(points))
    rows = [(i, k) for i, length in enumerate(lengths) if length for k in range(len(points))]
    with frozen(model):
        for chosen in token_batches([lengths[i] for i, _ in rows], batch_tokens):
            part = [rows[j] for j in chosen]
            of_texts = [i for i, _ in part]
            places, repeats = texts.places(of_texts), torch.tensor([lengths[i] for i in of_texts])
            at, share = (
                torch.repeat_interleave(torch.tensor([numbers[k] for _, k in part]), repeats).to(there.device)[:, None]
                for numbers in (points, shares)
            )
            embeds = (start[places] + at.to(there.dtype) * (there - start)[places]).requires_grad_()
            arguments = texts.arguments(of_texts, places)
            output = model(inputs_embeds=embeds, return_dict=True, **arguments)
            scores = _scores(target, output, arguments["cu_seqlens"])
            (gradient,) = torch.autograd.grad(scores.sum(), embeds)
            total.index_add_(0, places, gradient.float() * share)
            for (i, k), value in zip(part, scores.tolist(), strict=True):
                values[i, k] = value
    added = ((there - start).float() * total).sum(-1)
    return [
        Attribution(of_text, float(values[i, -1]), float(values[i, 0]))
        for i, of_text in enumerate(added.split(lengths))
    ]


def attention_relevance(model: nn.Module, batch: PackedInputs, target: Target | int) -> list[torch.Tensor]:
    """Gradient-weighted attention (Chefer et al. 2021, "Generic attention-model explainability", section 3.2).

    A layer passes on what its heads' probabilities times their gradients say, as far as these are positive, and what
    it has got itself.

    Args:
        model: one of fastbert's, or transformers', in eval mode. Its weights get no gradients.
        batch: packed texts (`fastbert.pack_inputs`).
        target: as of `integrated_gradients`.

    Returns:
        Of each text (tokens, tokens), float32: a row says how much each token matters for what stands at one token
        behind the last layer; row 0, without its own column, explains a head that reads the first token.

    Raises:
        InputError: the model is in training mode; it adds nothing to `inputs_embeds` (ESM); a text has padding between
            its tokens.
    """
    model = as_ours(model)
    texts = _texts_to_embed(model, batch)
    lengths = texts.lengths
    of_texts = [i for i, length in enumerate(lengths) if length]
    matrices = [torch.zeros(length, length, device=texts.ids.device) for length in lengths]
    if not of_texts:
        return matrices
    with frozen(model):
        places = texts.places(of_texts)
        embeds = model.get_input_embeddings()(texts.ids[places]).detach().requires_grad_()
        arguments = texts.arguments(of_texts, places)
        output = model(inputs_embeds=embeds, output_attentions=True, return_dict=True, **arguments)
        probs = output["attentions"]
        gradients = torch.autograd.grad(_scores(target, output, arguments["cu_seqlens"]).sum(), probs)
    mixed = [(a.detach().float() * g.float()).clamp(min=0).mean(1) for a, g in zip(probs, gradients, strict=True)]
    for row, i in enumerate(of_texts):
        relevance = torch.eye(lengths[i], device=texts.ids.device)
        for layer in mixed:
            relevance = relevance + layer[row, : lengths[i], : lengths[i]] @ relevance
        matrices[i] = relevance
    return matrices
