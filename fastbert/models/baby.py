"""A pre-norm BERT, and its smallest member: the "baby" BERT for teaching.

Pre-norm (Xiong et al. 2020) normalises before each half of a layer and once at the end, so that even tiny models train
without warm-up. The layout and the names are those of Megatron-BERT (Shoeybi et al. 2019, section 3), which
transformers has as `megatron-bert`: what is saved here loads there.
"""

from __future__ import annotations

from dataclasses import replace

from fastbert.config import EncoderConfig
from fastbert.layers.embeddings import EmbeddingNames
from fastbert.models import heads, masked_lm
from fastbert.models.base import EncoderModel
from fastbert.models.bert import BERT_MASKED_LM
from fastbert.models.family import BERT_LAYER, Family


def baby_config(vocab_size: int = 1000, **fields) -> EncoderConfig:
    """The config of a model with 2 layers of width 64 and ReLU, small enough to watch. `fields` change any of it."""
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "hidden_act": "relu",
        "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return EncoderConfig.of_family("megatron-bert", vocab_size=vocab_size, **{**small, **fields})


class MegatronBertModel(EncoderModel):
    family = Family(
        model_type="megatron-bert",
        prefix="bert",
        embeddings=EmbeddingNames(norm=None),
        layer=replace(
            BERT_LAYER,
            attention_norm="attention.ln",
            feed_forward_norm="ln",
            order=("attention_norm", *BERT_LAYER.order[:4], "feed_forward_norm", "up", "down"),
        ),
        final_norm="encoder.ln",
        norm_first=True,
        masked_lm=BERT_MASKED_LM,
    )


class MegatronBertForMaskedLM(masked_lm.ForMaskedLM):
    base_class = MegatronBertModel


class MegatronBertForPreTraining(masked_lm.ForPreTraining):
    base_class = MegatronBertModel


class MegatronBertForNextSentencePrediction(masked_lm.ForNextSentencePrediction):
    base_class = MegatronBertModel


class MegatronBertForSequenceClassification(heads.ForSequenceClassification):
    base_class = MegatronBertModel


class MegatronBertForTokenClassification(heads.ForTokenClassification):
    base_class = MegatronBertModel


class MegatronBertForQuestionAnswering(heads.ForQuestionAnswering):
    base_class = MegatronBertModel


class MegatronBertForMultipleChoice(heads.ForMultipleChoice):
    base_class = MegatronBertModel
