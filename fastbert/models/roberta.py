"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2019): positions counted from the ids, other head names."""

from __future__ import annotations

from dataclasses import replace

from fastbert.layers.embeddings import EmbeddingNames
from fastbert.models import heads, masked_lm
from fastbert.models.base import EncoderModel
from fastbert.models.family import Family, MaskedLMNames, SequenceHead

ROBERTA = Family(
    model_type="roberta",
    prefix="roberta",
    embeddings=EmbeddingNames(order=("word", "token_type", "norm", "position")),
    positions_from_ids=True,
    masked_lm=MaskedLMNames(
        dense="lm_head.dense",
        norm="lm_head.layer_norm",
        decoder="lm_head.decoder",
        bias="lm_head.bias",
        activation="gelu",
    ),
    sequence=SequenceHead(out="classifier.out_proj", pooled=False, dense="classifier.dense", dropout_first=True),
    multiple_choice=SequenceHead(dropout=lambda config: config.hidden_dropout_prob),
)


class RobertaModel(EncoderModel):
    family = ROBERTA


class RobertaForMaskedLM(masked_lm.ForMaskedLM):
    base_class = RobertaModel


class RobertaForSequenceClassification(heads.ForSequenceClassification):
    base_class = RobertaModel


class RobertaForTokenClassification(heads.ForTokenClassification):
    base_class = RobertaModel


class RobertaForQuestionAnswering(heads.ForQuestionAnswering):
    base_class = RobertaModel


class RobertaForMultipleChoice(heads.ForMultipleChoice):
    base_class = RobertaModel


class XLMRobertaModel(EncoderModel):
    family = replace(ROBERTA, model_type="xlm-roberta")


class XLMRobertaForMaskedLM(masked_lm.ForMaskedLM):
    base_class = XLMRobertaModel


class XLMRobertaForSequenceClassification(heads.ForSequenceClassification):
    base_class = XLMRobertaModel


class XLMRobertaForTokenClassification(heads.ForTokenClassification):
    base_class = XLMRobertaModel


class XLMRobertaForQuestionAnswering(heads.ForQuestionAnswering):
    base_class = XLMRobertaModel


class XLMRobertaForMultipleChoice(heads.ForMultipleChoice):
    base_class = XLMRobertaModel
