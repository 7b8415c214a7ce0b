"""From which chapter of nine novels is a paragraph? The chapter is searched without it.

Two paragraphs are taken out of each chapter, and each is a query; what is left of the chapters are the documents.
"""

from __future__ import annotations

import gzip
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fastbert
from benchmarks.documents.bootstrap import compare, means, table
from benchmarks.documents.training import MODEL
from fastbert import Windows

NOVELS = "lm/gutenberg9.txt.gz"  # a paragraph a line, a blank line between books
# "CHAPTER XII", "Chapter 5", "CHAPTER 3. THE SPOUTER-INN", "ADVENTURE I. A SCANDAL IN BOHEMIA"; "V. The Wine-shop"
HEADING = re.compile(r"(?i:chapter|adventure) (?:\d+|[IVXLC]+)\b.{0,90}|[IVXLC]+\. [A-Z][^.;]{0,60}")
LEAST = 300  # words of a chapter: lists of contents have fewer between two headings
QUERIES, WORDS, SEED = 2, range(40, 201), 0  # of a chapter, of a query
PLACES = (1, 10)
TRUNCATION, SHORT = "truncation", "chunks of 128"
SHORT_CHUNKS = Windows(length=128, overlap=0, at="sentences")


class Queries(NamedTuple):
    chapters: list[str]
    queries: list[str]
    of: np.ndarray  # the chapter of each query


def chapters_of(book: str) -> list[list[str]]:
    """The paragraphs of each chapter, without headings, and without what stands before the first one."""
    chapters: list[list[str]] = []
    for paragraph in book.split("\n"):
        if HEADING.fullmatch(paragraph):
            chapters.append([])
        elif chapters:
            chapters[-1].append(paragraph)
    return [chapter for chapter in chapters if sum(len(paragraph.split()) for paragraph in chapter) >= LEAST]


def take_out(chapters: list[list[str]]) -> Queries:
    """The first paragraph of a chapter stays: truncation reads little else."""
    draw, left, queries, of = random.Random(SEED), [], [], []
    for i, chapter in enumerate(chapters):
        may = [at for at, paragraph in enumerate(chapter) if at and len(paragraph.split()) in WORDS]
        taken = draw.sample(may, min(QUERIES, len(may)))
        queries += [chapter[at] for at in taken]
        of += [i] * len(taken)
        left.append("\n".join(paragraph for at, paragraph in enumerate(chapter) if at not in taken))
    return Queries(left, queries, np.array(of))


def measure(data: Path, work: Path) -> dict[str, Any]:
    with gzip.open(data / NOVELS, "rt", encoding="utf-8") as file:
        books = [chapters_of(book) for book in file.read().split("\n\n")]
    asked = take_out([chapter for book in books for chapter in book])
    encoder = fastbert.SentenceEncoder(MODEL, dtype="bfloat16", device="cpu")
    vectors = encoder.encode(asked.queries)

    def of_texts(windows: Windows | None) -> np.ndarray:
        return vectors @ encoder.encode(asked.chapters, windows=windows).T

    def of_chunks(windows: Windows | None, late: bool = False) -> np.ndarray:
        """A chapter is as near as the nearest of its chunks."""
        chunks = encoder.encode_chunks(asked.chapters, windows, late=late)
        first = np.flatnonzero(np.diff(chunks.documents, prepend=-1))
        return np.maximum.reduceat(vectors @ chunks.vectors.T, first, axis=1)

    ways = {
        TRUNCATION: lambda: of_texts(None),
        "mean of windows": lambda: of_texts(Windows()),
        "maximum of windows": lambda: of_texts(Windows(pool="max")),
        "chunks": lambda: of_chunks(None),
        SHORT: lambda: of_chunks(SHORT_CHUNKS),
        "late chunks of 128": lambda: of_chunks(SHORT_CHUNKS, late=True),
    }
    ranks, seconds = {}, {}
    for name, way in ways.items():
        start = time.perf_counter()
        scores = way()
        seconds[name] = time.perf_counter() - start
        right = scores[np.arange(len(scores)), asked.of]
        ranks[name] = (scores > right[:, None]).sum(1) + 1
    hits = {
        f"recall at {k}": {name: means((rank <= k).astype(np.float64), asked.of) for name, rank in ranks.items()}
        for k in PLACES
    }
    return {
        "model": MODEL,
        "tokens": encoder.max_seq_length,
        "chapters": len(asked.chapters),
        "of books": [len(book) for book in books],
        "words": sum(len(chapter.split()) for chapter in asked.chapters),
        "queries": len(asked.queries),
        "seconds": seconds,
        "recall": {name: compare(ways, TRUNCATION) for name, ways in hits.items()},
        "recall beside short chunks": {name: compare(ways, SHORT) for name, ways in hits.items()},
        "median rank": {name: float(np.median(rank)) for name, rank in ranks.items()},
    }


def to_markdown(report: Mapping[str, Any]) -> list[str]:
    late = [name for name in report["seconds"] if name.startswith("late")]
    return [
        f"{report['model']}, {report['tokens']} tokens, bfloat16. {report['chapters']} chapters of"
        f" {len(report['of books'])} novels, {report['words']:,} words; the queries are {report['queries']:,}"
        f" paragraphs of {WORDS[0]} to {WORDS[-1]} words that were taken out of them. A chapter is drawn with its"
        " queries.",
        "",
        *table(report["recall"], TRUNCATION),
        "",
        "Late chunks beside plain ones of the same length:",
        "",
        *table(report["recall beside short chunks"], SHORT, late),
    ]
