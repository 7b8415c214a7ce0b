"""ELECTRA (Clark et al. 2020): a small generator masks, a discriminator says which tokens were replaced."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from fastbert import ops
from fastbert.layers.embeddings import EmbeddingNames
from fastbert.layers.leaves import get_leaf, linear, place, within
from fastbert.models import heads, masked_lm
from fastbert.models.base import EncoderModel
from fastbert.models.family import Family, MaskedLMNames, SequenceHead
from fastbert.models.outputs import ModelOutput
from fastbert.packed_inputs import PackedInputs, labels_of
from fastbert.packing import InputError


class ElectraModel(EncoderModel):
    family = Family(
        model_type="electra",
        prefix="electra",
        embeddings=EmbeddingNames(project="embeddings_project"),
        pooler=None,
        masked_lm=MaskedLMNames(
            dense="generator_predictions.dense",
            norm="generator_predictions.LayerNorm",
            decoder="generator_lm_head",
            bias=None,
            activation="gelu",
            order=("norm", "dense"),
        ),
        sequence=SequenceHead(
            out="classifier.out_proj",
            pooled=False,
            dense="classifier.dense",
            activation=lambda config: "gelu",
            dropout_first=True,
        ),
        multiple_choice=SequenceHead(
            pooled=False,
            dense="sequence_summary.summary",
            activation=lambda config: config.summary_activation,
            dropout=lambda config: config.summary_last_dropout,
        ),
    )


class ElectraForMaskedLM(masked_lm.ForMaskedLM):
    base_class = ElectraModel


class ElectraForPreTraining(heads.HeadModel):
    """The discriminator: was each token replaced (1) or not (0)? The loss counts real tokens only (section 2).

    Tokens labelled -100 do not count either.
    """

    base_class = ElectraModel

    def build_head(self, config):
        place(self, "discriminator_predictions.dense", nn.Linear(config.hidden_size, config.hidden_size))
        place(self, "discriminator_predictions.dense_prediction", nn.Linear(config.hidden_size, 1))

    def check_given(self, given, batch):
        return {name: heads.token_labels(labels, batch, 2) for name, labels in given.items()}

    def compute(self, encoded, given):
        batch, head = encoded.batch, "discriminator_predictions"

        def run(x):
            x = linear(get_leaf(self, f"{head}.dense"), x, self.config.activation)
            return linear(get_leaf(self, f"{head}.dense_prediction"), x).squeeze(-1)

        logits, loss = within(self, head, run, encoded.packed), None
        if given:
            labels = given["labels"]
            scores = ops.at_least_fp32(logits)
            losses = F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none")
            loss = losses.where(labels != -100, 0.0).sum() / (labels != -100).sum().clamp(min=1)
        return {"loss": loss, "logits": batch.unpack(logits)}


class ElectraForMultipleChoice(heads.ForMultipleChoice):
    base_class = ElectraModel


class ElectraForSequenceClassification(heads.ForSequenceClassification):
    base_class = ElectraModel


class ElectraForTokenClassification(heads.ForTokenClassification):
    base_class = ElectraModel


class ElectraForQuestionAnswering(heads.ForQuestionAnswering):
    base_class = ElectraModel


class ElectraForJointPreTraining(nn.Module):
    """Generator and discriminator trained together (section 2; `discriminator_weight` is the paper's lambda).

    The two share their token and position embeddings where their sizes agree, as in the paper (section 3.2). Each is an
    ordinary model: save them with their own save_pretrained.
    """

    def __init__(
        self,
        generator: ElectraForMaskedLM,
        discriminator: ElectraForPreTraining,
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

    def forward(
        self,
        input_ids: torch.Tensor | PackedInputs,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> ModelOutput:
        """input_ids (batch, seqlen) or packed, with [MASK] where labels hold the original id and -100 elsewhere.

        Or a PackedInputs with such labels: no device is waited for. Returns `loss`, and `logits`, the discriminator's,
        of input_ids' shape. Replacements are sampled from the generator with torch's generator; a sample that equals
        the original counts as original.
        """
        given = {} if labels is None else {"labels": labels}
        if isinstance(input_ids, PackedInputs):
            given = labels_of(input_ids, given)
        if "labels" not in given:
            raise InputError("joint pre-training needs labels")
        generator = self.generator
        arguments = (input_ids, attention_mask, token_type_ids, None, None, cu_seqlens, max_seqlen, None)
        inputs = generator.base_model.prepare(*arguments)
        packed_labels = generator.check_given(given, inputs.batch)["labels"]
        encoded, _ = generator.run_base(inputs, arguments)
        packed, batch = encoded.packed, encoded.batch
        kept = masked_lm.labelled_tokens(packed_labels, batch)
        hidden = generator.masked_lm_hidden(packed.index_select(0, kept))
        targets = packed_labels.index_select(0, kept)
        generator_loss = generator.decoder_loss(hidden, targets)

        with torch.no_grad():  # the sampling step passes no gradient back (section 2)
            probs = linear(generator.get_output_embeddings(), hidden).float().softmax(-1)
            # torch.multinomial's own way and bits, but for its look at whether all are numbers: that is a wait.
            sampled = (probs / torch.empty_like(probs).exponential_(1)).argmax(-1) if kept.numel() else targets
            is_replaced = (sampled != targets).long()
            if isinstance(input_ids, PackedInputs):
                ids, at = input_ids["input_ids"], kept
                # The samples are words of the generator's table, so the bounds of the ids before hold for those after.
                bounds = {**(batch.bounds or {}), "labels": (0, 1)}
                layout = {name: input_ids.get(name) for name in ("token_type_ids", "position_ids")}
                layout["batch"] = replace(batch, bounds=bounds, labelled=None)
            else:
                ids, at = input_ids.long(), kept if batch.indices is None else batch.indices[kept]
                layout = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
                layout |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            corrupted = ids.flatten().index_copy(0, at, sampled).view(ids.shape)
            replaced = torch.zeros_like(ids).flatten().index_copy(0, at, is_replaced).view(ids.shape)
            if isinstance(input_ids, PackedInputs):
                replaced = batch.unpack(replaced)
        out = self.discriminator(corrupted, labels=replaced, **layout)
        return ModelOutput(loss=generator_loss + self.discriminator_weight * out.loss, logits=out.logits)
