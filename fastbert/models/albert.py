"""ALBERT (Lan et al. 2019): factorised embeddings, layers that share their weights, sentence order prediction."""

from __future__ import annotations

from fastbert.layers.embeddings import EmbeddingNames
from fastbert.layers.encoder import LayerNames
from fastbert.models import heads, masked_lm
from fastbert.models.base import EncoderModel
from fastbert.models.family import BERT_LAYER, Family, MaskedLMNames


def _layer_path(config, i: int) -> str:
    group, inner = divmod(i, config.inner_group_num)
    return f"encoder.albert_layer_groups.{group}.albert_layers.{inner}"


class AlbertModel(EncoderModel):
    family = Family(
        model_type="albert",
        prefix="albert",
        embeddings=EmbeddingNames(project="encoder.embedding_hidden_mapping_in"),
        layer=LayerNames(
            query="attention.query",
            key="attention.key",
            value="attention.value",
            attention_output="attention.dense",
            attention_norm="attention.LayerNorm",
            up="ffn",
            down="ffn_output",
            feed_forward_norm="full_layer_layer_norm",
            order=("feed_forward_norm", *BERT_LAYER.order[:-1]),
        ),
        layer_path=_layer_path,
        pooler="pooler",
        feed_forward_dropout=False,
        masked_lm=MaskedLMNames(
            dense="predictions.dense",
            norm="predictions.LayerNorm",
            decoder="predictions.decoder",
            bias="predictions.bias",
            order=("norm", "dense"),
        ),
        pair="sop_classifier.classifier",
    )


class AlbertForMaskedLM(masked_lm.ForMaskedLM):
    base_class = AlbertModel


class AlbertForPreTraining(masked_lm.ForPreTraining):
    """Masked LM and sentence order (0: the original order, 1: switched; section 3.1 of the paper)."""

    base_class = AlbertModel
    pair_label = "sentence_order_label"
    pair_logits = "sop_logits"
    option_names = ("labels", "sentence_order_label")

    @property
    def label_leaf(self):
        return self.family.pair

    def pair_size(self, config):
        return config.num_labels

    def pair_input(self, pooled):
        return self.drop(pooled, self.config.head_dropout)


class AlbertForSequenceClassification(heads.ForSequenceClassification):
    base_class = AlbertModel


class AlbertForTokenClassification(heads.ForTokenClassification):
    base_class = AlbertModel


class AlbertForQuestionAnswering(heads.ForQuestionAnswering):
    base_class = AlbertModel


class AlbertForMultipleChoice(heads.ForMultipleChoice):
    base_class = AlbertModel
