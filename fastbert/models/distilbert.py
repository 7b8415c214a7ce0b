"""DistilBERT (Sanh et al. 2019): BERT without token types and without a pooler, under its own names."""

from __future__ import annotations

from fastbert.layers.embeddings import EmbeddingNames
from fastbert.layers.encoder import LayerNames
from fastbert.models import heads, masked_lm
from fastbert.models.base import EncoderModel
from fastbert.models.family import Family, MaskedLMNames, SequenceHead

_SEQUENCE = SequenceHead(pooled=False, dense="pre_classifier", activation=lambda config: "relu")


class DistilBertModel(EncoderModel):
    family = Family(
        model_type="distilbert",
        prefix="distilbert",
        embeddings=EmbeddingNames(token_type=None),
        layer=LayerNames(
            query="attention.q_lin",
            key="attention.k_lin",
            value="attention.v_lin",
            attention_output="attention.out_lin",
            attention_norm="sa_layer_norm",
            up="ffn.lin1",
            down="ffn.lin2",
            feed_forward_norm="output_layer_norm",
        ),
        layer_path=lambda config, i: f"transformer.layer.{i}",
        pooler=None,
        attention_output_dropout=False,
        masked_lm=MaskedLMNames("vocab_transform", "vocab_layer_norm", "vocab_projector", None),
        sequence=_SEQUENCE,
        multiple_choice=_SEQUENCE,
        token_dropout=lambda config: config.hidden_dropout_prob,
    )


class DistilBertForMaskedLM(masked_lm.ForMaskedLM):
    base_class = DistilBertModel


class DistilBertForSequenceClassification(heads.ForSequenceClassification):
    base_class = DistilBertModel


class DistilBertForTokenClassification(heads.ForTokenClassification):
    base_class = DistilBertModel


class DistilBertForQuestionAnswering(heads.ForQuestionAnswering):
    base_class = DistilBertModel


class DistilBertForMultipleChoice(heads.ForMultipleChoice):
    base_class = DistilBertModel
