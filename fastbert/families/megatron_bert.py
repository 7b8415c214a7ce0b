"""Megatron-BERT (Shoeybi et al. 2019, section 3): BERT with its norms before each sublayer.

Pre-norm (Xiong et al. 2020) normalises before each sublayer and once at the end, so that even tiny models train
without warm-up: fastbert.baby_config is one.
"""

from fastbert.families.schema import (
    BERT_ARGUMENTS,
    Embeddings,
    Family,
    HfClass,
    MaskedLM,
    PreTraining,
    SentencePair,
    heads,
)
from fastbert.layer_spec import LayerNames

FAMILY = Family(
    model_type="megatron-bert",
    classes="MegatronBert",
    prefix="bert",
    hf_class=HfClass("megatron_bert", layer_arguments=(*BERT_ARGUMENTS, "output_attentions"), layer_returns="both"),
    heads=heads(MaskedLM(), PreTraining=PreTraining(MaskedLM()), NextSentencePrediction=SentencePair()),
    defaults={
        "vocab_size": 29056,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    embeddings=Embeddings(norm=None),
    layer=LayerNames(
        attention_norm="attention.ln",
        feed_forward_norm="ln",
        order=(
            "attention_norm",
            "query",
            "key",
            "value",
            "attention_output",
            "feed_forward_norm",
            "up",
            "down",
        ),
    ),
    final_norm="encoder.ln",
    norm_first=True,
)
