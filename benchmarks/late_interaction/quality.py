"""Late interaction beside one vector a text: two MiniLM twins trained here, and what int8 documents lose.

    python benchmarks/late_interaction/quality.py --data DATA --threads 1 --output benchmarks/results/<machine>

Task: the inverse cloze task (Lee et al. 2019, section 3) on nine novels. A passage has 40 to 120 words of a paragraph.
A query is one of its sentences, which is taken out. Seven books are for training. The passages of the two others are
searched.

Twins: all-MiniLM-L6-v2 with the same batches, steps and seeds. One has a vector of 96 numbers for each token, and
MaxSim (Khattab & Zaharia 2020, eq. 3). It has no marks and no added tokens. The other has the mean of the last hidden
states and the cosine. Both are trained with in-batch negatives, in float32.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

import fastbert
from fastbert import TokenVectors
from fastbert.bench.report import where, write_report
from fastbert.bench.timing import describe_machine
from fastbert.data.budget import batch_tokens_of, token_batches
from fastbert.hub import resolve
from fastbert.sentences.multi_vector.vectors import similarity

MODEL, WIDTH = "all-MiniLM-L6-v2", 96
TEST_BOOKS = (6, 7)  # counted from 0: Pride and Prejudice, and The Adventures of Sherlock Holmes
SHORTEST, LONGEST, OF_QUERY, REST = 40, 120, 6, 20  # words; REST is the least that a passage keeps
QUERY, DOCUMENT = 32, 160  # tokens
BATCH, RATE, RATE_OF_PROJECTION, WARM_UP = 32, 3e-5, 1e-3, 0.1
TEMPERATURES = {"multi": 1.0, "single": 0.05}  # of MaxSim, a sum over the query's tokens; of the cosine
DRAWS, SEED = 2000, 0
SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])[.!?][\"'”’)_]*\s+(?=[\"'“‘(_]*[A-Z])")

# --------------------------------------------------------------------------------------------------------------------
# Data


@dataclass(frozen=True)
class Cloze:
    """A passage without one of its sentences, the query; the query is empty where none fits."""

    query: str
    passage: str


def words(sentences: Sequence[str]) -> int:
    return sum(len(sentence.split()) for sentence in sentences)


def passages_of(paragraph: str) -> Iterator[list[str]]:
    """The sentences of each passage; what is too short or too long by itself is left out."""
    cuts = [0, *(match.end() for match in SENTENCE_END.finditer(paragraph)), len(paragraph)]
    passage: list[str] = []
    groups = [passage]
    for first, last in pairwise(cuts):
        sentence = paragraph[first:last].strip()
        if passage and words([*passage, sentence]) > LONGEST:
            passage = []
            groups.append(passage)
        passage.append(sentence)
    return (group for group in groups if SHORTEST <= words(group) <= LONGEST)


def cloze(passage: list[str], draw: random.Random) -> Cloze:
    total = words(passage)
    fit = [i for i, s in enumerate(passage) if OF_QUERY <= words([s]) <= total - REST]
    if not fit:
        return Cloze("", " ".join(passage))
    chosen = draw.choice(fit)
    return Cloze(passage[chosen], " ".join(s for i, s in enumerate(passage) if i != chosen))


def read(data: Path) -> tuple[list[Cloze], list[Cloze]]:
    """Those for training, in random order, all with a query; and all passages of the test books."""
    with gzip.open(data / "lm/gutenberg9.txt.gz", "rt", encoding="utf-8") as file:
        books = file.read().strip().split("\n\n")
    draw = random.Random(SEED)
    by_book = [[cloze(p, draw) for line in book.split("\n") for p in passages_of(line)] for book in books]
    train = [c for i, book in enumerate(by_book) if i not in TEST_BOOKS for c in book if c.query]
    draw.shuffle(train)
    return train, [c for i in TEST_BOOKS for c in by_book[i]]


# --------------------------------------------------------------------------------------------------------------------
# Models


class Twin(torch.nn.Module):
    """MiniLM, and the projection that only the one with many vectors uses."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.encoder = fastbert.accelerate(AutoModel.from_pretrained(folder, dtype=torch.float32))
        self.projection = torch.nn.Linear(self.encoder.config.hidden_size, WIDTH, bias=False)

    def ids(self, texts: Sequence[str], longest: int) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(list(texts), truncation=True, max_length=longest)["input_ids"]
        return ids

    def hidden(self, ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden states, padded, and the mask."""
        batch = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        mask = batch["attention_mask"]
        return self.encoder(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state, mask

    def of_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return normalize(self.projection(hidden), dim=-1)

    def of_texts(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return normalize((hidden * mask[..., None]).sum(1), dim=-1)  # the mean's direction

    def scores(self, kind: str, queries: list[list[int]], documents: list[list[int]]) -> torch.Tensor:
        """All with all, differentiable."""
        (q, of_q), (d, of_d) = self.hidden(queries), self.hidden(documents)
        if kind == "single":
            return self.of_texts(q, of_q) @ self.of_texts(d, of_d).T
        return fastbert.colbert_scores(self.of_tokens(q), self.of_tokens(d)[:, None], of_q, of_d[:, None])


def train(twin: Twin, kind: str, pairs: list[Cloze], steps: int) -> list[float]:
    """One pass over steps * BATCH pairs; the losses."""
    torch.manual_seed(SEED)
    twin.train()
    groups = [{"params": twin.encoder.parameters(), "lr": RATE}]
    if kind == "multi":
        groups.append({"params": twin.projection.parameters(), "lr": RATE_OF_PROJECTION})
    optimizer = torch.optim.AdamW(groups, fused=True)
    warm = max(1, round(WARM_UP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / warm if step < warm else (steps - step) / max(1, steps - warm)
    )
    losses = []
    for step in range(steps):
        batch = pairs[step * BATCH : (step + 1) * BATCH]
        queries = twin.ids([pair.query for pair in batch], QUERY)
        scores = twin.scores(kind, queries, twin.ids([pair.passage for pair in batch], DOCUMENT))
        loss = cross_entropy(scores / TEMPERATURES[kind], torch.arange(len(batch)))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 10 == 9:
            print(f"{kind}: step {step + 1} of {steps}, loss {losses[-1]:.3f}", flush=True)
    twin.eval()
    return losses


def encode(twin: Twin, texts: Sequence[str], longest: int) -> tuple[torch.Tensor, TokenVectors]:
    """One vector for each text, and those of its tokens."""
    ids = twin.ids(texts, longest)
    means, tokens = [torch.empty(0)] * len(ids), [torch.empty(0)] * len(ids)
    with torch.inference_mode():
        for chosen in token_batches([len(i) for i in ids], batch_tokens_of(torch.device("cpu"))):
            hidden, mask = twin.hidden([ids[i] for i in chosen])
            of_texts, of_tokens = twin.of_texts(hidden, mask), twin.of_tokens(hidden)
            for row, i in enumerate(chosen):
                means[i], tokens[i] = of_texts[row], of_tokens[row, : len(ids[i])].clone()
    return torch.stack(means), TokenVectors.of(tokens)


# --------------------------------------------------------------------------------------------------------------------
# Evaluation


def measures(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """(measures, queries): of the rank of the own passage, which comes behind others with its score."""
    rank = (scores >= scores.gather(1, wanted[:, None])).sum(1)
    return torch.stack([(rank <= 1).float(), (rank <= 10).float(), torch.where(rank <= 10, 1 / rank, 0.0)])


MEASURES = ("recall@1", "recall@10", "MRR@10")


def summary(values: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Means over the queries and their 95 % intervals, from the same draws each time."""
    queries = values.shape[1]
    draws = torch.randint(0, queries, (DRAWS, queries), generator=torch.Generator().manual_seed(SEED))
    bounds = torch.stack([row[draws].mean(1).quantile(torch.tensor([0.025, 0.975])) for row in values])
    means = values.mean(1).tolist()
    return {
        name: {"mean": mean, "interval": bound}
        for name, mean, bound in zip(MEASURES, means, bounds.tolist(), strict=True)
    }


def size(documents: torch.Tensor | TokenVectors) -> float:
    """Bytes for each passage: numbers and scales."""
    if isinstance(documents, torch.Tensor):
        return documents.nbytes / len(documents)
    scales = 0 if documents.scales is None else documents.scales.nbytes
    return (documents.vectors.nbytes + scales) / len(documents)


def forms(documents: TokenVectors) -> dict[str, TokenVectors]:
    return {
        "multi-vector, trained, float32": documents,
        "multi-vector, trained, bfloat16": TokenVectors(documents.vectors.bfloat16(), documents.cu_seqlens),
        "multi-vector, trained, int8": documents.in_int8(),
    }


def evaluate(twins: dict[str, Twin], test: list[Cloze], wanted: list[int]) -> dict[str, Any]:
    own, hits, sizes = torch.tensor(wanted), dict[str, torch.Tensor](), dict[str, float]()
    for kind, twin in twins.items():
        queries = encode(twin, [test[i].query for i in wanted], QUERY)
        documents = encode(twin, [c.passage for c in test], DOCUMENT)
        if kind != "multi":
            name = f"single vector, {'trained' if kind == 'single' else kind}"
            hits[name], sizes[name] = measures(queries[0] @ documents[0].T, own), size(documents[0])
        if kind == "untrained":
            name = "multi-vector, untrained"
            hits[name], sizes[name] = measures(similarity(queries[1], documents[1]), own), size(documents[1])
        for name, form in (forms(documents[1]) if kind == "multi" else {}).items():
            hits[name], sizes[name] = measures(similarity(queries[1], form), own), size(form)
        print(f"{kind}: evaluated", flush=True)
    changes = (
        ("bfloat16 less float32", "multi-vector, trained, bfloat16", "multi-vector, trained, float32"),
        ("int8 less float32", "multi-vector, trained, int8", "multi-vector, trained, float32"),
        ("multi-vector less single vector, trained", "multi-vector, trained, float32", "single vector, trained"),
    )
    return {
        "rows": {name: {**summary(values), "bytes": sizes[name]} for name, values in hits.items()},
        "changes": {name: summary(hits[a] - hits[b]) for name, a, b in changes},
    }


def measure(data: Path, steps: int, queries: int, passages: int | None) -> dict[str, Any]:
    pairs, test = read(data)
    if len(pairs) < steps * BATCH:
        raise SystemExit(f"there are {len(pairs)} pairs for training, enough for {len(pairs) // BATCH} steps")
    test = test[:passages]
    able = [i for i, c in enumerate(test) if c.query]
    wanted = sorted(random.Random(SEED).sample(able, min(queries, len(able))))
    folder, start, training = resolve(MODEL), time.perf_counter(), dict[str, Any]()
    twins = {kind: Twin(folder) for kind in ("untrained", "single", "multi")}
    for kind in TEMPERATURES:
        began = time.perf_counter()
        losses, tenth = train(twins[kind], kind, pairs, steps), max(1, steps // 10)
        ends = {"first": sum(losses[:tenth]) / tenth, "last": sum(losses[-tenth:]) / tenth}
        training[kind] = {"seconds": time.perf_counter() - began, "loss": ends}
    report = {
        "steps": steps,
        "pairs": steps * BATCH,
        "queries": len(wanted),
        "passages": len(test),
        "training": training,
        **evaluate(twins, test, wanted),
    }
    return report | {"seconds": time.perf_counter() - start}


def cells(row: dict[str, Any], sign: str) -> str:
    found = []
    for name in MEASURES:
        mean, low, high = (f"{100 * each:{sign}.1f}" for each in (row[name]["mean"], *row[name]["interval"]))
        found.append(f"{mean} ({low} to {high})")
    return " | ".join(found)


def to_markdown(report: dict[str, Any]) -> str:
    lines = [
        f"Late interaction beside one vector a text, both of {MODEL}. {where(report['machine'])}",
        "",
        "| | recall@1, % | recall@10, % | MRR@10, % | bytes a passage |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, row in report["rows"].items():
        lines.append(f"| {name} | {cells(row, '')} | {row['bytes']:,.0f} |")
    for name, row in report["changes"].items():
        lines.append(f"| *{name}* | {cells(row, '+')} | |")
    return "\n".join(
        [
            *lines,
            "",
            f"Each of {report['queries']:,} queries is a sentence that was taken out of one of {report['passages']:,}"
            " passages of two novels.",
            f"Both twins were trained on {report['pairs']:,} such pairs of seven other novels, {report['steps']} steps"
            f" of {BATCH}, one pass.",
            f"Tokens have {WIDTH} numbers behind a new projection, random in the untrained row; queries are rounded as"
            " documents are.",
            f"Temperatures are fixed: {TEMPERATURES['multi']:g} for MaxSim, {TEMPERATURES['single']:g} for the cosine.",
            f"In brackets: 95 % of {DRAWS:,} bootstraps over queries, in differences paired; one training seed.",
            "",
            "    nice -n 10 python benchmarks/late_interaction/quality.py --data ../shared/data --threads 1"
            f" --steps {report['steps']} --queries {report['queries']} --output benchmarks/results/<machine>",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with lm/gutenberg9.txt.gz")
    parser.add_argument("--steps", type=int, default=250, help="of training, for each twin")
    parser.add_argument("--queries", type=int, default=1500, help="of the test")
    parser.add_argument("--passages", type=int, help="only so many of the test, to try it")
    parser.add_argument("--threads", type=int, help="torch's own number otherwise")
    parser.add_argument("--output", type=Path, help="a folder for late-interaction-quality.json and .md")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    machine = describe_machine() | {"packages": {"transformers": version("transformers")}}
    report = {"machine": machine, **measure(options.data, options.steps, options.queries, options.passages)}
    print(to_markdown(report))
    if options.output is not None:
        write_report(options.output, "late-interaction-quality", report, to_markdown(report))


if __name__ == "__main__":
    main()
