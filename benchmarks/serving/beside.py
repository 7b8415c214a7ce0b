"""`fastbert serve`, those who ask for little beside those who ask for much: `python benchmarks/serving/beside.py`.

First a client of short texts, RATE a second, alone; one of documents of 60,000 tokens, one after the other, alone; and
both. Then texts of 1.9 MB, 16 at a time: 200 that are refused and 200 that are cut, while another process asks for
/health. Alone and beside come in turn, so that what else the machine does meets both. Needs the extras [serve] and
[demo].
"""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import subprocess
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from common import MODEL, PORT, machine_line, parser, running, serve_command, tell
from load import make_texts

RATE = 10  # requests of short texts a second
DOCUMENT_TOKENS = 60_000
HUGE, AT_A_TIME, TIMES = "a " * 950_000, 16, 200
WARM = 20  # requests that do not count
HEALTH_S = 0.02  # between two looks at /health


@dataclass
class Seen:
    """Of one kind of client: seconds of each request, tokens of windows, statuses."""

    latencies: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    tokens: int = 0

    def percentile(self, share: float) -> float:
        """In milliseconds."""
        return 1e3 * float(np.percentile(self.latencies, share))


class Connection:
    def __init__(self, port: int):
        self.port = port

    async def open(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        return self

    async def ask(self, method: str, path: str, body: bytes, seen: Seen) -> bytes:
        start = time.perf_counter()
        self.writer.write(
            b"%s %s HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (method.encode(), path.encode(), len(body), body)
        )
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        answer = await self.reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        seen.latencies.append(time.perf_counter() - start)
        seen.statuses.append(int(head.split()[1]))
        return answer


async def short_texts(port: int, until: float, seen: Seen) -> None:
    """RATE requests a second, by a clock that does not wait for answers; the latency counts from when it was due."""
    bodies = [orjson.dumps({"inputs": " ".join(text.split()[:20])}) for text in make_texts()]
    open_ones: list[Connection] = []

    async def one(body: bytes, due: float) -> None:
        connection = open_ones.pop() if open_ones else await Connection(port).open()
        await connection.ask("POST", "/embed", body, seen)
        seen.latencies[-1] = time.perf_counter() - due
        open_ones.append(connection)

    asked, due = [], time.perf_counter()
    while due < until:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asked.append(asyncio.ensure_future(one(bodies[len(asked) % len(bodies)], due)))
        due += 1 / RATE
    await asyncio.gather(*asked)


async def documents(port: int, until: float, seen: Seen) -> None:
    """One after the other. Throughput is of those that are answered, up to the end of the last one."""
    body = orjson.dumps({"inputs": "a " * DOCUMENT_TOKENS, "windows": True})
    connection = await Connection(port).open()
    while time.perf_counter() < until:
        await connection.ask("POST", "/embed", body, seen)
        seen.tokens += DOCUMENT_TOKENS


async def turn(port: int, seconds: float, *clients: Any) -> list[tuple[Seen, float]]:
    """What each client saw, and for how long, when they run together."""
    seen = [Seen() for _ in clients]
    start = time.perf_counter()

    async def timed(client: Any, own: Seen) -> float:
        await client(port, start + seconds, own)
        return time.perf_counter() - start

    took = await asyncio.gather(*(timed(*one) for one in zip(clients, seen, strict=True)))
    return list(zip(seen, took, strict=True))


async def fairness(port: int, seconds: float, rounds: int) -> dict[str, Any]:
    await turn(port, WARM / RATE, short_texts)
    alone, beside = Seen(), Seen()
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    statuses: list[int] = []

    def add(whole: Seen, part: Seen) -> None:
        whole.latencies += part.latencies
        statuses.extend(part.statuses)

    for _ in range(rounds):
        ((one, _),) = await turn(port, seconds, short_texts)
        add(alone, one)
        ((many, took),) = await turn(port, seconds, documents)
        rates["alone"].append(many.tokens / took)
        (one, _), (many, took) = await turn(port, seconds, short_texts, documents)
        add(beside, one)
        statuses += many.statuses
        rates["beside"].append(many.tokens / took)
    return {
        "short": {
            name: {"p50_ms": one.percentile(50), "p99_ms": one.percentile(99), "requests": len(one.latencies)}
            for name, one in (("alone", alone), ("beside", beside))
        },
        "documents_tokens_per_second": {name: float(np.median(each)) for name, each in rates.items()},
        "lost": sum(status != 200 for status in statuses),
    }


def megabytes(pid: int, name: str) -> float:
    """VmRSS, what a process holds, or VmHWM, the most that it held."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


async def huge_texts(port: int, truncate: bool) -> Seen:
    body, seen = orjson.dumps({"inputs": HUGE, "truncate": truncate}), Seen()

    async def client() -> None:
        connection = await Connection(port).open()
        for _ in range(TIMES // AT_A_TIME + 1):
            await connection.ask("POST", "/embed", body, seen)

    await asyncio.gather(*(client() for _ in range(AT_A_TIME)))
    return seen


def ask_for_health(port: int, ending: Pipe) -> None:
    """In a process of its own: the one that sends 30 MB at a time is busy itself. Sends what it saw, when told to."""
    connection, seen = http.client.HTTPConnection("127.0.0.1", port), Seen()
    while not ending.poll(HEALTH_S):
        start = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        seen.latencies.append(time.perf_counter() - start)
        seen.statuses.append(answer.status)
    ending.send(seen)


def memory(server: subprocess.Popen, port: int) -> dict[str, Any]:
    start = megabytes(server.pid, "VmRSS")
    found: dict[str, Any] = {"start_mb": start}
    for name, truncate in (("refused", False), ("cut", True)):
        here, there = multiprocessing.Pipe()
        watching = multiprocessing.get_context("spawn").Process(target=ask_for_health, args=(port, there))
        watching.start()
        seen = asyncio.run(huge_texts(port, truncate))
        here.send("end")
        health = here.recv()
        watching.join()
        found[name] = {
            "statuses": sorted(set(seen.statuses)),
            "requests": len(seen.statuses),
            "after_mb": megabytes(server.pid, "VmRSS"),
            "peak_mb": megabytes(server.pid, "VmHWM"),
            "health_p99_ms": health.percentile(99),
            "health_most_ms": health.percentile(100),
        }
    return found


def to_markdown(report: dict[str, Any]) -> str:
    fair, held = report["fairness"], report["memory"]
    lines = [
        f"{MODEL}, {report['dtype']}; {machine_line(report)}",
        "",
        "| | alone | beside the others | |",
        "|---|--:|--:|--:|",
    ]
    for share in ("p50_ms", "p99_ms"):
        alone, beside = (fair["short"][name][share] for name in ("alone", "beside"))
        lines.append(f"| short texts, {share[:3]}, ms | {alone:.1f} | {beside:.1f} | {beside / alone:.2f}x |")
    alone, beside = (fair["documents_tokens_per_second"][name] for name in ("alone", "beside"))
    lines += [
        f"| documents, tokens/s | {alone:,.0f} | {beside:,.0f} | {beside / alone:.2f}x |",
        "",
        f"Requests that were not answered with 200: {fair['lost']}.",
        "",
        "| texts of 1.9 MB, 16 at a time | status | before, MB | after, MB | peak, MB | `/health`, p99 and most, ms |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    before = held["start_mb"]
    for name in ("refused", "cut"):
        row = held[name]
        lines.append(
            f"| {row['requests']} that are {name} | {row['statuses']} | {before:.0f} | {row['after_mb']:.0f} |"
            f" {row['peak_mb']:.0f} | {row['health_p99_ms']:.1f}, {row['health_most_ms']:.1f} |"
        )
        before = row["after_mb"]
    return "\n".join(lines)


def main() -> None:
    arguments = parser(__doc__, "serve-beside")
    arguments.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--dtype", default="bfloat16")
    options = arguments.parse_args()
    with running(serve_command(options.dtype)) as server:
        held = memory(server, PORT)
        fair = asyncio.run(fairness(PORT, options.seconds, options.rounds))
    found = {"dtype": options.dtype, "fairness": fair, "memory": held}
    tell("serve-beside", found, to_markdown, options.output)


if __name__ == "__main__":
    main()
