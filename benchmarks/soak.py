"""Everything at once for an hour, and what it costs in memory: `fastbert serve` and a process that encodes.

    pip install sentence-transformers==6.2.0 matplotlib
    python benchmarks/soak.py --output benchmarks/results/<machine> \\
        --python onnx=ONNX/bin/python --python openvino=OPENVINO/bin/python

Beside them, on the same draws: sentence-transformers with each of its backends, a process each. They take turns. A turn
is a few dozen requests. A request is 1 to 8 texts whose lengths are a heavy-tailed draw, from one word to 8,192 tokens;
padded it has 8,192 tokens at most. Every contestant loads its model again now and then. The server gets the
requests by 8 clients, mixed with documents in windows, chunks, token ids, tokens, texts that are cut or refused,
rubbish, and connections that end in the middle.

The model: all-MiniLM-L6-v2's shape with 8,192 positions and random weights, in float32. The first turn is a warm-up: it
has the longest text, and for the server in two requests of each kind, since two of its threads compute. Its third one
computes whole batches while these two compute parts of longer texts: the warm-up has both at once. From then on memory
should not grow, whatever comes. A chart has memory and p99 over time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from workers import OURS, Worker, alive, answer_all, backend_options, interpreters, package_versions, write_encoder

ROOT = Path(__file__).parents[1]
PEERS = ("torch", "onnx", "openvino")
SERVER, ENCODER = f"{OURS} serve", f"{OURS} encode"
LONGEST, PADDED, MOST_TEXTS, REQUESTS, RELOADED = 8192, 8192, 8, 24, 20  # a model is loaded again every so many turns
SCALE, TAIL = 40, 1.2  # of the Lomax draw: half have fewer than 31 tokens, 2 % more than 1,000, 1 of 600 the most
CLIENTS = 8
BATCH = 2048  # tokens of a server's batch, and of a request that fits in one
SIXTHS = 6
FIELDS = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}


def draw_requests(turn: int) -> list[list[int]]:
    """Words of each text of each request."""
    draw = random.Random(turn)
    requests = []
    for _ in range(REQUESTS):
        longest = LONGEST - 2  # and [CLS] and [SEP]
        tails = [draw.paretovariate(TAIL) - 1 for _ in range(draw.randint(1, MOST_TEXTS))]
        words = [min(longest, 1 + int(SCALE * tail)) for tail in tails]
        requests.append(words[: max(1, PADDED // (max(words) + 2))])
    return [[LONGEST - 2], *requests] if turn == 0 else requests


def make_texts(words: list[int], draw: random.Random, vocabulary: list[str]) -> list[str]:
    return [" ".join(draw.choices(vocabulary, k=count)) for count in words]


def whole_words(path: Path) -> list[str]:
    """Of the vocabulary: a token each."""
    return [word for word in path.read_text(encoding="utf-8").split("\n") if word.isascii() and word.isalpha()]


# --------------------------------------------------------------------------------------------------------------------
# A worker: one contestant that encodes


class Contestant:
    """What a worker does when it is asked for it. All answers are mappings."""

    def __init__(self, task: dict[str, Any]):
        self.task = task
        self.words = whole_words(Path(task["vocabulary"]))
        self.model: Any = None
        self.load()

    def load(self) -> dict[str, Any]:
        """The model, anew if there is one."""
        self.model = None
        backend, folder = self.task["of"], self.task["folder"]
        if backend == OURS:
            import fastbert

            self.model = fastbert.SentenceEncoder(folder, dtype="float32", device="cpu")
            return {}
        from sentence_transformers import SentenceTransformer

        options: dict[str, Any] = backend_options(backend, self.task["threads"])
        exported = Path(self.task["scratch"]) / backend
        if backend != "torch" and not exported.exists():
            made = SentenceTransformer(folder, device="cpu", backend=backend, model_kwargs={**options, "export": True})
            made.save_pretrained(str(exported))
        self.model = SentenceTransformer(
            folder if backend == "torch" else str(exported), device="cpu", backend=backend, model_kwargs=options
        )
        return {}

    def versions(self) -> dict[str, Any]:
        return {"versions": package_versions(self.task["of"])}

    def encode(self, turn: int) -> dict[str, Any]:
        """Seconds of each request."""
        seconds, draw = [], random.Random(turn)
        for words in draw_requests(turn):
            texts = make_texts(words, draw, self.words)
            start = time.perf_counter()
            found = self.model.encode(texts, show_progress_bar=False)
            seconds.append(time.perf_counter() - start)
            assert len(found) == len(texts)
        return {"seconds": seconds}


# --------------------------------------------------------------------------------------------------------------------
# The server's clients


def kinds(draw: random.Random, words: list[int], vocabulary: list[str]) -> dict[str, tuple[int, str, Any]]:
    """What a client may send of these texts: (weight, path, content) by name; bytes are sent as they are."""
    some = make_texts(words, draw, vocabulary)
    huge, ids = "a " * 500_000, [[101, *[2000 + i % 20000 for i in range(n)], 102] for n in words]
    return {
        "texts": (45, "/embed", {"inputs": some}),
        "OpenAI's": (20, "/v1/embeddings", {"input": some, "encoding_format": "base64"}),
        "token ids": (5, "/v1/embeddings", {"input": ids}),
        "a document in windows": (4, "/embed", {"inputs": some[0], "windows": True}),
        "chunks": (4, "/chunks", {"inputs": some[0], "return_text": True}),
        "a vector a token": (2, "/embed_all", {"inputs": some[:2]}),
        "similarity": (5, "/similarity", {"inputs": {"source_sentence": some[0], "sentences": some}}),
        "tokens": (5, "/tokenize", {"inputs": some}),
        "a huge text, refused": (1, "/embed", {"inputs": huge[: draw.randint(20_000, len(huge))]}),
        "a huge text, cut": (1, "/embed", {"inputs": huge[: draw.randint(20_000, len(huge))], "truncate": True}),
        "rubbish": (5, "/embed", b'{"inputs": [' * draw.randint(1, 100)),
        "a wrong field": (3, "/embed", {"input": some}),
        "no such route": (2, f"/{draw.randint(0, 10**9)}", {"inputs": some}),
        "a page": (3, draw.choice(("/metrics", "/health", "/info", "/openapi.json")), None),
        "gone in the middle": (5, "/embed", {"inputs": some}),
    }


def server_requests(turn: int) -> list[tuple[int, list[int], str | None]]:
    """(number, words of each text, kind or None for a draw)."""
    drawn = [(turn * 1000 + i, words, None) for i, words in enumerate(draw_requests(turn))]
    if turn:
        return drawn
    names = [*kinds(random.Random(0), [1], ["a"])] * 2
    sizes = [*[[LONGEST - 2], *[[BATCH // MOST_TEXTS - 2] * MOST_TEXTS] * 3] * 8]
    both = ((-1000 - i, words, "texts") for i, words in enumerate(sizes))
    return [*((-1 - i, [LONGEST - 2], name) for i, name in enumerate(names)), *both, *drawn]


async def client(port: int, requests: Any, vocabulary: list[str], counts: Any, seconds: list[float]) -> None:
    """Takes from the requests until none is left."""
    import orjson
    from beside import Connection, Seen

    connection = await Connection(port).open()
    for number, words, kind in requests:
        draw = random.Random(number)
        given = kinds(draw, words, vocabulary)
        name = kind or draw.choices(list(given), [weight for weight, *_ in given.values()])[0]
        _, path, content = given[name]
        body = content if isinstance(content, bytes) else b"" if content is None else orjson.dumps(content)
        seen, start = Seen(), time.perf_counter()
        asked = asyncio.ensure_future(connection.ask("GET" if content is None else "POST", path, body, seen))
        if name == "gone in the middle":
            await asyncio.sleep(draw.random() / 20)
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            connection.writer.close()
            connection = await Connection(port).open()
        else:
            await asked
        if name in ("texts", "OpenAI's", "token ids"):
            seconds.append(time.perf_counter() - start)
        counts.setdefault(name, Counter())[seen.statuses[0] if seen.statuses else 0] += 1
    connection.writer.close()


async def ask_server(port: int, turn: int, vocabulary: list[str], counts: dict[str, Counter[int]]) -> list[float]:
    """Seconds of each request for vectors."""
    requests = iter(server_requests(turn))
    seconds: list[float] = []
    await asyncio.gather(*(client(port, requests, vocabulary, counts, seconds) for _ in range(CLIENTS)))
    return seconds


# --------------------------------------------------------------------------------------------------------------------
# The hour


def held(pid: int) -> dict[str, Any]:
    """Megabytes of resident memory, open handles and threads of a process.

    Without pages of files: the system takes those of libraries back where another process needs memory.
    """
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "mb": int(fields["RssAnon"].split()[0]) / 1024,
        "handles": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }


def one_turn(turn: int, workers: dict[str, Worker], server: Any, port: int, words: list[str], counts: Any) -> dict:
    """By contestant: seconds of its requests, and what it holds afterwards."""
    found: dict[str, dict[str, Any]] = {}
    for name, worker in alive(workers).items():
        if turn and not turn % RELOADED:
            worker.ask("load")
        answer = worker.ask("encode", turn=turn)
        if answer:
            found[name] = {**answer, **held(worker.process.pid)}
    found[SERVER] = {"seconds": asyncio.run(ask_server(port, turn, words, counts)), **held(server.pid)}
    return found


def soak(options: argparse.Namespace, pythons: dict[str, str], root: Path) -> dict[str, Any]:
    """All figures."""
    from common import PORT, running

    vocabulary = options.data / "vocab/bert-base-uncased/vocab.txt"
    fields = {**FIELDS, "max_position_embeddings": LONGEST}
    folder = write_encoder("BertConfig", fields, "mean", LONGEST, vocabulary, root)
    words = whole_words(vocabulary)
    task = {"folder": str(folder), "vocabulary": str(vocabulary.resolve()), "scratch": str(root)}
    task["threads"] = torch.get_num_threads()
    command = ["-m", "fastbert", "serve", str(folder), "--device", "cpu", "--dtype", "float32", "--port", str(PORT)]
    command += ["--access-log", "json"]
    contestants = {ENCODER: OURS, **{f"sentence-transformers {name}": name for name in PEERS}}
    workers: dict[str, Worker] = {}
    counts: dict[str, Counter[int]] = {}
    turns: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack, open(os.devnull, "w") as nowhere:
        for name, of in contestants.items():
            workers[name] = Worker(pythons[of], {**task, "of": of}, __file__)
            stack.callback(workers[name].close)
        about = {name: worker.ask("versions").get("versions") for name, worker in workers.items()}
        server = stack.enter_context(running(command, stdout=nowhere))
        start = time.perf_counter()
        for turn in itertools.count():
            found = one_turn(turn, workers, server, PORT, words, counts)
            turns.append({"minutes": (time.perf_counter() - start) / 60, "found": found})
            said = {name: [round(each["mb"]), round(1e3 * max(each["seconds"]))] for name, each in found.items()}
            print(f"{turns[-1]['minutes']:.1f} min, MB and slowest ms: {said}", file=sys.stderr, flush=True)
            if turns[-1]["minutes"] >= 60 * options.hours:
                break
    failures = {name: worker.failure for name, worker in workers.items() if worker.failure is not None}
    statuses = {name: dict(each) for name, each in sorted(counts.items())}
    return {"versions": about, "turns": turns, "statuses": statuses, "failures": failures}


# --------------------------------------------------------------------------------------------------------------------
# The page and the chart


def percentile(turns: list[dict[str, Any]], share: float) -> float:
    """In milliseconds, of all their requests."""
    return 1e3 * float(torch.tensor([second for each in turns for second in each["seconds"]]).quantile(share))


def in_sixths(turns: list[dict[str, Any]], name: str) -> list[dict[str, float]]:
    """Of a contestant in each sixth of the time behind the warm-up: memory, latency, handles, threads."""
    rows = []
    later = [turn for turn in turns[1:] if name in turn["found"]]
    for i in range(SIXTHS):
        some = [turn["found"][name] for turn in later[i * len(later) // SIXTHS : (i + 1) * len(later) // SIXTHS]]
        if not some:
            continue
        rows.append(
            {
                "median_mb": statistics.median(each["mb"] for each in some),
                "most_mb": max(each["mb"] for each in some),
                "p50": percentile(some, 0.5),
                "p99": percentile(some, 0.99),
                "handles": max(each["handles"] for each in some),
                "threads": max(each["threads"] for each in some),
            }
        )
    return rows


def to_markdown(report: dict[str, Any]) -> str:
    from fastbert.bench.report import where

    sixths = report["sixths"]
    lines = [
        "# An hour of everything",
        "",
        f"{where(report['machine'])} {report['hours']:g} hours, {report['count']} turns of {REQUESTS} requests.",
        "",
        "![Memory and p99 over time](soak.png)",
        "",
        "Memory in MB, without pages of files: behind the warm-up, which has the longest text, then the first and the",
        "last sixth's median.",
        "Growth is the last one beside the first one. Latency in ms of a request, and the rest: first and last sixth.",
        "",
        "| | warm-up | first sixth | last sixth | growth | most | p50 | p99 | handles | threads |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, rows in sixths.items():
        a, b = rows[0], rows[-1]
        lines.append(
            f"| {name} | {report['first_mb'][name]:,.0f} | {a['median_mb']:,.0f} | {b['median_mb']:,.0f} |"
            f" {b['median_mb'] / a['median_mb'] - 1:+.1%} | {max(row['most_mb'] for row in rows):,.0f} |"
            f" {a['p50']:.1f}, {b['p50']:.1f} | {a['p99']:,.0f}, {b['p99']:,.0f} |"
            f" {a['handles']:.0f}, {b['handles']:.0f} | {a['threads']:.0f}, {b['threads']:.0f} |"
        )
    lines += ["", "| what the server got | status: how often |", "|---|---|"]
    for name, found in report["statuses"].items():
        lines.append(f"| {name} | {', '.join(f'{status}: {times:,}' for status, times in sorted(found.items()))} |")
    lines += [""]
    for name, found in report["versions"].items():
        if found and not name.startswith(OURS):
            lines.append(f"- {name}: {', '.join(f'{package} {version}' for package, version in found.items())}.")
    lines += [f"- {name} died: {why}" for name, why in report["failures"].items()]
    return "\n".join(lines)


def draw_chart(turns: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, latency) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    for name in turns[0]["found"]:
        seen = [(turn["minutes"], turn["found"][name]) for turn in turns if name in turn["found"]]
        style = {"label": name, "linewidth": 2 if name.startswith(OURS) else 1}
        memory.plot([minute for minute, _ in seen], [each["mb"] for _, each in seen], **style)
        groups = [seen[i * len(seen) // 12 : (i + 1) * len(seen) // 12] for i in range(12) if len(seen) >= 12]
        p99 = [percentile([each for _, each in group], 0.99) for group in groups]
        latency.plot([group[-1][0] for group in groups], p99, marker="o", markersize=3, **style)
    memory.set(ylabel="resident memory, MB", yscale="log")
    latency.set(ylabel="p99 of a request, ms", xlabel="minutes", yscale="log")
    memory.legend(fontsize=8)
    for axes in (memory, latency):
        axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="a folder with vocab/")
    parser.add_argument("--output", type=Path, help="a folder for soak.json, .md and .png")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="may be given several times")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return answer_all(Contestant, json.loads(options.worker))

    sys.path.insert(0, str(ROOT / "benchmarks" / "serving"))
    from fastbert.bench.compete import machine_of
    from fastbert.bench.report import write_report

    pythons = interpreters(options.python, (OURS, *PEERS))
    with tempfile.TemporaryDirectory(prefix="soak-") as path:
        found = soak(options, pythons, Path(path))
    turns = found.pop("turns")
    sixths = {name: in_sixths(turns, name) for name in turns[0]["found"]}
    report: dict[str, Any] = {
        "machine": machine_of(torch.get_num_threads(), ("transformers", "sentence_transformers")),
        "hours": turns[-1]["minutes"] / 60,
        "count": len(turns),
        "first_mb": {name: each["mb"] for name, each in turns[0]["found"].items()},
        "sixths": {name: rows for name, rows in sixths.items() if rows},
        **found,
    }
    page = to_markdown(report)
    print(page)
    if options.output is not None:
        write_report(options.output, "soak", report, page)
        draw_chart(turns, options.output / "soak.png")
    return None


if __name__ == "__main__":
    main()
