"""`fastbert serve` under load, beside a plain transformers server and offline `encode`: `python benchmarks/serve.py`.

64 clients send requests of mixed lengths one after the other. Every vector that comes back is compared with `encode`'s.
Needs the extra [serve], transformers, and the package with all-MiniLM-L6-v2 (the extra [demo]).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from fastbert.bench.timing import describe_machine
from fastbert.checkpoint.pretrained import resolve

ROOT = Path(__file__).resolve().parents[1]
MODEL = "all-MiniLM-L6-v2"
SENTENCES = (1, 1, 1, 1, 2, 3, 5, 8)  # that a text consists of
TEXTS = (1, 1, 1, 1, 1, 2, 4, 8)  # that a request has
WORDS = 150  # of a text at most: fewer than 256 tokens, the model's limit
POOL = 512  # different texts
OFFLINE = """
import json, sys, time
import fastbert
texts, seconds = json.load(sys.stdin), float(sys.argv[2])
encoder = fastbert.SentenceEncoder.from_pretrained(sys.argv[1], device="cpu")
vectors = encoder.encode(texts)
lengths = [len(ids) for ids in encoder.tokenize(texts)]
rounds, start, cpu = 0, time.perf_counter(), time.process_time()
while not rounds or time.perf_counter() - start < seconds:
    encoder.encode(texts)
    rounds += 1
wall, cpu = time.perf_counter() - start, time.process_time() - cpu
json.dump({"lengths": lengths, "vectors": vectors.tolist(), "tokens": rounds * sum(lengths), "wall": wall, "cpu": cpu},
          sys.stdout)
"""


@dataclass
class Load:
    """What one server answered: latencies in seconds, tokens, and the largest distance from `encode`'s vectors."""

    seconds: float = 0.0
    cpu: float = 0.0
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    answers: list[tuple[list[int], bytes]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def make_texts() -> list[str]:
    sentences = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(sentences, k=SENTENCES[i % len(SENTENCES)])) for i in range(POOL)]
    return [" ".join(text.split()[:WORDS]) for text in texts]


def cpu_seconds(pid: int) -> float:
    """Of a process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(command: list[str], port: int) -> Iterator[subprocess.Popen]:
    """A server that answers /health; ended by SIGTERM, after which it must leave with 0."""
    process = subprocess.Popen([sys.executable, *command])
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, f"{command} ended"
                time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(60)


async def client(number: int, port: int, texts: list[str], lengths: list[int], until: float, load: Load) -> None:
    """Sends one request after the other over one connection."""
    draw = random.Random(number)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        chosen = draw.choices(range(len(texts)), k=draw.choice(TEXTS))
        body = orjson.dumps({"inputs": [texts[i] for i in chosen]})
        start = time.perf_counter()
        writer.write(
            b"POST /embed HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        answer = await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        load.latencies.append(time.perf_counter() - start)
        load.tokens += sum(lengths[i] for i in chosen)
        if not head.startswith(b"http/1.1 200"):
            load.errors.append(answer.decode()[:200])
        else:
            load.answers.append((chosen, answer))
    writer.close()


def measure(
    command: list[str], port: int, texts: list[str], offline: dict, clients: int, seconds: float
) -> dict[str, float]:
    async def run(load: Load, seconds: float) -> None:
        start = time.perf_counter()
        arguments = (port, texts, offline["lengths"], start + seconds, load)
        await asyncio.gather(*(client(i, *arguments) for i in range(clients)))
        load.seconds = time.perf_counter() - start

    with running(command, port) as server:
        asyncio.run(run(Load(), 2.0))  # warm
        load, before = Load(), cpu_seconds(server.pid)
        asyncio.run(run(load, seconds))
        load.cpu = cpu_seconds(server.pid) - before
    if load.errors:
        print(f"{len(load.errors)} errors, the first: {load.errors[0]}", file=sys.stderr)
    expected = np.array(offline["vectors"], np.float32)
    worst = max(float(np.abs(np.array(orjson.loads(a)) - expected[i]).max()) for i, a in load.answers)
    return {
        "requests": len(load.latencies),
        "errors": len(load.errors),
        "tokens_per_second": load.tokens / load.seconds,
        "p50_ms": 1e3 * float(np.percentile(load.latencies, 50)),
        "p99_ms": 1e3 * float(np.percentile(load.latencies, 99)),
        "cpu_us_per_token": 1e6 * load.cpu / load.tokens,
        "largest_difference": worst,
    }


def to_markdown(report: dict) -> str:
    machine, offline = report["machine"], report["offline"]
    lines = [
        f"{MODEL} in float32, {report['clients']} clients for {report['seconds']:g} s, 1 to 8 texts of"
        f" {offline['shortest']} to {offline['longest']} tokens a request; {machine['cpu']}, {report['cores']} cores"
        f" that the clients share, torch {machine['torch']}, commit {machine['commit']}, {machine['date']}.",
        "",
        "| | tokens/s | p50, ms | p99, ms | CPU us a token | requests | errors | largest difference from `encode` |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        f"| offline `encode` | {offline['tokens_per_second']:,.0f} | | | {offline['cpu_us_per_token']:.1f} | | | |",
    ]
    for name, row in report["servers"].items():
        lines.append(
            f"| {name} | {row['tokens_per_second']:,.0f} | {row['p50_ms']:.0f} | {row['p99_ms']:.0f} |"
            f" {row['cpu_us_per_token']:.1f} | {row['requests']:,} | {row['errors']} |"
            f" {row['largest_difference']:.1e} |"
        )
    ours, plain = report["servers"].values()
    share = offline["cpu_us_per_token"] / ours["cpu_us_per_token"]
    ratio = ours["tokens_per_second"] / plain["tokens_per_second"]
    lines.append(f"\n{ratio:.2f} times the plain server's throughput.")
    lines.append(f"Offline `encode` takes {share:.2f} of the server's CPU seconds a token.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--output", type=Path, help="a folder for serve.json and serve.md")
    options = parser.parse_args()
    texts, folder = make_texts(), str(resolve(MODEL))
    given = subprocess.run(
        [sys.executable, "-c", OFFLINE, folder, str(options.seconds / 3)],
        input=json.dumps(texts), capture_output=True, text=True, check=True,
    )  # fmt: skip
    offline = json.loads(given.stdout)
    commands = {
        "fastbert serve": ["-m", "fastbert", "serve", MODEL, "--device", "cpu", "--port", "8311"],
        "transformers and FastAPI": [str(ROOT / "benchmarks" / "plain_server.py"), folder, "8312"],
    }
    servers = {
        name: measure(command, int(command[-1]), texts, offline, options.clients, options.seconds)
        for name, command in commands.items()
    }
    report = {
        "machine": describe_machine(),
        "cores": len(os.sched_getaffinity(0)),
        "clients": options.clients,
        "seconds": options.seconds,
        "offline": {
            "tokens_per_second": offline["tokens"] / offline["wall"],
            "cpu_us_per_token": 1e6 * offline["cpu"] / offline["tokens"],
            "shortest": min(offline["lengths"]),
            "longest": max(offline["lengths"]),
        },
        "servers": servers,
    }
    page = to_markdown(report)
    print(page)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "serve.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.output / "serve.md").write_text(page + "\n")


if __name__ == "__main__":
    main()
