"""Batches and labels that fastbert's models and transformers' own both take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from family_configs import CHOICES
from seeds import torch_generator

from fastbert import families
from fastbert.config import EncoderConfig
from fastbert.families.schema import ReplacedTokens
from fastbert.testing.cases import attention_mask


@dataclass
class Batch:
    """Inputs of both libraries; which tokens are real, and every token's position, both (batch_size, seqlen)."""

    inputs: dict[str, torch.Tensor]
    real: torch.Tensor
    positions: torch.Tensor

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.real.sum(1).cumsum(0), (1, 0)).int()

    def packed(self) -> dict[str, torch.Tensor]:
        """The same batch as packed input, at the same positions."""
        inputs = {name: t[self.real] for name, t in self.inputs.items() if name != "attention_mask"}
        layout = {"cu_seqlens": self.cu_seqlens, "max_seqlen": int(self.real.sum(1).max())}
        return {**inputs, "position_ids": self.positions[self.real], **layout}

    def front(self, tokens: torch.Tensor, last: bool = False) -> torch.Tensor:
        """(batch_size, seqlen) values of tokens, each sequence's real ones moved to the left, or to the right."""
        order = self.real if last else ~self.real
        return tokens.gather(1, order.long().argsort(dim=1, stable=True))

    def real_tokens_first(self, last: bool = False) -> Batch:
        """The same sequences at the left, at the positions that they have here; or, `last`, at the right.

        transformers' pooled heads read column 0, or the last, fastbert's each sequence's first, or last, real token:
        here they are the same.
        """
        inputs = {name: self.front(t, last) for name, t in {**self.inputs, "position_ids": self.positions}.items()}
        return Batch(inputs, self.front(self.real, last), inputs["position_ids"])

    def with_pads(self, pad: int) -> Batch:
        """The same with this id wherever a mask leaves a token out."""
        ids = self.inputs["input_ids"]
        return Batch({**self.inputs, "input_ids": ids.where(self.real, pad)}, self.real, self.positions)

    def with_a_token_in_each(self) -> Batch:
        """Sequences that have none show their first column, and still count as without: transformers' mean of no token
        is 0 / 0, of which a label of -100 makes NaN in every gradient.
        """
        if self.real.any(1).all():
            return self
        mask = self.real.clone()
        mask[~self.real.any(1), 0] = True
        return Batch({**self.inputs, "attention_mask": mask.long()}, self.real, self.positions)


def make_batch(
    config: EncoderConfig, pattern: str = "right", batch_size: int = 6, seqlen: int = 11, seed: int = 0
) -> Batch:
    """Random ids, pad ids among them; at padding the pad id, except among the holes."""
    generator = torch_generator(seed + 1)
    mask = attention_mask(pattern, batch_size, seqlen, seed)
    real = torch.ones(batch_size, seqlen, dtype=torch.bool) if mask is None else mask.bool()
    ids = torch.randint(config.vocab_size, (batch_size, seqlen), generator=generator)
    ids = ids if pattern == "holes" else ids.where(real, config.pad_token_id)
    if config.own.get("mask_token_id") is not None:  # transformers' ESM counts those, too, that a mask leaves out
        masks = ids == config.mask_token_id
        only_masks = (masks | ~real).all(1, keepdim=True)  # a length of 0, by which it divides: NaN
        ids = ids.where(~masks | (real & ~only_masks), config.pad_token_id)
    positions = torch.arange(seqlen).expand(batch_size, -1)
    if config.family.positions_from_ids and config.embeddings.position is not None:
        counted = (ids != config.pad_token_id).long()
        positions = counted.cumsum(1) * counted + config.pad_token_id
    inputs = {"input_ids": ids}
    if config.type_vocab_size:
        inputs["token_type_ids"] = torch.randint(config.type_vocab_size, (batch_size, seqlen), generator=generator)
    if config.embeddings.task_type is not None:
        limit = config.task_type_vocab_size
        inputs["task_type_ids"] = torch.randint(limit, (batch_size, seqlen), generator=generator)
    if mask is not None:
        inputs["attention_mask"] = mask
    return Batch(inputs, real, positions)


def token_level(model_type: str, head: str) -> bool:
    """Whether the field `logits` holds one row a token."""
    is_replaced = isinstance(families.FAMILIES[model_type].heads.get(head), ReplacedTokens)
    return is_replaced or head in ("MaskedLM", "TokenClassification")


def make_labels(config, head: str, batch: Batch, seed: int) -> dict[str, torch.Tensor]:
    """Labels under transformers' names; -100 at padding, and for sequences without a token."""
    generator = torch_generator(seed)
    (rows, columns), real, comparable = batch.real.shape, batch.real, batch.real.any(1)

    def draw(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(limit, shape, generator=generator)

    if head == "Model":
        return {}
    few = real & (torch.rand(rows, columns, generator=generator) < 0.4)
    few[0] |= real[0] & (real[0].cumsum(0) == 1)  # transformers' loss of no label at all is NaN
    masked_lm = draw(config.vocab_size, rows, columns).where(few, -100)
    if head == "MaskedLM":
        return {"labels": masked_lm}
    if head == "TokenClassification":
        return {"labels": draw(config.num_labels, rows, columns).where(few, -100)}
    if head == "NextSentencePrediction":
        return {"labels": draw(2, rows).where(comparable, -100)}
    if head == "SequenceClassification":
        return {"labels": draw(config.num_labels, rows).where(comparable, -100)}
    if head == "MultipleChoice":
        return {"labels": draw(CHOICES, rows // CHOICES).where(comparable.view(-1, CHOICES).all(1), -100)}
    if head == "QuestionAnswering":
        # One answer beyond the input does not count; among the others some stand at padding, which does not either.
        start, end = draw(columns, rows), draw(columns, rows)
        start[0] = end[0] = real[0].long().argmax()
        end[1] = columns + 7
        return {"start_positions": start, "end_positions": end}
    data = config.family.heads[head]
    if isinstance(data, ReplacedTokens):
        return {"labels": draw(2, rows, columns)}
    return {"labels": masked_lm, data.pair_label: draw(2, rows).where(comparable, -100)}
