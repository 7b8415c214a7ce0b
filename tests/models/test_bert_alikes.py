"""Models with names of their own that are a family's config and another tokenizer: one config each.

The entries are those of config.json files, with the ones that fastbert does not read; what makes a model large is
made small.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from hf import hf_class, hf_config, make_oracle, randomise
from seeds import manual_seed

import fastbert
from fastbert.config import EncoderConfig
from fastbert.models.auto import model_class
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

BERT = {
    "attention_probs_dropout_prob": 0.1, "classifier_dropout": None, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
    "torch_dtype": "float32", "transformers_version": "4.30.0", "type_vocab_size": 2, "use_cache": True,
    "vocab_size": 30522,
}  # fmt: skip
ROBERTA = {
    **BERT,
    "model_type": "roberta",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
XLM_ROBERTA = {**ROBERTA, "model_type": "xlm-roberta", "output_past": True, "vocab_size": 250002}
DISTILBERT = {
    "activation": "gelu", "attention_dropout": 0.1, "dim": 768, "dropout": 0.1, "hidden_dim": 3072,
    "initializer_range": 0.02, "max_position_embeddings": 512, "model_type": "distilbert", "n_heads": 12, "n_layers": 6,
    "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False,
    "tie_weights_": True, "vocab_size": 30522,
}  # fmt: skip
MODERNBERT = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281, "classifier_activation": "gelu",
    "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281,
    "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
    "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
    "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
    "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
    "position_embedding_type": "absolute", "reference_compile": None, "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100, "sparse_prediction": False, "tie_word_embeddings": True, "vocab_size": 50368,
}  # fmt: skip
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

PUBLISHED = {
    "vinai/bertweet-base": {**ROBERTA, "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 130,
                            "tokenizer_class": "BertweetTokenizer", "vocab_size": 64001},
    "vinai/phobert-base": {**ROBERTA, "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 258,
                           "tokenizer_class": "PhobertTokenizer", "vocab_size": 64001},
    "allegro/herbert-base-cased": {**BERT, "architectures": ["BertForMaskedLM"], "max_position_embeddings": 514,
                                   "pad_token_id": 1, "tokenizer_class": "HerbertTokenizerFast", "vocab_size": 50000},
    "BAAI/bge-base-en-v1.5": {**BERT, **ONE_LABEL, "_name_or_path": "/root/.cache", "architectures": ["BertModel"]},
    "BAAI/bge-m3": {**XLM_ROBERTA, "architectures": ["XLMRobertaModel"], "max_position_embeddings": 8194},
    "BAAI/bge-reranker-base": {**XLM_ROBERTA, **ONE_LABEL, "architectures": ["XLMRobertaForSequenceClassification"]},
    "intfloat/e5-base-v2": {**BERT, "architectures": ["BertModel"]},
    "intfloat/multilingual-e5-base": {**XLM_ROBERTA, "architectures": ["XLMRobertaModel"]},
    "thenlper/gte-base": {**BERT, "architectures": ["BertModel"], "torch_dtype": "float16"},
    "sentence-transformers/all-MiniLM-L6-v2": {**BERT, "architectures": ["BertModel"], "num_hidden_layers": 6,
                                               "_name_or_path": "nreimers/MiniLM-L6-H384-uncased"},
    "cross-encoder/ms-marco-MiniLM-L6-v2": {
        **BERT, **ONE_LABEL, "architectures": ["BertForSequenceClassification"],
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0.dev0"},
    },
    "naver/splade-cocondenser-ensembledistil": {**BERT, "architectures": ["BertForMaskedLM"]},
    "naver/splade-v3-distilbert": {**DISTILBERT, "architectures": ["DistilBertForMaskedLM"]},
    "Alibaba-NLP/gte-modernbert-base": {**MODERNBERT, "architectures": ["ModernBertModel"]},
    "Alibaba-NLP/gte-reranker-modernbert-base": {**MODERNBERT, **ONE_LABEL,
                                                 "architectures": ["ModernBertForSequenceClassification"]},
}  # fmt: skip
SMALL = {"vocab_size": 60, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64}


def config_of(name: str) -> tuple[dict, EncoderConfig]:
    """The published entries, made small under the family's names of them, and what fastbert reads of them."""
    entries = dict(PUBLISHED[name])
    names = fastbert.families.FAMILIES[entries["model_type"]].hf_names
    entries |= {names.get(field, field): value for field, value in SMALL.items()}
    entries["pad_token_id"] = min(entries["pad_token_id"], 3)
    return entries, EncoderConfig.from_dict(entries)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config(name):
    """It is read, nothing of it is lost, and the model that it names computes what transformers' does."""
    EncoderConfig.from_dict(PUBLISHED[name])
    entries, config = config_of(name)
    kept = config.to_dict()
    lost = {key for key, value in entries.items() if kept.get(key) != value}
    assert lost <= {"label2id", "global_rope_theta", "local_rope_theta"}, lost  # in rope_parameters by now
    (cls,) = entries["architectures"]
    head = cls.partition("For")[2] or "Model"
    manual_seed(0)
    theirs = randomise(getattr(transformers, cls)(hf_config(config))).eval()
    assert type(theirs) is hf_class(config.model_type, head)
    ours = model_class(config.model_type, head)(config).eval()
    ours.load_state_dict(theirs.state_dict())
    ids, mask = torch.randint(4, 60, (3, 21)), torch.ones(3, 21, dtype=torch.long)
    mask[1, 8:] = 0
    ids[mask == 0] = config.pad_token_id
    with torch.no_grad():
        outs = [model(ids, attention_mask=mask) for model in (ours, theirs, make_oracle(theirs))]

    def shown(out) -> torch.Tensor:
        out = out[0]
        if "splade" in name:  # Formal et al. 2021: max over tokens of log(1 + relu(logits))
            return (torch.log1p(out.relu()) * mask[..., None]).amax(1)
        return out if out.dim() == 2 else out[mask.bool()]

    found, baseline, oracle = map(shown, outs)
    assert_close_to_reference(found, oracle, baseline, GRADIENT_FACTOR)
    assert found.shape[-1] == {"SequenceClassification": 1, "MaskedLM": 60, "Model": 48}[head]
