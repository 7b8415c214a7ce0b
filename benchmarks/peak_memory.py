"""Memory that a call takes beside weights, gradients and the optimizer's state: `python benchmarks/peak_memory.py`.

A process for each contestant, batch and mode. What counts is the highest resident memory, less what was resident before
the model was built, less the bytes of its parameters, and in training as many again for their gradients and twice as
many for AdamW's moments. Packed copies of weights count, as do buffers that a library keeps; since the copies are
weights, too, and do not grow with a batch, the table says what is left without them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine, peak_memory
from fastbert.testing.cases import MODELS

CONTESTANTS = ("transformers", "fastbert")
MODES = ("float32", "bfloat16", "training float32", "training autocast")
BATCHES = {"4x512": (4, 512), "8x128": (8, 128)}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_peak() -> None:
    """Of what has been built and converted by now, which is no call's (Linux, proc(5))."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def packed() -> int:
    """Bytes of the packed copies of weights; of transformers' model there are none."""
    from fastbert import _C

    return _C.packed_bytes()


def measure(model_name: str, contestant: str, mode: str, batch: str, threads: int) -> dict[str, int]:
    """In a process of its own."""
    import transformers

    import fastbert
    from fastbert.models.auto import model_class

    torch.set_num_threads(threads)
    fields = dict(MODELS[model_name])
    model_type = fields.pop("model_type", "bert")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    ids = torch.randint(5, 1000, BATCHES[batch])
    torch.zeros(2, 3) @ torch.zeros(3, 2)  # the libraries of products are loaded
    trains, before = mode.startswith("training"), resident()
    if contestant == "transformers":
        model = transformers.AutoModel.from_config(config)
    else:
        model = model_class(model_type, "Model")(fastbert.EncoderConfig.from_dict(config.to_dict()))
    model = model.train() if trains else model.to(getattr(torch, mode)).eval()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    forget_peak()
    if not trains:
        for _ in range(2):
            with torch.inference_mode():
                model(input_ids=ids)
        return {"above": peak_memory() - before - held, "parameters": held, "packed": packed()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode.endswith("autocast")):
            loss = model(input_ids=ids).last_hidden_state.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"above": peak_memory() - before - 4 * held, "parameters": held, "packed": packed()}


def to_markdown(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"{report['model']}: MB of resident memory beside weights, gradients and AdamW's moments, at the highest;"
        f" {machine['cpu']}, {report['threads']} threads, torch {machine['torch']}, commit {machine['commit']},"
        f" {machine['date']}.",
        "",
        "| | batch | transformers | fastbert | ratio | of it packed copies | ratio without these |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for mode, batches in report["rows"].items():
        for batch, row in batches.items():
            theirs, ours = (row[name]["above"] for name in CONTESTANTS)
            copies = row["fastbert"]["packed"]
            figures = (f"{theirs / 1e6:,.0f}", f"{ours / 1e6:,.0f}", f"{ours / theirs:.2f}")
            without = (f"{copies / 1e6:,.0f}", f"{(ours - copies) / theirs:.2f}")
            lines.append(f"| {' | '.join((mode, batch, *figures, *without))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deberta-v3-base", choices=sorted(MODELS))
    parser.add_argument("--batches", nargs="+", default=tuple(BATCHES), choices=tuple(BATCHES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="a folder for peak-memory.json and peak-memory.md")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.model, *options.measure, options.threads)))
        return
    rows: dict[str, Any] = {}
    for mode in MODES:
        for batch in options.batches:
            row = rows.setdefault(mode, {}).setdefault(batch, {})
            for name in CONTESTANTS:
                given = ["--model", options.model, "--threads", str(options.threads), "--measure", name, mode, batch]
                done = subprocess.run([sys.executable, __file__, *given], check=True, capture_output=True, text=True)
                row[name] = json.loads(done.stdout.splitlines()[-1])
            print(mode, batch, row, flush=True)
    report = {"machine": describe_machine(), "model": options.model, "threads": options.threads, "rows": rows}
    print(to_markdown(report))
    if options.output is not None:
        write_report(options.output, "peak-memory", report, to_markdown(report))


if __name__ == "__main__":
    main()
