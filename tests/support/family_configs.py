"""The configurations that tests have of every family: small ones, which differ in what a family can differ in."""

from __future__ import annotations

from fastbert import families
from fastbert.config import EncoderConfig

# head_dim 32, 80 and 64; 1 to 4 layers; LayerNorm eps that is seen in the result; tied and untied.
_SHAPES = (
    {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 96},
    {"hidden_size": 160, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 56,
     "hidden_act": "silu", "layer_norm_eps": 1e-5},
    {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 72,
     "hidden_act": "gelu_new", "layer_norm_eps": 1e-2, "tie_word_embeddings": False},
    # The "baby" of fastbert.models.baby, in every family.
    {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 128,
     "hidden_act": "relu", "initializer_range": 0.05},
)  # fmt: skip
_SMOOTH = {"hidden_act": "gelu"}  # of gates without a bias, which could keep them from where a ReLU bends
_BOTH = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_OF_FAMILY = {
    "albert": (
        {"embedding_size": 48},
        {"embedding_size": 160, "num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2},
        {"embedding_size": 32, "num_hidden_layers": 2, "num_hidden_groups": 2},
        {"embedding_size": 64, "num_hidden_groups": 3},
    ),
    "deberta": (
        {**_BOTH, "max_relative_positions": 6, "position_biased_input": False},
        {"relative_attention": True, "pos_att_type": ["c2p"], "embedding_size": 48, "type_vocab_size": 2},
        {"relative_attention": True, "pos_att_type": ["p2c"], "max_relative_positions": 30},
        {**_BOTH, "legacy": False, "pooler_hidden_act": "tanh"},
    ),
    "deberta-v2": (
        {
            **_BOTH,
            "position_buckets": 4,
            "max_relative_positions": 12,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
        {**_BOTH, "conv_kernel_size": 3, "conv_groups": 2, "embedding_size": 48, "type_vocab_size": 2},
        {"relative_attention": True, "pos_att_type": ["c2p"], "conv_kernel_size": 5, "conv_act": "gelu"},
        {"relative_attention": True, "pos_att_type": ["p2c"], "position_buckets": 6, "legacy": False},
    ),
    "electra": (
        {"embedding_size": 48},
        {"embedding_size": 160, "summary_activation": "silu"},
        {"embedding_size": 32, "summary_activation": "tanh"},
        {"embedding_size": 64, "summary_activation": ""},
    ),
    "ernie": ({"use_task_id": True}, {}, {"use_task_id": True, "task_type_vocab_size": 5}, {}),
    "esm": (
        {"pad_token_id": 0, "position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 7},
        {"pad_token_id": 1, "emb_layer_norm_before": True},
        {"pad_token_id": 3, "token_dropout": True, "mask_token_id": 9, "emb_layer_norm_before": True},
        {"pad_token_id": 0, "position_embedding_type": "rotary", "rope_theta": 50.0},
    ),
    "eurobert": (
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "classifier_pooling": "bos"},
        {"num_key_value_heads": 2, "head_dim": 32, "classifier_pooling": "mean"},
        {"mlp_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}},
    ),
    "gemma3_text": (
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 50,
            "sliding_window": 6,
            "sliding_window_pattern": 3,
        },
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 40,
            "query_pre_attn_scalar": 20,
            "attention_bias": True,
            "use_bidirectional_attention": True,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
        },
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "use_bidirectional_attention": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"],
        },
        {
            **_SMOOTH,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 7,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}},
        },
    ),
    "gte": ({}, {"type_vocab_size": 0}, {"type_vocab_size": 2}, _SMOOTH),
    "modernbert": (
        {"local_attention": 6},
        {
            "local_attention": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "decoder_bias": False,
            "norm_bias": True,
            "attention_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
        },
        {"local_attention": 8, "layer_types": ["sliding_attention"], "classifier_activation": "silu"},
        {"local_attention": 4, "mlp_bias": True, "global_attn_every_n_layers": 2},
    ),
    "nomic_bert": ({}, {"type_vocab_size": 1}, {"head_dim": 32}, _SMOOTH),
    "qwen3": (
        {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True, "pad_token_id": 0},
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 40,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "pad_token_id": 1,
        },
        {"num_key_value_heads": 2, "head_dim": 64, "is_causal": False, "pad_token_id": 0},
        {
            **_SMOOTH,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "is_causal": False,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0},
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "rembert": tuple(
        {"embedding_size": n, "output_embedding_size": m} for n, m in ((48, 40), (160, 24), (32, 128), (64, 64))
    ),
    "roberta": ({"type_vocab_size": 1}, {}, {"type_vocab_size": 1, "pad_token_id": 3}, {}),
    "roformer": ({}, {"embedding_size": 48}, {"rotary_value": True}, {"embedding_size": 32, "rotary_value": True}),
    "ultrabert": (
        {"sliding_window": 3, "num_key_value_heads": 1, "prediction_head_size": 40, "tie_word_embeddings": True},
        {
            "sliding_window": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_pooling": "mean",
            "tie_word_embeddings": True,
        },
        {"sliding_window": 4, "layer_types": ["sliding_attention"], "head_dim": 32, "prediction_head_size": 24},
        {**_SMOOTH, "sliding_window": 5, "num_key_value_heads": 2},
    ),
    "xlm-roberta": ({}, {"type_vocab_size": 1}, {}, {}),
}
BY_LAYER_TYPE = ("gemma3_text", "modernbert", "ultrabert")  # their rope_parameters hold an object for each
NUM_CONFIGS = len(_SHAPES)
CHOICES = 2


def head_of(model_type: str, head: str = "TokenClassification", other: str = "SequenceClassification") -> str:
    """This one, or where the family has none, another."""
    return head if head in families.FAMILIES[model_type].heads else other


def few_heads(model_type: str, hidden_size: int = 32, num_attention_heads: int = 2, **others) -> dict:
    """Fields for so few heads, of families whose defaults are the heads of a large model."""
    width = hidden_size // num_attention_heads
    few = {"num_key_value_heads": num_attention_heads, "head_dim": width, "query_pre_attn_scalar": width}
    fields = families.FAMILIES[model_type].fields
    return {name: few[name] for name in few if name in fields and fields[name].default is not None}


def make_config(model_type: str, index: int = 0, **changes) -> EncoderConfig:
    """The family's configuration number `index`, small and without dropout."""
    own = _OF_FAMILY.get(model_type, ({},) * NUM_CONFIGS)[index]
    dropout = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "qa_dropout")
    fields = {"vocab_size": 43, "max_position_embeddings": 20, **dict.fromkeys(dropout, 0.0), **_SHAPES[index], **own}
    if model_type == "electra":
        fields["summary_last_dropout"] = 0.0
    family = families.FAMILIES[model_type]
    if (family.defaults.get("pad_token_id", 0) or 0) >= fields["vocab_size"]:
        fields["pad_token_id"] = 2
    for name in family.fixed:
        fields.pop(name, None)
    return EncoderConfig.of_family(model_type, **{**fields, **changes})


def has_rotary(config: EncoderConfig) -> bool:
    return any(spec.attention.rotary is not None for spec in config.layer_specs)


def has_windows(config: EncoderConfig) -> bool:
    return any(spec.attention.window_size != (-1, -1) for spec in config.layer_specs)


def measures_by_columns(config: EncoderConfig) -> bool:
    """Whether distances go by the columns of a padded batch, where a hole in a mask is as wide as it is."""
    distances = config.distances
    return distances is not None and (distances.has_windows or bool(distances.relatives))


def config_for(model_type: str, head: str, index: int = 0, **changes) -> EncoderConfig:
    """make_config with the number of labels that the head needs, three where it is free."""
    two = head in ("QuestionAnswering", "MultipleChoice", "NextSentencePrediction")
    return make_config(model_type, index, **{"num_labels": 2 if two else 3, **changes})
