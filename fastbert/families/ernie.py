"""ERNIE (Sun et al. 2019; 2.0 and 3.0 with task types, Sun et al. 2020): BERT with other pre-training tasks."""

from dataclasses import replace
from typing import Any

from fastbert.families.schema import (
    Count,
    Embeddings,
    Family,
    Flag,
    HfClass,
    MaskedLM,
    PreTraining,
    SentencePair,
    heads,
)

_EMBEDDINGS = Embeddings(task_type="embeddings.task_type_embeddings", order=("word", "position", "token_type", "norm"))


def _embeddings(config: Any) -> Embeddings:
    if not config.use_task_id:
        return replace(_EMBEDDINGS, task_type=None)
    return replace(_EMBEDDINGS, order=(*_EMBEDDINGS.order, "task_type"))


FAMILY = Family(
    model_type="ernie",
    classes="Ernie",
    prefix="ernie",
    hf_class=HfClass(
        "ernie",
        embedding_arguments=("input_ids", "token_type_ids", "task_type_ids", "position_ids", "inputs_embeds"),
    ),
    heads=heads(MaskedLM(), PreTraining=PreTraining(MaskedLM()), NextSentencePrediction=SentencePair()),
    fields={"task_type_vocab_size": Count(3), "use_task_id": Flag(False)},
    embeddings=_embeddings,
)
