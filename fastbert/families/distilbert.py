"""DistilBERT (Sanh et al. 2019): BERT without token types and without a pooler, under its own names."""

from fastbert.families.schema import (
    ClassifierHead,
    Embeddings,
    Family,
    FromConfig,
    HfClass,
    MaskedLM,
    heads,
)
from fastbert.layer_spec import LayerNames

_SEQUENCE = ClassifierHead(pooling="first", dense="pre_classifier", activation="relu")

FAMILY = Family(
    model_type="distilbert",
    classes="DistilBert",
    prefix="distilbert",
    hf_class=HfClass(
        "distilbert",
        "BaseModelOutput",
        dropouts={"attention.dropout": "attention", "ffn.dropout": "feed_forward"},
        embedding_arguments=("input_ids", "inputs_embeds", "position_ids"),
        layer_arguments=("attention_mask",),
    ),
    heads=heads(
        MaskedLM("vocab_transform", "vocab_layer_norm", "vocab_projector", None),
        sequence=_SEQUENCE,
        tokens=ClassifierHead(pooling="tokens", dropout=FromConfig("hidden_dropout_prob")),
        choice=_SEQUENCE,
    ),
    defaults={"num_hidden_layers": 6, "type_vocab_size": 0, "classifier_dropout": 0.2, "qa_dropout": 0.1},
    hf_names={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "classifier_dropout": "seq_classif_dropout",
    },
    aliases=("hidden_size", "num_hidden_layers", "num_attention_heads"),
    fixed=("type_vocab_size", "layer_norm_eps"),
    embeddings=Embeddings(token_type=None),
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
    layer_path="transformer.layer.{i}",
    pooler=None,
    attention_output_dropout=False,
)
