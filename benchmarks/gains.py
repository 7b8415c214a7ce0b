"""What `accelerate` gains over the same model as it was, for each instruction set and dtype of this machine.

    python benchmarks/gains.py --output benchmarks/results/MACHINE

Shapes of published models with random weights and fewer layers, inference and a training step, plain and accelerated in
turn: ratios of medians. A process for each instruction set; torch and oneDNN are held to the same one. int8 is our
quantised model beside the plain one in float32. No row should be below 1: who accelerates a model never loses.
A second table has our own times beside float32's.
Then how far the vectors of two instruction sets are from each other, since a model may move to another machine.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

MODELS = {
    "MiniLM": ("bert", {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}),
    "BERT-base, 3 layers": ("bert", {"num_hidden_layers": 3}),
    "ModernBERT-base, 4 layers": ("modernbert", {"num_hidden_layers": 4}),
}
SHAPES = {"1x16": [16], "1x128": [128], "8x128": [128] * 8, "4x512": [512] * 4}
SHAPES["ragged"] = [12, 31, 55, 7, 90, 44, 167, 23, 61, 18, 102, 36, 5, 73, 49, 28]
TRAINED = "8x128"
SLOW_S = 8.0  # of both models together: after so long no further round, as bfloat16 is slow without its instructions
# What holds torch, oneDNN and MKL to an instruction set of ours.
HELD = {
    "generic": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx_vnni": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx512_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}


# What has instructions of its own for int8 alone, and where its other kernels come from.
FOR_INT8 = {"avx_vnni": "avx2", "avx512_vnni": "avx512"}


def batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    mask = torch.tensor([[i < n for i in range(longest)] for n in lengths]).long()
    return {"input_ids": torch.randint(5, 30000, mask.shape) * mask, "attention_mask": mask}


def infer(model, inputs):
    with torch.inference_mode():
        model(**inputs)


def train(model, inputs):
    model(**inputs).last_hidden_state.square().mean().backward()
    for p in model.parameters():
        p.grad = None


def write_models(folder: Path) -> None:
    """One set of weights for all processes: torch draws other ones for other instruction sets."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    for name, (kind, sizes) in MODELS.items():
        AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(folder / name)


def measure(dtype: str, rounds: int, folder: Path) -> list[dict]:
    """The rows of one dtype; the accelerated models' vectors of one batch go to a file."""
    from transformers import AutoModel

    import fastbert

    rows, found = [], {}
    for name in MODELS:
        torch.manual_seed(0)
        held = torch.float32 if dtype == "int8" else getattr(torch, dtype)
        plain = AutoModel.from_pretrained(folder / name, dtype=held).eval()
        fast = fastbert.accelerate(copy.deepcopy(plain))
        if dtype == "int8":
            fastbert.quantize(fast)
        with torch.inference_mode():
            found[name] = fast(**batch(SHAPES["ragged"])).last_hidden_state[:, 0].float()
        works = [(shape, infer) for shape in SHAPES] + [(TRAINED, train)] * (dtype != "int8")
        for shape, work in works:
            inputs, times = batch(SHAPES[shape]), ([], [])
            started = time.perf_counter()
            for i in range(rounds + 1):
                if i > 1 and time.perf_counter() - started > SLOW_S:
                    break
                for model, taken in zip((plain, fast), times, strict=True):
                    model.train(work is train)
                    start = time.perf_counter()
                    work(model, inputs)
                    taken.append(time.perf_counter() - start)
            before, now = (statistics.median(taken[1:]) for taken in times)
            label = "training step" if work is train else shape
            rows.append({"model": name, "dtype": dtype, "shape": label, "ms": 1e3 * now, "gain": before / now})
            print(f"{name} {dtype} {label}: {before / now:.2f}", file=sys.stderr, flush=True)
    torch.save(found, folder / "vectors.pt")
    return rows


def table(isa: str, rows: list[dict]) -> str:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines = ["| model | dtype | " + " | ".join(shapes) + " |", "|---|---|" + "--:|" * len(shapes)]
    for model, dtype in dict.fromkeys((row["model"], row["dtype"]) for row in rows):
        found = {row["shape"]: row["gain"] for row in rows if (row["model"], row["dtype"]) == (model, dtype)}
        cells = (f"{found[shape]:.2f}" if shape in found else "-" for shape in shapes)
        lines.append(f"| {model} | {dtype} | " + " | ".join(cells) + " |")
    return f"## {isa}\n\n" + "\n".join(lines) + "\n"


def beside_float32(results: dict[str, list[dict]]) -> str:
    """A table of how many times as fast as float32 our other dtypes are: the lowest and the highest of the shapes."""
    times = {
        (isa, *(row[key] for key in ("model", "dtype", "shape"))): row["ms"] for isa in results for row in results[isa]
    }
    lines = ["| | dtype | " + " | ".join(MODELS) + " |", "|---|---|" + "--:|" * len(MODELS)]
    for isa, dtype in dict.fromkeys(key[::2] for key in times if key[2] != "float32"):
        cells = []
        for name in MODELS:
            pairs = [
                (times.get((FOR_INT8.get(isa, isa), name, "float32", s)), times[isa, name, dtype, s]) for s in SHAPES
            ]
            ratios = [one / other for one, other in pairs if one is not None]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-")
        lines.append(f"| {isa} | {dtype} | " + " | ".join(cells) + " |")
    return "## Times our float32 with the same instruction set\n\n" + "\n".join(lines) + "\n"


def apart(vectors: dict[tuple[str, str], dict[str, torch.Tensor]]) -> str:
    """A table of the largest differences between any two instruction sets, of numbers of size 1."""
    lines = ["| between | dtype | " + " | ".join(MODELS) + " |", "|---|---|" + "--:|" * len(MODELS)]
    isas, dtypes = (list(dict.fromkeys(key[i] for key in vectors)) for i in (0, 1))
    for a, b in itertools.combinations(isas, 2):
        for dtype in (each for each in dtypes if (a, each) in vectors and (b, each) in vectors):
            cells = []
            for name in MODELS:
                one, other = vectors[a, dtype][name], vectors[b, dtype][name]
                cosine = torch.cosine_similarity(one.double(), other.double()).min()
                cells.append(f"{(one - other).abs().max():.1e} (1 - cosine {1 - cosine:.0e})")
            lines.append(f"| {a}, {b} | {dtype} | " + " | ".join(cells) + " |")
    return "## Largest difference between instruction sets\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isas", default="", help="by commas; default: all that this machine has")
    parser.add_argument("--dtypes", default="float32,bfloat16,int8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # one dtype, in a process of its own
    options = parser.parse_args()
    if options.measure:
        dtype, path = options.measure
        print(json.dumps(measure(dtype, options.rounds, Path(path))))
        return
    from fastbert import _C
    from fastbert.bench.report import where, write_report
    from fastbert.bench.timing import describe_machine

    results, vectors = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        for isa in options.isas.split(",") if options.isas else _C.isas():
            results[isa] = []
            for dtype in ("int8",) if isa in FOR_INT8 else options.dtypes.split(","):
                words = [sys.executable, __file__, "--rounds", str(options.rounds), "--measure", dtype, folder]
                environment = {**os.environ, **HELD.get(isa, {}), "FASTBERT_ISA": isa}
                done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                vectors[isa, dtype] = torch.load(Path(folder) / "vectors.pt")
                results[isa] += json.loads(done.stdout)
    machine = {**describe_machine(), "packages": {"transformers": version("transformers")}}
    head = "# What accelerate gains\n\nTimes transformers' model as it was, medians of "
    head += f"{options.rounds} rounds in turn. int8 is beside float32. {where(machine)}\n\n"
    text = head + "\n".join(
        [*(table(isa, rows) for isa, rows in results.items()), beside_float32(results), apart(vectors)]
    )
    print(text)
    if options.output:
        write_report(options.output, "gains", {"machine": machine, "rows": results}, text)


if __name__ == "__main__":
    main()
