"""RemBERT (Chung et al. 2021): BERT whose input and output embeddings are decoupled, and have widths of their own."""

from fastbert.families.schema import (
    ALBERT_TOKENS,
    BERT_ARGUMENTS,
    Count,
    Embeddings,
    Family,
    FromConfig,
    HfClass,
    MaskedLM,
    NewVocabulary,
    heads,
)

FAMILY = Family(
    model_type="rembert",
    classes="RemBert",
    prefix="rembert",
    hf_class=HfClass("rembert", layer_arguments=(*BERT_ARGUMENTS, "output_attentions"), layer_returns="both"),
    heads=heads(
        MaskedLM(
            "cls.predictions.dense",
            "cls.predictions.LayerNorm",
            "cls.predictions.decoder",
            None,
            width=FromConfig("output_embedding_size"),
            may_tie=False,
            order=("dense", "decoder", "norm"),
        )
    ),
    defaults={
        "vocab_size": 250300,
        "hidden_size": 1152,
        "num_hidden_layers": 32,
        "num_attention_heads": 18,
        "embedding_size": 256,
        "intermediate_size": 4608,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": 0.1,
        "bos_token_id": 312,
        "eos_token_id": 313,
        "tie_word_embeddings": False,
    },
    hf_names={"embedding_size": "input_embedding_size", "classifier_dropout": "classifier_dropout_prob"},
    fields={"output_embedding_size": Count(1664)},
    embeddings=Embeddings(project="encoder.embedding_hidden_mapping_in", always_projects=True),
    vocabulary=NewVocabulary("unigram", ALBERT_TOKENS, gives_types=False),
)
