"""Questions on whole articles: covidQA, whose articles have thousands of words.

The model learns from SQuAD's questions (XQuAD's English part) and from passages of seven tenths of covidQA's articles:
one around the answer to each question, and one of the same article without it, which has no answer. It then reads the
other articles whole, in windows, or as far as one window goes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fastbert
from benchmarks.documents.bootstrap import compare, means, table
from benchmarks.documents.training import described, trained
from fastbert import Windows
from fastbert.data.chunks.job import ChunkJob
from fastbert.training.finetuning.inputs.squad import exact_match, f1

SQUAD, COVID = "qa/xquad.en.json", "qa/200421_covidQA.json"
SHARE, SEED = 0.7, 0  # of articles that are learnt from
WORDS = 200  # of a passage: with a question they fit into a window of 384 tokens
TRAINING = {"epochs": 3.0, "batch_size": 16, "max_length": 384, "doc_stride": 128, "learning_rate": 1e-4, "seed": 0}
FIRST, WINDOWS, ALWAYS = "first window", "windows, by logits", ", always an answer"


def articles(path: Path) -> list[dict[str, Any]]:
    """Articles whose questions have their answer where `answer_start` says; others are left out."""
    found = []
    for article in json.loads(path.read_bytes())["data"]:
        for paragraph in article["paragraphs"]:
            context, asked = paragraph["context"], []
            for one in paragraph["qas"]:
                (answer,) = one["answers"]
                text, at = answer["text"], answer["answer_start"]
                if text.strip() and context[at : at + len(text)] == text:
                    at += len(text) - len(text.lstrip())
                    asked.append({"question": one["question"], "text": text.strip(), "start": at})
            if asked:
                found.append({"context": context, "asked": asked})
    return found


def passages(article: Mapping[str, Any], draw: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """(passage, SQuAD's entry of a question) of each question: with its answer at any place, and without it."""
    context = article["context"]
    words = [found.span() for found in re.finditer(r"\S+", context)]

    def passage(first: int) -> tuple[str, int]:
        begin, end = words[first][0], words[min(first + WORDS, len(words)) - 1][1]
        return context[begin:end], begin

    for one in article["asked"]:
        first = next(i for i, (_, end) in enumerate(words) if end > one["start"])
        last = next(i for i, (_, end) in enumerate(words) if end >= one["start"] + len(one["text"]))
        lowest, highest = max(0, last + 1 - WORDS), max(0, min(first, len(words) - WORDS))
        if lowest > highest:  # an answer that is longer than a passage
            continue
        text, begin = passage(draw.randint(lowest, highest))
        yield text, _entry(one["question"], [{"text": one["text"], "answer_start": one["start"] - begin}])
        elsewhere = [i for i in range(len(words) - WORDS) if i + WORDS <= first or i > last]
        draw.shuffle(elsewhere)
        without = (text for i in elsewhere if one["text"] not in (text := passage(i)[0]))
        if (silent := next(without, None)) is not None:
            yield silent, _entry(one["question"], [])


def _entry(question: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"question": question, "answers": answers, "is_impossible": not answers}


def write_passages(learnt: list[dict[str, Any]], path: Path) -> dict[str, int]:
    draw, paragraphs = random.Random(SEED), list[dict[str, Any]]()
    for article in learnt:
        for i, (context, entry) in enumerate(passages(article, draw)):
            paragraphs.append({"context": context, "qas": [{"id": f"{len(paragraphs)}-{i}", **entry}]})
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    silent = sum(paragraph["qas"][0]["is_impossible"] for paragraph in paragraphs)
    return {"passages with the answer": len(paragraphs) - silent, "passages without": silent}


def measure(data: Path, work: Path) -> dict[str, Any]:
    known = articles(data / COVID)
    random.Random(SEED).shuffle(known)
    learnt, read = known[: round(SHARE * len(known))], known[round(SHARE * len(known)) :]
    work.mkdir(parents=True, exist_ok=True)
    made = write_passages(learnt, work / "passages.json")
    run = trained(work / "answers", [data / SQUAD, work / "passages.json"], task="qa", **TRAINING)
    pairs = [(one["question"], article["context"]) for article in read for one in article["asked"]]
    asked = [one for article in read for one in article["asked"]]
    wanted = [one["text"] for one in asked]
    of = np.repeat(np.arange(len(read)), [len(article["asked"]) for article in read])
    reader = fastbert.QuestionAnswerer(str(work / "answers"), dtype="bfloat16", device="cpu")
    found = said(reader, pairs)
    seen = reader.cut(pairs, Windows(pool="first"))
    reach = np.maximum.reduceat(seen.spans[:, 1], seen.offsets[:-1])  # characters that the first window has
    metrics = {
        name: {
            way: means(np.array([score(a, b) for a, b in zip(texts, wanted, strict=True)]), of)
            for way, texts in found.items()
        }
        for name, score in (("F1", f1), ("exact match", exact_match))
    }
    words = [len(article["context"].split()) for article in read]
    return {
        "run": run,
        **made,
        "articles": len(read),
        "questions": len(pairs),
        "words": words,
        "answers in the first window": sum(
            one["start"] + len(one["text"]) <= end for one, end in zip(asked, reach.tolist(), strict=True)
        ),
        "without an answer": {way: texts.count("") for way, texts in found.items()},
        "scores": {name: compare(ways, FIRST) for name, ways in metrics.items()},
        "beside logits": {name: compare(ways, WINDOWS) for name, ways in metrics.items()},
    }


def said(reader: fastbert.QuestionAnswerer, pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    """What the model answers, by the way of reading. ALWAYS: that it says "no answer" is not heard."""
    found: dict[str, list[str]] = {}
    for also, may in (("", True), (ALWAYS, False)):
        answers: Any = reader.predict(pairs, windows=Windows(pool="first"), no_answer=may)
        found[FIRST + also] = [one["answer"] for one in answers]
    aggregates: tuple[Literal["logits", "probabilities"], ...] = ("logits", "probabilities")
    jobs = {
        f"windows, by {aggregate}{also}": reader.answers_job(pairs, None, aggregate, may)
        for also, may in (("", True), (ALWAYS, False))
        for aggregate in aggregates
    }
    # What is computed of a window is the same for all of them, and takes minutes: once is enough.
    one = jobs[WINDOWS]
    rows = ChunkJob(one.chunks, one.forward, one.reduce, lambda rows: rows).run(reader.device)
    return found | {name: job.finish(rows)["answer"] for name, job in jobs.items()}


def to_markdown(report: Mapping[str, Any]) -> list[str]:
    words, silent = sorted(report["words"]), report["without an answer"]
    return [
        f"{described(report['run'])} on XQuAD and on {report['passages with the answer']} passages of covidQA with an"
        f" answer and {report['passages without']} without. {report['questions']} questions on {report['articles']}"
        f" other articles of {words[0]:,} to {words[-1]:,} words (median {words[len(words) // 2]:,}), read in bfloat16."
        f" The first window has the place of {report['answers in the first window']} answers. An article is drawn with"
        " its questions.",
        "",
        *table(report["scores"], FIRST),
        "",
        "The ways of comparing windows:",
        "",
        *table(report["beside logits"], WINDOWS, [name for name in silent if name.startswith("windows")]),
        "",
        "Questions that get no answer: " + "; ".join(f"{way} {count}" for way, count in silent.items()) + ".",
    ]
