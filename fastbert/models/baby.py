"""The "baby" BERT for teaching: the smallest member of the pre-norm family (families/megatron_bert.py)."""

from __future__ import annotations

from fastbert.config import EncoderConfig


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
