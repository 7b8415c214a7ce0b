"""ELECTRA (Clark et al. 2020): a small generator masks, a discriminator says which tokens were replaced."""

from __future__ import annotations

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

    def compute(self, encoded, given):
        batch, head = encoded.batch, "discriminator_predictions"

        def run(x):
            x = linear(get_leaf(self, f"{head}.dense"), x, self.config.activation)
            return linear(get_leaf(self, f"{head}.dense_prediction"), x).squeeze(-1)

        logits, loss = within(self, head, run, encoded.packed), None
        if given:
            labels = self.pack_labels(given["labels"], batch, 2)
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
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> ModelOutput:
        """input_ids (batch, seqlen) or packed, with [MASK] where labels hold the original id and -100 elsewhere.

        Returns `loss`, and `logits`, the discriminator's, of input_ids' shape. Replacements are sampled from the
        generator with torch's generator; a sample that equals the original counts as original.
        """
        layout = {
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
        }
        arguments = (input_ids, attention_mask, token_type_ids, None, None, cu_seqlens, max_seqlen)
        encoded, _ = self.generator.run_base(arguments)
        packed, batch = encoded.packed, encoded.batch
        packed_labels = self.generator.pack_labels(labels, batch, self.generator.num_words())
        kept = (packed_labels != -100).nonzero().flatten()
        hidden = self.generator.masked_lm_hidden(packed.index_select(0, kept))
        targets = packed_labels.index_select(0, kept)
        generator_loss = self.generator.decoder_loss(hidden, targets)

        with torch.no_grad():  # the sampling step passes no gradient back (section 2)
            probs = linear(self.generator.get_output_embeddings(), hidden).float().softmax(-1)
            sampled = torch.multinomial(probs, 1).flatten() if kept.numel() else targets
            flat_kept = kept if batch.indices is None else batch.indices[kept]
            ids, is_replaced = input_ids.long().flatten(), (sampled != targets).long()
            corrupted = ids.index_copy(0, flat_kept, sampled).view(input_ids.shape)
            replaced = torch.zeros_like(ids).index_copy(0, flat_kept, is_replaced).view(input_ids.shape)
        out = self.discriminator(corrupted, labels=replaced, **layout)
        return ModelOutput(loss=generator_loss + self.discriminator_weight * out.loss, logits=out.logits)
