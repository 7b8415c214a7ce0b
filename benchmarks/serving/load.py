"""`fastbert serve` under load, beside a plain server and offline `encode`: `python benchmarks/serving/load.py`.

64 clients send requests of mixed lengths one after the other. Every vector that comes back is compared with `encode`'s.
At the end each client has a request on its way when the server gets SIGTERM: how many are answered is told, too.
Needs the extras [serve] and [demo] (transformers, all-MiniLM-L6-v2), and a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from common import MODEL, PORT, machine_line, parser, running, serve_command, tell

from fastbert.hub import resolve

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (1, 1, 1, 1, 2, 3, 5, 8)  # that a text consists of
TEXTS = (1, 1, 1, 1, 1, 2, 4, 8)  # that a request has
WORDS = 150  # of a text at most: fewer than 256 tokens, the model's limit
POOL = 512  # different texts
DTYPES = ("float32", "bfloat16", "int8")  # of our server
PLAIN = (
    "transformers and FastAPI",
    "transformers and FastAPI, one request at a time",
    "transformers and FastAPI, bfloat16",
)
PLAIN_WAYS = (("float32", "many"), ("float32", "one"), ("bfloat16", "many"))
WARM_S, SENT_S = 2.0, 0.5  # before it counts; from the last requests to SIGTERM
OFFLINE = """
import json, sys, time
import fastbert
texts, seconds = json.load(sys.stdin), float(sys.argv[2])
encoder = fastbert.SentenceEncoder.from_pretrained(sys.argv[1], device="cpu", dtype=sys.argv[3])
vectors = encoder.encode(texts)
lengths = encoder.tokenize(texts).lengths.tolist()
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


class Client:
    """Sends one request after the other over one connection."""

    def __init__(self, number: int, port: int, texts: list[str], lengths: list[int]):
        self.draw, self.port, self.texts, self.lengths = random.Random(number), port, texts, lengths

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    def send(self) -> list[int]:
        chosen = self.draw.choices(range(len(self.texts)), k=self.draw.choice(TEXTS))
        body = orjson.dumps({"inputs": [self.texts[i] for i in chosen]})
        self.writer.write(
            b"POST /embed HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        return chosen

    async def receive(self, chosen: list[int], load: Load) -> None:
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        answer = await self.reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        if head.startswith(b"http/1.1 200"):
            load.tokens += sum(self.lengths[i] for i in chosen)
            load.answers.append((chosen, answer))
        else:
            load.errors.append(answer.decode()[:200])

    async def run(self, until: float, load: Load) -> None:
        await self.connect()
        while (start := time.perf_counter()) < until:
            await self.receive(self.send(), load)
            load.latencies.append(time.perf_counter() - start)
        self.writer.close()

    async def until_sigterm(self, load: Load) -> None:
        await self.connect()
        with suppress(OSError, asyncio.IncompleteReadError):
            await self.receive(self.send(), load)


async def drive(server: subprocess.Popen, clients: list[Client], seconds: float) -> tuple[Load, Load]:
    """What came back in `seconds`, after WARM_S; and of the requests that were on their way at SIGTERM."""
    await asyncio.gather(*(client.run(time.perf_counter() + WARM_S, Load()) for client in clients))
    load, last, before, start = Load(), Load(), cpu_seconds(server.pid), time.perf_counter()
    await asyncio.gather(*(client.run(start + seconds, load) for client in clients))
    load.seconds, load.cpu = time.perf_counter() - start, cpu_seconds(server.pid) - before
    waiting = [asyncio.ensure_future(client.until_sigterm(last)) for client in clients]
    await asyncio.sleep(SENT_S)
    server.terminate()
    await asyncio.gather(*waiting)
    return load, last


def measure(
    command: list[str], port: int, texts: list[str], offline: dict, clients: int, seconds: float
) -> dict[str, float]:
    with running(command, port) as server:
        everyone = [Client(i, port, texts, offline["lengths"]) for i in range(clients)]
        load, last = asyncio.run(drive(server, everyone, seconds))
    for error in load.errors[:1]:
        print(f"{len(load.errors)} errors, the first: {error}", file=sys.stderr)
    expected = np.array(offline["vectors"], np.float32)
    answers = load.answers + last.answers
    worst = max(float(np.abs(np.array(orjson.loads(a)) - expected[i]).max()) for i, a in answers)
    return {
        "requests": len(load.latencies),
        "errors": len(load.errors),
        "tokens_per_second": load.tokens / load.seconds,
        "p50_ms": 1e3 * float(np.percentile(load.latencies, 50)),
        "p99_ms": 1e3 * float(np.percentile(load.latencies, 99)),
        "cpu_us_per_token": 1e6 * load.cpu / load.tokens,
        "largest_difference": worst,
        "answered_after_sigterm": len(last.answers),
    }


def offline_encode(texts: list[str], folder: str, seconds: float, dtype: str) -> dict:
    """In a process of its own: vectors, lengths, tokens, and seconds of the clock and of the processors."""
    command = [sys.executable, "-c", OFFLINE, folder, str(seconds), dtype]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure_dtype(dtype: str, port: int, texts: list[str], clients: int, seconds: float) -> dict:
    """Our server in a number format, and offline `encode` before and after it, since a machine's speed changes."""
    before = offline_encode(texts, str(resolve(MODEL)), seconds / 6, dtype)
    server = measure(serve_command(dtype, port), port, texts, before, clients, seconds)
    after = offline_encode(texts, str(resolve(MODEL)), seconds / 6, dtype)
    tokens = before["tokens"] + after["tokens"]
    offline = {
        "tokens_per_second": tokens / (before["wall"] + after["wall"]),
        "cpu_us_per_token": 1e6 * (before["cpu"] + after["cpu"]) / tokens,
        "cpu_us_per_token_before_and_after": [1e6 * run["cpu"] / run["tokens"] for run in (before, after)],
    }
    return {"offline": offline, "server": server}


def measure_plain(dtype: str, at_a_time: str, port: int, texts: list[str], clients: int, seconds: float) -> dict:
    folder = str(resolve(MODEL))
    command = [str(ROOT / "benchmarks" / "serving" / "plain_server.py"), folder, dtype, at_a_time, str(port)]
    return measure(command, port, texts, offline_encode(texts, folder, 0.0, dtype), clients, seconds)


def to_row(name: str, row: dict, clients: int, ratio: float) -> str:
    return (
        f"| {name} | {row['tokens_per_second']:,.0f} ({ratio:.2f}x) | {row['p50_ms']:.0f} | {row['p99_ms']:.0f} |"
        f" {row['cpu_us_per_token']:.1f} | {row['requests']:,} | {row['errors']} | {row['largest_difference']:.1e} |"
        f" {row['answered_after_sigterm']} of {clients} |"
    )


def to_markdown(report: dict) -> str:
    clients, base = report["clients"], report["plain"][PLAIN[0]]["tokens_per_second"]
    lines = [
        f"{MODEL}, {clients} clients for {report['seconds']:g} s, 1 to {max(TEXTS)} texts of {report['shortest']} to"
        f" {report['longest']} tokens a request; {machine_line(report)} The difference is that from"
        " `encode` in the same number format.",
        "",
        f"| | tokens/s (times {PLAIN[0]}) | p50, ms | p99, ms | CPU us a token | requests | errors |"
        " difference, at most | answered after SIGTERM |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for dtype, found in report["fastbert"].items():
        offline, ratio = found["offline"], found["server"]["tokens_per_second"] / base
        lines.append(
            f"| offline `encode`, {dtype} | {offline['tokens_per_second']:,.0f} | | |"
            f" {offline['cpu_us_per_token']:.1f} | | | | |"
        )
        lines.append(to_row(f"fastbert serve, {dtype}", found["server"], clients, ratio))
    lines += [to_row(name, row, clients, row["tokens_per_second"] / base) for name, row in report["plain"].items()]
    for dtype, found in report["fastbert"].items():
        share = found["offline"]["cpu_us_per_token"] / found["server"]["cpu_us_per_token"]
        lines.append(f"\n{dtype}: offline `encode` takes {share:.2f} of the server's CPU seconds a token.")
    return "\n".join(lines)


def main() -> None:
    arguments = parser(__doc__, "serve")
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--clients", type=int, default=64)
    options = arguments.parse_args()
    texts, load = make_texts(), (options.clients, options.seconds)
    lengths = offline_encode(texts, str(resolve(MODEL)), 0.0, "float32")["lengths"]
    found = {
        "clients": options.clients,
        "seconds": options.seconds,
        "shortest": min(lengths),
        "longest": max(lengths),
        "fastbert": {dtype: measure_dtype(dtype, PORT + i, texts, *load) for i, dtype in enumerate(DTYPES)},
        "plain": {
            name: measure_plain(*how, PORT + len(DTYPES) + i, texts, *load)
            for i, (name, how) in enumerate(zip(PLAIN, PLAIN_WAYS, strict=True))
        },
    }
    tell("serve", found, to_markdown, options.output)


if __name__ == "__main__":
    main()
