"""`fastbert serve` under a mix of everything for half an hour, and the memory that it holds: `python
benchmarks/serving/soak.py`.

Eight clients draw from short texts, documents in windows, chunks, token ids, tokens, texts that are cut or refused,
rubbish, and connections that end in the middle. Memory may grow while the first minutes warm up, and not after them.
Needs the extras [serve] and [demo].
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import orjson
from beside import Connection, Seen, megabytes
from common import MODEL, PORT, machine_line, parser, running, serve_command, tell
from load import make_texts

CLIENTS, SAMPLE_S = 8, 1.0
DOCUMENT, HUGE = "the cat sat on the mat. " * 600, "a " * 500_000


def kinds(draw: random.Random, texts: list[str]) -> dict[str, tuple[int, str, Any]]:
    """What a client sends next, by its name: (weight, path, content); bytes are sent as they are."""
    some = draw.choices(texts, k=draw.randint(1, 8))
    return {
        "short texts": (40, "/embed", {"inputs": some}),
        "OpenAI's": (20, "/v1/embeddings", {"input": some, "encoding_format": "base64"}),
        "token ids": (5, "/v1/embeddings", {"input": [[101, *range(2000, 2000 + draw.randint(1, 100)), 102]]}),
        "a document in windows": (4, "/embed", {"inputs": DOCUMENT[: draw.randint(1000, 14000)], "windows": True}),
        "chunks": (4, "/chunks", {"inputs": DOCUMENT[: draw.randint(1000, 7000)], "return_text": True}),
        "a vector a token": (4, "/embed_all", {"inputs": some}),
        "similarity": (5, "/similarity", {"inputs": {"source_sentence": some[0], "sentences": some}}),
        "tokens": (5, "/tokenize", {"inputs": some}),
        "a huge text, refused": (1, "/embed", {"inputs": HUGE[: draw.randint(10_000, len(HUGE))]}),
        "a huge text, cut": (1, "/embed", {"inputs": HUGE[: draw.randint(10_000, len(HUGE))], "truncate": True}),
        "rubbish": (5, "/embed", b'{"inputs": [' * draw.randint(1, 100)),
        "a wrong field": (3, "/embed", {"input": some}),
        "no such route": (2, f"/{draw.randint(0, 10**9)}", {"inputs": some}),
        "a page": (3, draw.choice(("/metrics", "/health", "/info", "/openapi.json")), None),
        "gone in the middle": (5, "/embed", {"inputs": some * 4}),
    }


async def client(number: int, port: int, until: float, texts: list[str], counts: dict[str, Counter[int]]) -> None:
    draw, connection = random.Random(number), await Connection(port).open()
    while time.perf_counter() < until:
        drawn = kinds(draw, texts)
        name = draw.choices(list(drawn), [weight for weight, *_ in drawn.values()])[0]
        _, path, content = drawn[name]
        body = content if isinstance(content, bytes) else b"" if content is None else orjson.dumps(content)
        seen = Seen()
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
        counts.setdefault(name, Counter())[seen.statuses[0] if seen.statuses else 0] += 1


async def soak(pid: int, port: int, minutes: float) -> tuple[list[tuple[float, float]], dict[str, Counter[int]]]:
    """(seconds and megabytes of each sample, how often each kind had each status)."""
    texts, counts, start = make_texts(), dict[str, Counter[int]](), time.perf_counter()
    until = start + 60 * minutes
    clients = [asyncio.ensure_future(client(i, port, until, texts, counts)) for i in range(CLIENTS)]
    samples = []
    while not all(one.done() for one in clients):
        await asyncio.wait(clients, timeout=SAMPLE_S)
        samples.append((time.perf_counter() - start, megabytes(pid, "VmRSS")))
    await asyncio.gather(*clients)
    return samples, counts


def to_markdown(report: dict[str, Any]) -> str:
    memory, minutes = report["memory_mb"], report["minutes"]
    lines = [
        f"{MODEL}, {report['dtype']}, {CLIENTS} clients, {minutes:g} minutes; {machine_line(report)}",
        "",
        "| minutes | memory: median, MB | most, MB |",
        "|---|--:|--:|",
        *(f"| {row['minutes']} | {row['median']:.0f} | {row['most']:.0f} |" for row in memory),
        "",
        f"The most that it held: {report['peak_mb']:.0f} MB.",
        "",
        "| | status: how often |",
        "|---|---|",
        *(
            f"| {name} | {', '.join(f'{status}: {times:,}' for status, times in sorted(found.items()))} |"
            for name, found in report["statuses"].items()
        ),
    ]
    return "\n".join(lines)


def of_minutes(samples: list[tuple[float, float]], minutes: float, share: int = 6) -> list[dict[str, Any]]:
    """Memory in each sixth of the time: of half an hour, five minutes."""
    rows = []
    for i in range(share):
        start, stop = i * minutes / share, (i + 1) * minutes / share
        held = sorted(mb for seconds, mb in samples if start <= seconds / 60 < stop)
        rows.append({"minutes": f"{start:g} to {stop:g}", "median": held[len(held) // 2], "most": held[-1]})
    return rows


def main() -> None:
    arguments = parser(__doc__, "serve-soak")
    arguments.add_argument("--minutes", type=float, default=30.0)
    arguments.add_argument("--dtype", default="bfloat16")
    options = arguments.parse_args()
    command = [*serve_command(options.dtype), "--access-log", "json"]
    with open(os.devnull, "w") as nowhere, running(command, stdout=nowhere) as server:
        samples, counts = asyncio.run(soak(server.pid, PORT, options.minutes))
        peak = megabytes(server.pid, "VmHWM")
    found = {
        "dtype": options.dtype,
        "minutes": options.minutes,
        "memory_mb": of_minutes(samples, options.minutes),
        "peak_mb": peak,
        "statuses": {name: dict(each) for name, each in sorted(counts.items())},
    }
    tell("serve-soak", found, to_markdown, options.output)


if __name__ == "__main__":
    main()
