"""A process of `fastbert bench --latency` or `--corpus`: one task as JSON, and answers in lines of JSON on stdout.

As in `fastbert.bench.worker` a contestant answers once when it is loaded and its vectors have been checked, and then
each line on stdin with the times of that turn: "strings 16" and "ids 16" are calls with one text of 16 tokens.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastbert.bench import ceiling
from fastbert.bench.jobs import BenchJob, load_peer
from fastbert.bench.texts import bound, folder
from fastbert.bench.texts.contestants import CONTESTANTS
from fastbert.bench.texts.run import TEXTS_FILE
from fastbert.bench.timing import peak_memory
from fastbert.bench.worker import CHECKED_SEQUENCES, TURN_SECONDS, Answer, judge, serve

TEXTS = 16  # of each length, in turn: a tokenizer keeps words, and no real text comes twice
WARM_SECONDS, WARM_CALLS = 0.02, 2  # before a turn's first timed call: other contestants had the cores and their caches
LEAST_CALLS = 5  # timed in a turn, however long one takes
CALIBRATION_TEXTS, CALIBRATION_CORPUS = 4, 64  # that static scales are made from: of each length, of a corpus
REFERENCE_FILE, CALIBRATION_FILE = "reference.pt", "calibration.json"


def make_texts(task: dict[str, Any], answer: Answer) -> None:
    """texts.json: of each length the texts and their tokens."""
    tokenizer = folder.cutting_tokenizer(_checkpoint(task))
    words = folder.one_token_words(tokenizer)
    by_length: dict[str, dict[str, list[Any]]] = {}
    calibration = []
    for length in task["lengths"]:
        texts = folder.make_texts(tokenizer, length, TEXTS + CALIBRATION_TEXTS, words)
        ids = [tokenizer.encode(text).ids for text in texts]
        by_length[str(length)] = {"texts": texts[:TEXTS], "ids": ids[:TEXTS]}
        calibration += ids[TEXTS:]
    Path(task["folder"], TEXTS_FILE).write_text(json.dumps(by_length), encoding="utf-8")
    _write_ids(task, calibration)
    _write_reference(task, [ids for of in by_length.values() for ids in of["ids"][:CHECKED_SEQUENCES]])
    answer({})


def read_texts(task: dict[str, Any], answer: Answer) -> None:
    """Count the tokens of a corpus."""
    texts = _corpus(task)
    tokenizer = folder.cutting_tokenizer(_checkpoint(task))
    lengths = [len(tokenizer.encode(text).ids) for text in texts]
    _write_ids(task, [tokenizer.encode(texts[i]).ids for i in spread_places(texts, CALIBRATION_CORPUS)])
    _write_reference(task, [tokenizer.encode(texts[i]).ids for i in spread_places(texts)])
    answer({"tokens": sum(lengths), "longest": max(lengths)})


def spread_places(texts: Sequence[str], count: int = CHECKED_SEQUENCES) -> list[int]:
    """Of the shortest text, the longest one and what lies between: batches of all lengths are looked into."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    return [order[round(i)] for i in np.linspace(0, len(texts) - 1, min(count, len(texts)))]


def _write_ids(task: dict[str, Any], texts: list[list[int]]) -> None:
    """For contestants that calibrate."""
    Path(task["folder"], CALIBRATION_FILE).write_text(json.dumps(texts), encoding="utf-8")


def _checkpoint(task: dict[str, Any]) -> Path:
    return Path(task["folder"], "checkpoint")


def _corpus(task: dict[str, Any]) -> list[str]:
    texts: list[str] = json.loads(Path(task["folder"], TEXTS_FILE).read_text(encoding="utf-8"))
    return texts


def _write_reference(task: dict[str, Any], texts: Iterable[list[int]]) -> None:
    """The vectors of texts by transformers' literal formulas, in float64 and in the dtypes, one text at a time."""
    ids, expected = list(texts), {}
    with torch.inference_mode():
        for name in ("float64", "float32", "bfloat16"):
            dtype = getattr(torch, name)
            model = load_peer(_checkpoint(task), dtype, "eager")
            hidden = [model(input_ids=torch.tensor([of_text])).last_hidden_state[0] for of_text in ids]
            wide = torch.float64 if name == "float64" else torch.float32  # in which tokens are added up
            means = torch.stack([of_text.to(wide).mean(0) for of_text in hidden])
            expected[name] = F.normalize(means, dim=-1).to(dtype)
    torch.save(expected, Path(task["folder"], REFERENCE_FILE))


def check(name: str, precision: str, vectors: Sequence[Any], expected: dict[str, torch.Tensor]) -> float:
    """The lowest cosine of a vector to the oracle's. Raises AssertionError when they may not be timed."""
    actual, oracle = torch.stack([torch.as_tensor(vector) for vector in vectors]), expected["float64"]
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, oracle {tuple(oracle.shape)}"
    quality = float(torch.cosine_similarity(actual.double(), oracle, dim=-1).min())
    judge(name, precision, actual, expected, quality)
    return quality


def timed(call: Callable[[Any], Any], inputs: Sequence[Any], min_seconds: float) -> list[float]:
    """Seconds of each call, with one of the inputs after the other, until all together fill `min_seconds`."""
    taken: list[float] = []
    feed, begin = itertools.cycle(inputs), time.perf_counter()
    for done in itertools.count():
        if done >= WARM_CALLS and time.perf_counter() - begin >= WARM_SECONDS:
            break
        call(next(feed))
    total = 0.0
    while total < min_seconds or len(taken) < LEAST_CALLS:
        one = next(feed)
        start = time.perf_counter()
        call(one)
        taken.append(time.perf_counter() - start)
        total += taken[-1]
    return taken


def contest_one(task: dict[str, Any], answer: Answer) -> None:
    """Calls with one text; what fails its check answers with no times."""
    name, lengths, job = task["contestant"], task["lengths"], job_of(task)
    one = CONTESTANTS[name].one
    assert one is not None
    calls = one(job, lengths)
    by_length = json.loads(Path(task["folder"], TEXTS_FILE).read_text(encoding="utf-8"))
    reference = torch.load(Path(task["folder"], REFERENCE_FILE), weights_only=True)
    turns: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {}
    cosines, failed = {}, {}
    with torch.inference_mode():
        for i, length in enumerate(lengths):
            rows = slice(i * CHECKED_SEQUENCES, (i + 1) * CHECKED_SEQUENCES)
            expected = {dtype: vectors[rows] for dtype, vectors in reference.items()}
            ids = [np.array([of_text], dtype=np.int64) for of_text in by_length[str(length)]["ids"]]
            sources: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {}
            sources["strings"] = calls.from_string, by_length[str(length)]["texts"]
            if calls.from_ids is not None:
                sources["ids"] = calls.from_ids, ids
            for source, (call, inputs) in sources.items():
                turn = f"{source} {length}"
                try:
                    vectors = [np.array(call(sample)) for sample in inputs[:CHECKED_SEQUENCES]]
                    cosines[turn] = check(name, job.precision, vectors, expected)
                    turns[turn] = call, inputs
                except AssertionError as error:
                    failed[turn] = " ".join(str(error).split())[:300]
        answer({"cosines": cosines, "failed": failed})
        for line in sys.stdin:
            turn = line.strip()
            answer({"turn": turn, "seconds": timed(*turns[turn], TURN_SECONDS) if turn in turns else []})


def contest_many(task: dict[str, Any], answer: Answer) -> None:
    """Calls with the whole corpus, the first of which is checked and warms everything up."""
    name, job, texts = task["contestant"], job_of(task), _corpus(task)
    many = CONTESTANTS[name].many
    assert many is not None
    start = time.perf_counter()
    rows = many(job)
    with torch.inference_mode():
        vectors = np.asarray(rows(texts))
        start_seconds = time.perf_counter() - start
        expected = torch.load(Path(task["folder"], REFERENCE_FILE), weights_only=True)
        quality = check(name, job.precision, [vectors[i] for i in spread_places(texts)], expected)
        answer({"cosine": quality, "start_seconds": start_seconds})
        for _ in sys.stdin:
            start = time.perf_counter()
            rows(texts)
            answer({"seconds": time.perf_counter() - start, "peak_memory": peak_memory()})


def measure_bound(task: dict[str, Any], answer: Answer) -> None:
    """ "bytes": seconds to read the layers' weights; "products": GFLOP/s of matrix products."""
    precision = task["precision"]
    ways = bound.readers(task["weights"] * bound.WEIGHT_BYTES[precision])
    with torch.inference_mode():
        products = ceiling.gemms(precision)
        ceiling.rates(products, 0.0)
        answer({})
        for line in sys.stdin:
            if line.strip() == "bytes":
                answer({"read_seconds": bound.read_seconds(ways, TURN_SECONDS / len(ways))})
            else:
                answer({"gflops": ceiling.rates(products, TURN_SECONDS / len(products))})


def job_of(task: dict[str, Any]) -> BenchJob:
    root = Path(task["folder"])
    return BenchJob(
        _checkpoint(task),
        root / "prepared",
        task["precision"],
        task["masked"],
        task["threads"],
        calibration=root / CALIBRATION_FILE,
        alone=task["processes"] == 1,
    )


def work(task: dict[str, Any], answer: Answer) -> None:
    action = task["action"]
    if action == "folder":
        folder.write(task["shape"], Path(task["source"]), task["longest"], _checkpoint(task))
        Path(task["folder"], "prepared").mkdir()
        (make_texts if task["lengths"] else read_texts)(task, answer)
    elif action == "prepare":
        prepare = CONTESTANTS[task["contestant"]].prepare
        assert prepare is not None
        prepare(job_of(task))
        answer({})
    else:
        {"bound": measure_bound, "latency": contest_one, "corpus": contest_many}[action](task, answer)


if __name__ == "__main__":
    serve(work)
