"""ELECTRA's generator and discriminator trained together (Clark et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from fastbert.errors import InputError
from fastbert.layers.leaves import get_leaf, linear
from fastbert.models import classes, masked_lm
from fastbert.models.heads import share_of
from fastbert.models.inputs import check_tensors
from fastbert.models.outputs import ModelOutput
from fastbert.packed_inputs import ModelInputs, PackedInputs, labels_of


class ElectraForJointPreTraining(nn.Module):
    """Generator and discriminator trained together (section 2; `discriminator_weight` is the paper's lambda).

    The two share their token and position embeddings where their sizes agree, as in the paper (section 3.2). Each is an
    ordinary model: save them with their own save_pretrained.
    """

    def __init__(
        self,
        generator: classes.ElectraForMaskedLM,
        discriminator: classes.ElectraForPreTraining,
        discriminator_weight: float = 50.0,
    ):
        super().__init__()
        small, large = generator.config, discriminator.config
        if small.vocab_size != large.vocab_size:
            raise ValueError(f"generator has a vocabulary of {small.vocab_size}, discriminator of {large.vocab_size}")
        self.generator, self.discriminator = generator, discriminator
        self.discriminator_weight = discriminator_weight
        if small.embedding_width == large.embedding_width:
            for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
                ours, theirs = (get_leaf(m.base_model, f"embeddings.{name}") for m in (generator, discriminator))
                if ours.weight.shape == theirs.weight.shape:
                    ours.weight = theirs.weight
            generator.tie_weights()

    def activation_checkpointing_enable(self) -> None:
        self.generator.activation_checkpointing_enable()
        self.discriminator.activation_checkpointing_enable()

    def forward(
        self,
        input_ids: torch.Tensor | PackedInputs,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        num_items_in_batch: Mapping[str, torch.Tensor | float] | None = None,
    ) -> ModelOutput:
        """input_ids (batch, seqlen) or packed, with [MASK] where labels hold the original id and -100 elsewhere.

        Or a PackedInputs with such labels: no device is waited for. Returns `loss`, the two of which it is
        made (`generator_loss`, `discriminator_loss`), and, of input_ids' shape, the discriminator's `logits` and what
        is `replaced` (1; padding rows have -100). Replacements are sampled from the generator with torch's generator; a
        sample that equals the original counts as original.

        num_items_in_batch: as of other models: of `labels`, and of `tokens`, which are real; their means are the two
        terms of the loss.
        """
        items = {} if num_items_in_batch is None else num_items_in_batch
        passed = {} if labels is None else {"labels": labels}
        if isinstance(input_ids, PackedInputs):
            passed = labels_of(input_ids, passed)
        check_tensors(passed)
        if "labels" not in passed:
            raise InputError("joint pre-training needs labels")
        generator = self.generator
        arguments = ModelInputs(input_ids, attention_mask, token_type_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        inputs = generator.base_model.prepare(arguments)
        packed_labels = generator.check_options(passed, inputs.batch)["labels"]
        encoded, _ = generator.run_base(inputs, arguments)
        packed, batch = encoded.packed, encoded.batch
        kept = masked_lm.labelled_tokens(packed_labels, batch)
        hidden = generator.masked_lm_hidden(packed.index_select(0, kept))
        targets = packed_labels.index_select(0, kept)
        generator_loss = generator.decoder_loss(hidden, targets)
        if "labels" in items:
            generator_loss = generator_loss * share_of(targets, items["labels"], batch)

        with torch.no_grad():  # the sampling step passes no gradient back (section 2)
            probs = linear(generator.get_output_embeddings(), hidden).float().softmax(-1)
            # torch.multinomial's own way and bits, but for its look at whether all are numbers: that is a wait.
            sampled = (probs / torch.empty_like(probs).exponential_(1)).argmax(-1) if kept.numel() else targets
            # Padding rows have no label. Their copies must say one thing of the one token that stands for them.
            sampled = sampled.where(targets != -100, 0)
            is_replaced = (sampled != targets).long().where(targets != -100, -100)
            if isinstance(input_ids, PackedInputs):
                ids, at, nothing_yet = input_ids["input_ids"], kept, torch.where(batch.has_sequence(), 0, -100)
                # The samples are words of the generator's table, so the bounds of the ids before hold for those after.
                bounds = {**(batch.bounds or {}), "labels": (0, 1)}
                layout = {name: input_ids.get(name) for name in ("token_type_ids", "position_ids")}
                layout["batch"] = replace(batch, bounds=bounds, labelled=None)
            else:
                ids, at = input_ids.long(), kept if batch.indices is None else batch.indices[kept]
                nothing_yet = torch.zeros_like(ids).flatten()
                layout = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
                layout |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            corrupted = ids.flatten().index_copy(0, at, sampled).view(ids.shape)
            replaced = nothing_yet.index_copy(0, at, is_replaced).view(ids.shape)
            if isinstance(input_ids, PackedInputs):
                replaced = batch.unpack(replaced)
        out = self.discriminator(corrupted, labels=replaced, num_items_in_batch=items.get("tokens"), **layout)
        parts = {"generator_loss": generator_loss.detach(), "discriminator_loss": out.loss.detach()}
        loss = generator_loss + self.discriminator_weight * out.loss
        return ModelOutput(loss=loss, logits=out.logits, replaced=replaced, **parts)
