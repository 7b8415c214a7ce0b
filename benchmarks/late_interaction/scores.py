"""Scores of late interaction beside torch, sentence-transformers and maxsim-cpu: rates, and a training step's memory.

    pip install sentence-transformers==6.2.0 maxsim-cpu==0.1.0
    python benchmarks/late_interaction/scores.py --output benchmarks/results/<machine>

Search: 32 tokens of a query beside documents of 30 to 512 tokens, of which 100 fit into a cache. Training: 64 queries
of 32 tokens beside 64 documents, all with all, forward and backward. Contestants take turns in one process, each with
the form of vectors that it likes best, made before. torch has the faster of two loops, over chunks of 65,536 tokens:
products of all of a chunk's tokens and torch.segment_reduce; and texts sorted by length, padded, einsum, max, sum.
Memory is the highest resident memory of a process of its own, less that before the step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fastbert import ops
from fastbert.bench.ceiling import gemms, rates
from fastbert.bench.report import where, write_report
from fastbert.bench.timing import Timing, describe_machine, measure_once

QUERY, SHORTEST, LONGEST, CHUNK = 32, 30, 512, 65536
SEARCHES = [(documents, width) for documents in (100, 1000, 20000) for width in (96, 128)]
PEERS = ("sentence-transformers", "maxsim-cpu")
OURS = ("fastbert float32", "fastbert bfloat16", "fastbert int8")


def vectors(lengths: list[int], width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(sum(lengths), width, generator=generator), dim=-1)


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def lengths_of(documents: int) -> list[int]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(SHORTEST, LONGEST + 1, (documents,), generator=draw).tolist()


def chunks_of(lengths: list[int]) -> list[tuple[int, int]]:
    """Neighbours of at most CHUNK tokens."""
    cuts, total = [0], 0
    for i, n in enumerate(lengths):
        if total + n > CHUNK:
            cuts.append(i)
            total = 0
        total += n
    return list(zip(cuts, [*cuts[1:], len(lengths)], strict=True))


def search(documents: int, width: int) -> dict[str, Callable[[], Any]]:
    """What each contestant does of one query: its scores with all documents."""
    lengths = lengths_of(documents)
    rows, query = vectors(lengths, width), vectors([QUERY], width, 2)
    offsets, of_query = offsets_of(lengths), offsets_of([QUERY])
    halves, (whole, scales) = rows.bfloat16(), ops.in_int8(rows)
    calls: dict[str, Callable[[], Any]] = {
        OURS[0]: lambda: ops.maxsim(query, of_query, rows, offsets),
        OURS[1]: lambda: ops.maxsim(query.bfloat16(), of_query, halves, offsets),
        OURS[2]: lambda: ops.maxsim(query, of_query, whole, offsets, scales=scales),
    }
    cuts, counts = chunks_of(lengths), torch.tensor(lengths)

    def by_segments():
        parts = []
        for first, last in cuts:
            products = rows[offsets[first] : offsets[last]] @ query.T
            parts.append(torch.segment_reduce(products, "max", lengths=counts[first:last], axis=0).sum(1))
        return torch.cat(parts)

    order = sorted(range(documents), key=lengths.__getitem__)
    listed = list(rows.split(lengths))
    batches = []
    for first, last in chunks_of([lengths[i] for i in order]):
        some = [listed[i] for i in order[first:last]]
        padded = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        batches.append((padded, torch.arange(padded.shape[1]) >= torch.tensor([len(t) for t in some])[:, None]))
    back = torch.tensor(order).argsort()

    def by_padding():
        parts = []
        for padded, absent in batches:
            products = torch.einsum("qd,ntd->nqt", query, padded)
            parts.append(products.masked_fill_(absent[:, None], -torch.inf).amax(-1).sum(1))
        return torch.cat(parts)[back]

    calls |= {"torch, segments": by_segments, "torch, padded": by_padding}
    try:
        from sentence_transformers.util.similarity import maxsim

        calls["sentence-transformers"] = lambda: maxsim([query], listed)
    except ImportError:
        print("sentence-transformers is not installed")
    try:
        import maxsim_cpu

        arrays, of_it = [one.numpy() for one in listed], query.numpy()
        calls["maxsim-cpu"] = lambda: maxsim_cpu.maxsim_scores_variable(of_it, arrays)
    except ImportError:
        print("maxsim-cpu is not installed")
    expected = calls[OURS[0]]().flatten()
    for name, call in calls.items():
        found = torch.as_tensor(call()).flatten().float()
        close = 0.3 if "int8" in name or "bfloat16" in name else 1e-3
        assert torch.allclose(found, expected, atol=close), (name, (found - expected).abs().max())
    return calls


def training(width: int = 128, queries: int = 64) -> dict[str, Callable[[], Any]]:
    """A step's scores of all with all, and the gradients of both sides."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(60, 181, (queries,), generator=draw).tolist()
    q, d = vectors([QUERY] * queries, width), vectors(lengths, width, 2)
    q.requires_grad_(), d.requires_grad_()
    of_q, of_d = offsets_of([QUERY] * queries), offsets_of(lengths)
    padded = torch.nn.utils.rnn.pad_sequence(list(d.detach().split(lengths)), batch_first=True).requires_grad_()
    absent = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    grid = q.detach().view(queries, QUERY, width).clone().requires_grad_()

    def ours():
        ops.maxsim(q, of_q, d, of_d).square().sum().backward()

    def theirs():
        products = torch.einsum("qsd,ntd->qnst", grid, padded).masked_fill(absent[None, :, None], -torch.inf)
        products.amax(-1).sum(-1).square().sum().backward()

    calls = {"fastbert": ours, "torch": theirs}
    try:
        from sentence_transformers.util.similarity import maxsim

        real = (~absent).float()
        calls["sentence-transformers"] = lambda: maxsim(grid, padded, b_mask=real).square().sum().backward()
    except ImportError:
        pass
    return calls


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(measure_once(call, 0.3))
    return {name: Timing.of(each).to_dict() for name, each in seconds.items()}


def memory_of(name: str) -> int:
    """Bytes that a training step of 256 with 256 adds, in a process of its own."""
    code = (
        "import benchmarks.late_interaction.scores as b, sys\n"
        "from fastbert.bench.timing import peak_memory\n"
        "small = b.training(queries=4)[sys.argv[1]]; small()\n"
        "step = b.training(queries=256)[sys.argv[1]]; before = peak_memory(); step(); print(peak_memory() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def memory_rate() -> float:
    """GB/s of reading, by torch's sum of 512 MB."""
    x = torch.ones(1 << 27)
    return x.nbytes / min(measure_once(x.sum, 0.2) for _ in range(3)) / 1e9


def best_of(times: dict[str, Any], names: list[str]) -> str:
    return min(names, key=lambda name: times[name]["median"])


def to_markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Late interaction",
        "",
        f"{where(report['machine'])} {report['rounds']} rounds in turn. A query of"
        f" {QUERY} tokens, documents of {SHORTEST} to {LONGEST}. In brackets: times the best peer, which is the last"
        " column's, and for float32 the share of the best matrix product of this machine.",
        "",
        "| documents | width | " + " | ".join(OURS) + " | torch | sentence-transformers | maxsim-cpu | best peer |",
        "|--:|--:|" + "--:|" * 6 + "---|",
    ]
    for row in report["search"]:
        times, peers = row["times"], [name for name in row["times"] if name not in OURS]
        best, cells = best_of(times, peers), []
        for name in OURS:
            ratio = times[best]["median"] / times[name]["median"]
            share = f", {row['gflops'][name] / row['ceiling_gflops']:.0%}" if name == OURS[0] else ""
            cells.append(f"**{times[name]['median'] * 1e3:.1f} ms** ({ratio:.2f}{share})")
        torch_loop = best_of(times, [name for name in peers if name.startswith("torch")])
        for name in (torch_loop, "sentence-transformers", "maxsim-cpu"):
            cells.append(f"{times[name]['median'] * 1e3:.1f} ms" if name in times else "-")
        lines.append(f"| {row['documents']:,} | {row['width']} | {' | '.join(cells)} | {best} |")
    lines += [
        "",
        f"The best product has {report['search'][0]['ceiling_gflops']:.0f} GFLOP/s; memory is read at"
        f" {report['memory_gb_per_s']:.0f} GB/s.",
        "",
        "Training, forward and backward, 64 with 64; memory of 256 with 256:",
        "",
        "| | time | extra memory |",
        "|---|--:|--:|",
    ]
    for name, each in report["training"]["times"].items():
        size = report["training"]["bytes"][name] / 2**20
        lines.append(f"| {name} | {each['median'] * 1e3:.1f} ms | {size:,.0f} MiB |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    machine = describe_machine() | {"packages": {name: version(name) for name in PEERS}}
    report: dict[str, Any] = {"machine": machine, "rounds": options.rounds, "search": [], "training": {}}
    products = gemms("float32")
    for documents, width in SEARCHES:
        calls, operations = search(documents, width), 2 * QUERY * width * sum(lengths_of(documents))
        times = in_turn(calls, options.rounds)
        row = {"documents": documents, "width": width, "times": times}
        ceilings = zip(*[rates(products, 0.2) for _ in range(3)], strict=True)
        row["ceiling_gflops"] = max(statistics.median(each) for each in ceilings)
        row["gflops"] = {name: operations / each["median"] / 1e9 for name, each in times.items()}
        report["search"].append(row)
        print(documents, width, {name: round(rate) for name, rate in row["gflops"].items()}, flush=True)
        del calls
    report["memory_gb_per_s"] = memory_rate()
    calls = training()
    report["training"] = {"times": in_turn(calls, options.rounds), "bytes": {name: memory_of(name) for name in calls}}
    write_report(options.output, "late-interaction", report, to_markdown(report))
    print(to_markdown(report))


if __name__ == "__main__":
    main()
