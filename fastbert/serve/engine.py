"""What a served model does: texts to sequences of tokens, batches of sequences to rows of numbers, rows to answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from fastbert.checkpoint.pretrained import is_classifier, read_config
from fastbert.data.chunks.job import ChunkJob
from fastbert.data.long_texts.pieces import groups
from fastbert.data.sentence_folder import is_multi_vector, is_splade, transformer_folder
from fastbert.data.tokenized import CHUNK_TEXTS, pack
from fastbert.hub import resolve
from fastbert.sentences import MultiVectorEncoder, Reranker, SentenceEncoder, SparseEncoder, TextClassifier
from fastbert.sentences.scorer import label_names
from fastbert.sentences.spans.question_answerer import QuestionAnswerer
from fastbert.sentences.spans.token_classifier import TokenClassifier
from fastbert.sentences.text_model import InferenceOptions, TextModel


class TaskSequence(NamedTuple):
    """The tokens of a query, or of a document, each of which has a vector."""

    fields: dict[str, Any]
    task: str


class ChunkSequence(NamedTuple):
    """A chunk of a request, which knows what is computed of it."""

    job: ChunkJob[Any]
    position: int


@dataclass
class Engine:
    """A model by its kind: "embedding", "multi-vector" (ColBERT), "sparse" (SPLADE), "reranker" (one label),
    "classifier", "token-classifier" (of words) or "question-answerer".
    """

    name: str
    model_type: str
    model: TextModel
    labels: list[str]
    options = InferenceOptions(normalize=False)

    @property
    def width(self) -> int:
        if isinstance(self.model, SentenceEncoder | SparseEncoder | MultiVectorEncoder):
            return self.model.dim
        return len(self.labels)

    def tokenize(
        self, inputs: list[Any], prompt: str = "", cuts: bool = True
    ) -> tuple[list[Any], list[int], int | None]:
        """(sequences, their lengths, the first that was cut or None) of texts or pairs; unless it `cuts` them, of those
        up to the first that is too long, or of some behind it.
        """
        sequences, lengths, cut = list[Any](), list[int](), list[int]()
        for group in groups(inputs, CHUNK_TEXTS):
            tokenized = self.model.tokenize(inputs[group], prompt)
            sequences += tokenized
            lengths += tokenized.lengths.tolist()
            cut += [group.start + i for i in tokenized.cut[:1]]
            if cut and not cuts:
                break
        return sequences, lengths, cut[0] if cut else None

    def limit_of(self, task: str) -> int:
        """To how many tokens a multi-vector model cuts its queries, or its documents."""
        return int((self.model.tokenizer_of(task).truncation or {})["max_length"])

    def tokenize_ranked(self, inputs: list[str], cuts: bool = True) -> tuple[list[Any], list[int], int | None]:
        """As `tokenize`, of a multi-vector model: a query, and the documents that are ranked for it."""
        sequences, lengths, first_cut, model = list[Any](), list[int](), None, self.model
        for task, first, given in (("query", 0, inputs[:1]), ("document", 1, inputs[1:])):
            prompt = model.prompt(model._of_task(task, {})["prompt_name"])
            for group in groups(given, CHUNK_TEXTS):
                tokenized = model.tokenize(given[group], prompt, task)
                sequences += [TaskSequence(fields, task) for fields in tokenized]
                lengths += tokenized.lengths.tolist()
                if first_cut is None and tokenized.cut:
                    first_cut = first + group.start + tokenized.cut[0]
                if first_cut is not None and not cuts:
                    return sequences, lengths, first_cut
        return sequences, lengths, first_cut

    def compute(self, sequences: list[Any]) -> list[np.ndarray]:
        """Of each sequence its vector, its tokens' vectors, or its logits; or what its job makes of a chunk.

        Sequences of all requests are one batch, and so are the chunks of one.
        """
        rows: list[Any] = [None] * len(sequences)
        whole = [i for i, one in enumerate(sequences) if not isinstance(one, ChunkSequence | TaskSequence)]
        for task in ("query", "document"):
            of_task = [i for i, one in enumerate(sequences) if isinstance(one, TaskSequence) and one.task == task]
            if of_task:
                batch, options = pack(_alike([sequences[i].fields for i in of_task])), replace(self.options, task=task)
                found = self.model.compute(batch.to(self.model.device), options).to("cpu")
                for i, row in zip(of_task, found, strict=True):
                    rows[i] = row.numpy()
        if whole:
            with torch.inference_mode():
                batch = pack([sequences[i] for i in whole]).to(self.model.device)
                for i, row in zip(whole, self.model.compute(batch, self.options).cpu().numpy(), strict=True):
                    rows[i] = row
        chunks = [(i, one) for i, one in enumerate(sequences) if isinstance(one, ChunkSequence)]
        for _, group in groupby(chunks, key=lambda entry: id(entry[1].job)):
            members = list(group)
            job, places = members[0][1].job, np.array([one.position for _, one in members])
            batch = job.chunks.pack(places).to(self.model.device)
            for (i, _), row in zip(members, job.compute(batch, places), strict=True):
                rows[i] = row
        return rows


def _alike(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the same fields: which tokens attend alone is said where a query was expanded."""
    if not any("query_only_mask" in one for one in fields):
        return fields
    return [{"query_only_mask": np.zeros(len(one["input_ids"]), np.uint8), **one} for one in fields]


def load_engine(name: str, dtype: str, device: str | None) -> Engine:
    """The model of a folder or a name: by its config.json one with a head, or else an encoder.

    Raises what `from_pretrained` of these raises.
    """
    root = resolve(name)
    config = read_config(transformer_folder(root, ("Transformer", "MLMTransformer")))
    heads = config.extra.get("architectures") or ()
    if is_classifier(config):
        if config.num_labels == 1:
            scorer = Reranker.from_pretrained(name, dtype=dtype, device=device)
            return Engine(name, "reranker", scorer, list(label_names(scorer.model)))
        classifier = TextClassifier.from_pretrained(name, dtype=dtype, device=device)
        return Engine(name, "classifier", classifier, list(classifier.labels))
    if any(head.endswith("ForTokenClassification") for head in heads):
        tagger = TokenClassifier.from_pretrained(name, dtype=dtype, device=device)
        return Engine(name, "token-classifier", tagger, list(tagger.labels))
    if any(head.endswith("ForQuestionAnswering") for head in heads):
        return Engine(name, "question-answerer", QuestionAnswerer.from_pretrained(name, dtype=dtype, device=device), [])
    if is_multi_vector(root):
        return Engine(name, "multi-vector", MultiVectorEncoder.from_pretrained(name, dtype=dtype, device=device), [])
    if is_splade(root):
        return Engine(name, "sparse", SparseEncoder.from_pretrained(name, dtype=dtype, device=device), [])
    return Engine(name, "embedding", SentenceEncoder.from_pretrained(name, dtype=dtype, device=device), [])
