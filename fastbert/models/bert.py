"""BERT (Devlin et al. 2018): the family that the others are described against."""

from __future__ import annotations

from fastbert.models import heads, masked_lm
from fastbert.models.base import EncoderModel
from fastbert.models.family import Family, MaskedLMNames

BERT_MASKED_LM = MaskedLMNames(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    bias="cls.predictions.bias",
)


class BertModel(EncoderModel):
    family = Family(model_type="bert", prefix="bert", masked_lm=BERT_MASKED_LM)


class BertForMaskedLM(masked_lm.ForMaskedLM):
    base_class = BertModel


class BertForPreTraining(masked_lm.ForPreTraining):
    base_class = BertModel


class BertForNextSentencePrediction(masked_lm.ForNextSentencePrediction):
    base_class = BertModel


class BertForSequenceClassification(heads.ForSequenceClassification):
    base_class = BertModel


class BertForTokenClassification(heads.ForTokenClassification):
    base_class = BertModel


class BertForQuestionAnswering(heads.ForQuestionAnswering):
    base_class = BertModel


class BertForMultipleChoice(heads.ForMultipleChoice):
    base_class = BertModel
