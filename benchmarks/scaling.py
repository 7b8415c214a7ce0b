"""What many GPUs would make of a run: a cost model of DDP and FSDP2, its tables and chart in docs/scaling.md.

`python benchmarks/scaling.py` writes the page's tables and chart. `--measure FILE` times gloo and DDP steps of 1, 2 and
4 ranks on this machine, which the model is checked with. All assumptions are constants here, with their sources there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.data.batches import cost, deal

ROOT = Path(__file__).resolve().parents[1]
PAGE, CHART = ROOT / "docs/scaling.md", ROOT / "docs/scaling.png"
MEASURED = ROOT / "benchmarks/results/amd-epyc-2-cores/scaling.json"
SECTION = r"(<!-- {}: written by benchmarks/scaling.py -->\n).*?(<!-- end -->)"
COUNTS = (8, 16, 64, 256, 1024)
BUCKET = 25 * 2**20  # bytes that DDP adds up at a time, torch's default
BACKWARD = 2 / 3  # of a step's operations
OPTIMIZER_BYTES = 28  # that AdamW reads and writes for a weight: weight, gradient and two moments
GPU_HOUR = 2.5  # dollars


@dataclass(frozen=True)
class Network:
    """Links as NCCL uses them, bytes/s and seconds, of a node with `gpus` GPUs."""

    name: str
    gpus: int = 8
    local: float = 370e9  # bus bandwidth of a ring over NVLink
    nodes: float = 8 * 47e9  # all of a node's adapters
    local_latency: float = 2e-6  # of a hop
    far_latency: float = 9.5e-6
    taken: float = 0.1  # of the GPU, while NCCL's kernels run
    memory: float = 3e12  # of the GPU

    def bandwidth(self, count: int) -> float:
        return self.local if count <= self.gpus else min(self.local, self.nodes)

    def all_reduce(self, size: float, count: int) -> float:
        """A tree for the latency, a ring for the bandwidth (NCCL's trees have nearly that)."""
        nodes = -(-count // self.gpus)
        hops = min(count, self.gpus) - 1
        latency = 2 * (hops * self.local_latency + math.ceil(math.log2(nodes)) * self.far_latency)
        return latency + 2 * (count - 1) / count * size / self.bandwidth(count)

    def half(self, size: float, count: int) -> float:
        """All-gather or reduce-scatter, on a ring: all hops one after the other."""
        nodes = -(-count // self.gpus)
        latency = (count - nodes) * self.local_latency + (nodes - 1) * self.far_latency
        return latency + (count - 1) / count * size / self.bandwidth(count)


@dataclass(frozen=True)
class Shape:
    """A model: weights in all, those of a layer, and the tokens/s of one GPU that trains it."""

    name: str
    layers: int
    hidden: int
    rate: float
    vocabulary: int = 30522

    @property
    def layer(self) -> float:
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def weights(self) -> float:
        """With 512 positions and the head of a masked language model, whose table is the embeddings'."""
        return self.layers * self.layer + (self.vocabulary + 512 + 6) * self.hidden + self.hidden**2 + self.vocabulary


DENSE = Network("a 400 Gb/s adapter a GPU")
SPARSE = Network("one 400 Gb/s adapter a node", nodes=47e9)
BASE, LARGE = Shape("BERT-base", 12, 768, 0.87e6), Shape("BERT-large", 24, 1024, 0.25e6)


def ddp(shape: Shape, tokens: float, count: int, network: Network) -> float:
    """Seconds of a step with so many tokens a GPU: float32 gradients are added up, bucket by bucket, in backward."""
    compute = tokens / shape.rate
    backward, size = compute * BACKWARD, 4 * shape.weights
    buckets = math.ceil(size / BUCKET)
    one = network.all_reduce(size / buckets, count)
    backward += network.taken * min(backward, buckets * one)
    done = 0.0
    for i in range(buckets):
        done = max(done, (i + 1) / buckets * backward) + one
    return compute * (1 - BACKWARD) + done + OPTIMIZER_BYTES * shape.weights / network.memory


def fsdp(shape: Shape, tokens: float, count: int, network: Network) -> float:
    """FSDP2 in bf16: a layer's weights are gathered before its forward and its backward, one layer ahead, and its
    float32 gradients are scattered behind it. The embeddings and the head are one more unit, gathered once.
    """
    units = [shape.weights - shape.layers * shape.layer] + [shape.layer] * shape.layers
    compute = tokens / shape.rate
    busy = sum(2 * network.half(2 * unit, count) + network.half(4 * unit, count) for unit in units)
    compute += network.taken * min(compute, busy)
    forward = [compute * (1 - BACKWARD) / shape.layers] * shape.layers
    backward = [compute * BACKWARD / shape.layers] * shape.layers
    link = now = network.half(2 * units[0], count)  # the first unit: nothing hides it
    before = 0.0
    for unit, seconds in zip(units[1:], forward, strict=True):
        link = max(link, before) + network.half(2 * unit, count)
        before = max(now, link)
        now = before + seconds
    gathered = now  # the last layer's weights are still there
    for i, (unit, seconds) in enumerate(zip(units[1:], backward, strict=True)):
        start = max(now, gathered)
        now = start + seconds
        if i + 1 < shape.layers:
            link = gathered = max(link, start) + network.half(2 * unit, count)
        link = max(link, now) + network.half(4 * unit, count)
    now = max(now, link) + network.half(4 * units[0], count)
    return now + OPTIMIZER_BYTES * shape.weights / count / network.memory


def balance(count: int, tokens: int, hidden: int) -> float:
    """The mean cost of a rank by that of the dearest, of batches dealt by fastbert: log-normal lengths, up to 512."""
    draws = np.random.default_rng(0).lognormal(4.1, 0.8, round(count * tokens / 81))
    costs = cost(np.clip(draws.astype(np.int64), 3, 512), hidden)
    sums = np.array([costs[part].sum() for part in deal(costs, count)])
    return float(sums.mean() / sums.max())


def efficiency(shape: Shape, tokens: float, count: int, network: Network, how: Any = ddp) -> float:
    """The share of `count` times one GPU's tokens/s."""
    ideal = tokens / shape.rate + OPTIMIZER_BYTES * shape.weights / network.memory
    return ideal / how(shape, tokens, count, network)


def efficiencies() -> str:
    lines = [
        "| model, tokens a GPU and step | ranks share by, network | " + " | ".join(f"{n}" for n in COUNTS) + " |",
        "|---|---|" + "--:|" * len(COUNTS),
    ]
    for shape in (BASE, LARGE):
        for tokens in (65536, 16384, 4096):
            for how, network in ((ddp, DENSE), (fsdp, DENSE), (ddp, SPARSE), (fsdp, SPARSE)):
                row = [f"{100 * efficiency(shape, tokens, n, network, how):.0f} %" for n in COUNTS]
                lines.append(
                    f"| {shape.name}, {tokens:,} | {how.__name__.upper()}, {network.name} | {' | '.join(row)} |"
                )
    return "\n".join(lines)


# Tokens of a run, and of one of its steps.
RUNS = (
    ("MosaicBERT-base to 79.6 GLUE", BASE, 3.6e9, 4096 * 128),
    ("MosaicBERT-base, all of it (83.2)", BASE, 36.7e9, 4096 * 128),
    ("BERT-large, as in its paper, without padding", LARGE, 42.6e9, 32768 * 128),
    ("RoBERTa-large", LARGE, 2.1e12, 8192 * 512),
)


def runs() -> str:
    """Wall time with DDP and an adapter a GPU."""
    lines = [
        "| run | tokens | a step | " + " | ".join(f"{n} GPUs" for n in COUNTS[:1] + COUNTS[2:]) + " |",
        "|---|--:|--:|" + "--:|" * (len(COUNTS) - 1),
    ]
    for name, shape, total, step in RUNS:
        row = []
        for count in COUNTS[:1] + COUNTS[2:]:
            seconds = total / step * ddp(shape, step / count, count, DENSE)
            row.append(f"{duration(seconds)}, ${count * seconds / 3600 * GPU_HOUR:,.0f}")
        lines.append(f"| {name} | {total / 1e9:,.1f} G | {step / 1e6:.1f} M | {' | '.join(row)} |")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def balances() -> str:
    lines = ["| tokens a GPU and step | " + " | ".join(map(str, COUNTS)) + " |", "|---|" + "--:|" * len(COUNTS)]
    for tokens in (4096, 1024):
        row = [f"{100 * (1 / balance(n, tokens, 768) - 1):.1f} %" for n in COUNTS]
        lines.append(f"| {tokens:,} | {' | '.join(row)} |")
    return "\n".join(lines)


# NVIDIA's BERT-large in fp16 on DGX-2H (16 V100, 8 adapters of 100 Gb/s): sequences/s by nodes, with the seconds of a
# step that one node's rate and a GPU's sequences in a step give. Gradients in fp16 are added up behind the last
# backward of a step, so nothing hides them.
DGX_2H = Network("DGX-2H", gpus=16, local=130e9, nodes=8 * 11.5e9)
PUBLISHED = {
    "128 tokens": ({1: 3379.2, 4: 12709.88, 16: 51937.28, 64: 188088.32}, {4: 1024, 16: 256, 64: 64}),
    "512 tokens": ({1: 625.66, 4: 2386.38, 16: 9932.8, 64: 37478.4}, {4: 512, 16: 128, 64: 32}),
}


def published() -> str:
    lines = ["| length | nodes | predicted | published |", "|---|--:|--:|--:|"]
    for length, (rates, sequences) in PUBLISHED.items():
        for nodes, of_gpu in sequences.items():
            compute = of_gpu / (rates[1] / 16)
            predicted = compute / (compute + DGX_2H.all_reduce(2 * LARGE.weights, 16 * nodes))
            seen = rates[nodes] / rates[1] / nodes
            lines.append(f"| {length} | {nodes} | {100 * predicted:.1f} % | {100 * seen:.1f} % |")
    return "\n".join(lines)


def measured(report: dict[str, Any]) -> str:
    lines = ["| ranks | step alone | gloo | predicted | seen | seen by predicted |", "|--:|--:|--:|--:|--:|--:|"]
    for row in report["rows"]:
        times = [f"{1e3 * row[name]:.0f} ms" for name in ("alone", "gloo", "predicted", "seen")]
        lines.append(f"| {row['ranks']} | {' | '.join(times)} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def write_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        text = re.sub(SECTION.format(name), lambda m, table=table: m[1] + table + "\n" + m[2], text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")
    draw(CHART)


def tables() -> dict[str, str]:
    """What is between the page's marks."""
    report = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {
        "efficiency": efficiencies(),
        "runs": runs(),
        "balance": balances(),
        "published": published(),
        "measured": measured(report),
    }


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    counts = [8 * 2**i for i in range(8)]
    ways = ((ddp, "#0072B2"), (fsdp, "#E69F00"))
    for axis, shape in zip(axes, (BASE, LARGE), strict=True):
        for network, (how, colour) in itertools.product((DENSE, SPARSE), ways):
            style = "-" if network is DENSE else ":"
            values = [100 * efficiency(shape, 16384, n, network, how) for n in counts]
            axis.plot(counts, values, style, color=colour, label=f"{how.__name__.upper()}, {network.name}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.set(title=f"{shape.name}, 16,384 tokens a GPU and step", xlabel="GPUs", ylim=(0, 105))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("predicted share of one GPU's tokens/s, %")
    axes[0].legend(loc="lower left")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def measure(rounds: int) -> dict[str, Any]:
    """Steps of MiniLM's shape on 1, 2 and 4 ranks of one thread, and gloo alone, in turn."""
    import tempfile

    import torch.multiprocessing as mp

    from fastbert.bench.timing import describe_machine

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure_rank, (folder, rounds), nprocs=4)
        found = json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))
    rows = []
    cores = found["cores"]
    for ranks in (1, 2, 4):
        alone = statistics.median(found["step-1"]) * max(1.0, ranks / cores)
        gloo = statistics.median(found[f"gloo-{ranks}"]) if ranks > 1 else 0.0
        seen = statistics.median(found[f"step-{ranks}"])
        ratios = [
            step / (one * max(1.0, ranks / cores) + (link if ranks > 1 else 0.0))
            for step, one, link in zip(found[f"step-{ranks}"], found["step-1"], found[f"gloo-{ranks}"], strict=True)
        ]
        rows.append(
            {
                "ranks": ranks,
                "alone": alone,
                "gloo": gloo,
                "predicted": alone + gloo,
                "seen": seen,
                "ratio": statistics.median(ratios),
            }
        )
    return {"machine": describe_machine(), "rounds": rounds, "bytes": found["bytes"], "rows": rows}


def _measure_rank(rank: int, folder: str, rounds: int) -> None:
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import fastbert

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 4), rank=rank, world_size=4)
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (1, 2, 4)}
    config = fastbert.EncoderConfig(
        vocab_size=8192, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    model = fastbert.BertForMaskedLM(config).train()
    ids = torch.randint(1000, 8000, (4, 128))
    wrapped = {1: model} | {n: DistributedDataParallel(model, process_group=groups[n]) for n in (2, 4) if rank < n}
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()))
    found: dict[str, list[float]] = {f"{what}-{n}": [] for what in ("step", "gloo") for n in (1, 2, 4)}
    for turn in range(rounds + 1):
        for ranks in (1, 2, 4):
            for what in ("step", "gloo"):
                dist.barrier()
                if rank >= ranks:
                    continue
                start = time.perf_counter()
                if what == "gloo":
                    for piece in gradients.split(BUCKET // 4):
                        dist.all_reduce(piece, group=groups[ranks])
                else:
                    wrapped[ranks](ids, labels=ids).loss.backward()
                    model.zero_grad(set_to_none=False)
                dist.barrier(group=groups[ranks])
                if turn:  # the first one warms up
                    found[f"{what}-{ranks}"].append(time.perf_counter() - start)
    if rank == 0:
        sizes = {"bytes": 4 * gradients.numel(), "cores": len(os.sched_getaffinity(0))}
        (Path(folder) / "times.json").write_text(json.dumps(found | sizes), encoding="utf-8")
    wrapped.clear()  # or the last DDP ends the group, with the GIL, for which the group's threads may wait
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=Path, metavar="FILE", help="time gloo and DDP here, and write FILE")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.measure:
        options.measure.write_text(json.dumps(measure(options.rounds), indent=1) + "\n", encoding="utf-8")
    else:
        write_page()


if __name__ == "__main__":
    main()
