"""The families, by the model_type of their config.json. A family is one file here and its line in the list below."""

from __future__ import annotations

from importlib import import_module

from fastbert.families.schema import Family

_FILES = (
    "albert",
    "bert",
    "camembert",
    "deberta",
    "deberta_v2",
    "distilbert",
    "electra",
    "ernie",
    "esm",
    "eurobert",
    "gemma3_text",
    "gte",
    "jina_embeddings_v3",
    "megatron_bert",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "qwen3",
    "rembert",
    "roberta",
    "roberta_prelayernorm",
    "roformer",
    "ultrabert",
    "xlm_roberta",
    "xlm_roberta_xl",
)

_LIST: tuple[Family, ...] = tuple(import_module(f"{__name__}.{file}").FAMILY for file in _FILES)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _LIST}
