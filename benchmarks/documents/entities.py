"""Entities of documents: WNUT-17's sentences, by themselves and joined to texts of a thousand words.

The model learns from the training sentences. Those of the development part are then read one by one, as documents in
windows, and as documents that are cut off where the model ends. An entity is right if its words and its type are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fastbert
from benchmarks.documents.bootstrap import Sums, compare, table
from benchmarks.documents.training import described, trained
from fastbert import Windows
from fastbert.data.chunks.words import entities_of
from fastbert.training.finetuning.inputs.tagged import read_conll

TRAIN, TEST = "wnut17/wnut17train.conll", "wnut17/emerging.dev.conll"
WORDS = 1000  # of a document, at least
TRAINING = {"epochs": 4.0, "batch_size": 16, "max_length": 128, "learning_rate": 2e-4, "seed": 0}
LENGTHS = (128, 512)  # tokens of a window: as it was trained, and the most that it takes
AGGREGATES = ("core", "logits", "probabilities", "vectors")
ALONE, CUT, WINDOWS = "sentences one by one", "cut off at 512", "windows of 128, core"
PIPELINE = "windows of 128, transformers' pipeline"
Entity = tuple[str, int, int]  # its type, and its characters in the document


class Document(NamedTuple):
    words: list[str]
    starts: list[int]  # words before each sentence, and all of them
    entities: set[Entity]


def documents_of(sentences: Sequence[Sequence[tuple[str, str]]]) -> list[Document]:
    """Sentences in order, until there are enough words; the rest goes to the last one."""
    groups: list[list[Sequence[tuple[str, str]]]] = [[]]
    left = sum(map(len, sentences))
    for sentence in sentences:
        if sum(map(len, groups[-1])) >= WORDS and left >= WORDS:
            groups.append([])
        groups[-1].append(sentence)
        left -= len(sentence)
    found = []
    for group in groups:
        words = [word for sentence in group for word, _ in sentence]
        starts = list(accumulate(map(len, group), initial=0))
        at = places(words)
        entities = {
            (kind, at[start + a], at[start + b] + len(words[start + b]))
            for start, sentence in zip(starts, group, strict=False)
            for kind, a, b in entities_of([tag for _, tag in sentence], is_entities=True)
        }
        found.append(Document(words, starts, entities))
    return found


def places(words: Sequence[str]) -> list[int]:
    """Where each word begins in the text of all, and behind the last one where another one would."""
    return list(accumulate((len(word) + 1 for word in words), initial=0))


def measure(data: Path, work: Path) -> dict[str, Any]:
    run = trained(work / "entities", [data / TRAIN], task="tokens", **TRAINING)
    documents = documents_of(read_conll(data / TEST))
    found = said(work / "entities", documents)
    sums = {way: f1_sums(sets, documents) for way, sets in found.items()}
    return {
        "run": run,
        "documents": len(documents),
        "sentences": sum(len(document.starts) - 1 for document in documents),
        "words": [len(document.words) for document in documents],
        "entities": sum(len(document.entities) for document in documents),
        "said": {way: sum(map(len, sets)) for way, sets in found.items()},
        "beside the cut": {"F1": compare(sums, CUT)},
        "beside sentences": {"F1": compare(sums, ALONE)},
        "beside the core": {"F1": compare(sums, WINDOWS)},
        "in both": sum(len(a & b) for a, b in zip(found[WINDOWS], found[PIPELINE], strict=True)),
    }


def said(folder: Path, documents: Sequence[Document]) -> dict[str, list[set[Entity]]]:
    """The entities that the model finds in each document, by the way of reading."""
    found = {ALONE: of_sentences(fastbert.TokenClassifier(str(folder), device="cpu"), documents)}
    texts = [document.words for document in documents]
    for length in LENGTHS:
        reader = fastbert.TokenClassifier(str(folder), device="cpu", max_seq_length=length)
        ways: dict[str, dict[str, Any]] = {f"cut off at {length}": {"windows": Windows(pool="first")}}
        ways |= {f"windows of {length}, {aggregate}": {"aggregate": aggregate} for aggregate in AGGREGATES}
        for name, options in ways.items():
            said: Any = reader.predict(texts, **options)
            found[name] = [{(one["label"], one["start"], one["end"]) for one in entities} for entities in said]
    return found | {PIPELINE: of_pipeline(folder, texts, LENGTHS[0])}


def of_pipeline(folder: Path, texts: Sequence[Sequence[str]], length: int) -> list[set[Entity]]:
    """What transformers' pipeline says with `stride`, which is the overlap: where windows find other entities that
    overlap, it keeps the longest, and of these the likeliest.
    """
    from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

    tagger = pipeline(
        "token-classification",
        model=AutoModelForTokenClassification.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder, model_max_length=length),
        aggregation_strategy="first",
        stride=length // 4,
        device="cpu",
    )
    found = []
    for words in texts:
        (said,) = tagger(list(words), is_split_into_words=True)
        found.append({(one["entity_group"], one["start"], one["end"]) for one in said})
    return found


def of_sentences(reader: fastbert.TokenClassifier, documents: Sequence[Document]) -> list[set[Entity]]:
    """Sentences read one by one, with the places of their entities in the document."""
    found = []
    for words, starts, _ in documents:
        at = places(words)
        said: Any = reader.predict([words[a:b] for a, b in pairwise(starts)])
        found.append(
            {
                (one["label"], at[start] + one["start"], at[start] + one["end"])
                for start, entities in zip(starts, said, strict=False)
                for one in entities
            }
        )
    return found


def f1_sums(found: Sequence[set[Entity]], documents: Sequence[Document]) -> Sums:
    pairs = [(said, document.entities) for said, document in zip(found, documents, strict=True)]
    right = [2.0 * len(said & there) for said, there in pairs]
    return np.array(right), np.array([float(len(said) + len(there)) for said, there in pairs])


def to_markdown(report: Mapping[str, Any]) -> list[str]:
    return [
        f"{described(report['run'])} on WNUT-17's training sentences. {report['sentences']:,} sentences of the"
        f" development part, {report['documents']} documents of {min(report['words']):,} to {max(report['words']):,}"
        f" words, {report['entities']} entities. A document is drawn with its entities.",
        "",
        *table(report["beside the cut"], CUT),
        "",
        "Beside the sentences read one by one, and beside the default of windows:",
        "",
        *table(report["beside sentences"], ALONE, [name for name in report["said"] if name.endswith("core")]),
        "",
        *table(report["beside the core"], WINDOWS, [name for name in report["said"] if name.startswith("windows")]),
        "",
        f"Of the same windows our default names {report['said'][WINDOWS]:,} entities and transformers' pipeline"
        f" {report['said'][PIPELINE]:,}; {report['in both']:,} of them are the same.",
    ]
