"""Whole encoders side by side: `python benchmarks/run.py` prints a table and can write JSON and Markdown.

Every contestant runs in a process of its own (idle thread pools spin, and sharing a process halves the others), in
turn over several rounds, on the same weights and the same batch. Its output is checked against transformers in float64
before it gets any time. Rates are real tokens a second: padding does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from fastbert.testing.bench import Timing, describe_machine, measure_once
from fastbert.testing.cases import WORKLOADS, Workload
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

MODELS = {
    "bert-base": {},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
}
BASELINE = "transformers-sdpa"
CHECKED_SEQUENCES = 4  # float64 is slow: the outputs of the first few sequences are checked
CONTESTANTS = (BASELINE, "transformers-eager", "fastbert-torch", "fastbert")


def padded_batch(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask (batch, longest), padded on the right; the same for every contestant."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(workload.lengths)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return torch.randint(1000, 30000, mask.shape, generator=generator) * mask, mask


def build(contestant: str, model: str, dtype: torch.dtype):
    """A function (input_ids, attention_mask) -> last_hidden_state."""
    import transformers

    torch.manual_seed(0)
    attention = "sdpa" if contestant == "transformers-sdpa" else "eager"
    config = transformers.BertConfig(**MODELS[model], attn_implementation=attention)
    theirs = transformers.BertModel(config).to(dtype).eval()
    if contestant.startswith("transformers"):
        return lambda ids, mask: theirs(input_ids=ids, attention_mask=mask).last_hidden_state
    import fastbert
    from fastbert.backend import use_backend

    ours = fastbert.BertModel(fastbert.EncoderConfig.from_dict(config.to_dict())).to(dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    backend = "torch" if contestant == "fastbert-torch" else "auto"

    def call(ids, mask):
        with use_backend(backend):
            return ours(ids, mask).last_hidden_state

    return call


def work(contestant: str, model: str, dtype: torch.dtype, workload: Workload, reference: str) -> None:
    """A contestant's process: check, say "ready", then answer each line on stdin with one timing."""
    ids, mask = padded_batch(workload)
    # All tokens real: everyone may take the path without a mask.
    mask_argument = mask if int(mask.min()) == 0 else None
    call = build(contestant, model, dtype)
    with torch.inference_mode():
        out = call(ids, mask_argument)[:CHECKED_SEQUENCES][mask[:CHECKED_SEQUENCES].bool()]
        expected = torch.load(reference, weights_only=True)
        assert_close_to_reference(out, expected["oracle"], expected[str(dtype)], GRADIENT_FACTOR, contestant)
        call(ids, mask_argument)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(measure_once(lambda: call(ids, mask_argument), min_seconds=0.2), flush=True)


def write_reference(model: str, dtypes: list[torch.dtype], workload: Workload, path: str) -> None:
    ids, mask = (t[:CHECKED_SEQUENCES] for t in padded_batch(workload))
    results = {}
    with torch.inference_mode():
        for key, dtype in (("oracle", torch.float64), *((str(d), d) for d in dtypes)):
            results[key] = build("transformers-eager", model, dtype)(ids, mask)[mask.bool()]
    torch.save(results, path)


def compete(
    model: str, dtype_name: str, workload: Workload, contestants: list[str], rounds: int, restarts: int, reference: str
) -> dict:
    """{contestant: {tokens_per_second, ...} or {"error": ...}} of one workload in one dtype.

    Where a process's memory happens to lie moves its rate by 5 %: every contestant is started `restarts` times, and the
    medians are over the rounds of all starts.
    """
    command = [sys.executable, __file__, "--model", model, "--dtypes", dtype_name, "--workloads", workload.id]
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    errors: dict[str, str] = {}
    for _ in range(restarts):
        processes = {}
        for name in contestants:
            processes[name] = subprocess.Popen(
                [*command, "--worker", name, "--reference", reference],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            if processes[name].stdout.readline().strip() != "ready":
                errors[name] = processes.pop(name).communicate()[1].strip().splitlines()[-1]
        for _ in range(rounds):
            for name, process in processes.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                samples[name].append(float(process.stdout.readline()))
        for process in processes.values():
            process.communicate()
    results = {}
    for name in contestants:
        if name in errors:
            results[name] = {"error": errors[name]}
        else:
            timing = Timing.of(samples[name])
            results[name] = {"tokens_per_second": sum(workload.lengths) / timing.median, "timing": timing.to_dict()}
    return results


def to_markdown(report: dict) -> str:
    """Real tokens a second, and in brackets the ratio to transformers sdpa in the same run."""
    machine = report["machine"]
    lines = [
        f"{report['model']}, real tokens/s (ratio to {BASELINE} in the same run). {machine['cpu']},"
        f" {machine['threads']} threads, {machine['cpu_capability']}, torch {machine['torch']}, commit"
        f" {machine['commit']}, {machine['date']}.",
        "",
    ]
    workloads = list(dict.fromkeys(row["workload"] for row in report["rows"]))
    lines += ["| dtype | contestant | " + " | ".join(workloads) + " |", "|---|---|" + "--:|" * len(workloads)]
    for dtype in dict.fromkeys(row["dtype"] for row in report["rows"]):
        rows = {row["workload"]: row["results"] for row in report["rows"] if row["dtype"] == dtype}
        for name in report["contestants"]:
            cells = []
            for workload in workloads:
                result, base = rows[workload][name], rows[workload].get(BASELINE, {})
                if "error" in result:
                    cells.append("failed")
                elif "tokens_per_second" in base:
                    ratio = result["tokens_per_second"] / base["tokens_per_second"]
                    cells.append(f"{result['tokens_per_second']:,.0f} ({ratio:.2f}x)")
                else:
                    cells.append(f"{result['tokens_per_second']:,.0f}")
            lines.append(f"| {dtype} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bert-base", choices=MODELS)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--workloads", default="8x128,32-ragged", help=",".join(w.id for w in WORKLOADS))
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--restarts", type=int, default=1, help="processes per contestant, one after the other")
    parser.add_argument("--output", type=Path, help="folder for results.json and results.md")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--reference", help=argparse.SUPPRESS)
    args = parser.parse_args()
    workloads = [w for w in WORKLOADS if w.id in args.workloads.split(",")]
    dtypes = {name: getattr(torch, name) for name in args.dtypes.split(",")}
    if args.worker:
        work(args.worker, args.model, *dtypes.values(), *workloads, args.reference)
        return
    contestants = args.contestants.split(",")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for workload in workloads:
            reference = os.path.join(folder, f"{workload.id}.pt")
            write_reference(args.model, list(dtypes.values()), workload, reference)
            for name in dtypes:
                results = compete(args.model, name, workload, contestants, args.rounds, args.restarts, reference)
                rows.append({"workload": workload.id, "dtype": name, "results": results})
                print(
                    workload.id, name, {n: r.get("error") or round(r["tokens_per_second"]) for n, r in results.items()}
                )
    report = {"machine": describe_machine(), "model": args.model, "contestants": contestants, "rows": rows}
    print("\n" + to_markdown(report))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "results.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.output / "results.md").write_text(to_markdown(report) + "\n")


if __name__ == "__main__":
    main()
