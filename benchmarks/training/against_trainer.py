"""`fastbert finetune` beside the Hugging Face Trainer: the same task, weights, hyper-parameters and seeds, in turn.

    python benchmarks/training/against_trainer.py sst2 --train train.tsv --eval test.tsv dev.tsv --epochs 1
    python benchmarks/training/against_trainer.py stsb --train train.tsv --eval dev.tsv --epochs 4

Both train all-MiniLM-L6-v2 with 32 examples a step, bfloat16 autocast, fused AdamW (weight decay 0.01), 10 % warm-up
and a linear schedule. Both saved models are judged by the same code, in float32, on each --eval file. `--max-steps 100`
compares times only. Each run is a process of its own, which measures the ceiling of the matrix products first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fastbert.bench import ceiling
from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine

METRICS = {"sst2": "accuracy", "stsb": "spearman"}
CONTESTANTS = ("transformers", "fastbert")
BATCH, LENGTH = 32, 128


def train_theirs(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The Trainer, with batches padded to their longest; seconds are those of `train()`."""
    import datasets
    import transformers

    from fastbert.hub import resolve

    model_folder = str(resolve("all-MiniLM-L6-v2"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    data = datasets.load_dataset("csv", data_files=args.train, sep="\t", quoting=3, split="train")
    texts, label = (("sentence",), "label") if args.task == "sst2" else (("sentence1", "sentence2"), "score")
    data = data.map(
        lambda rows: tokenizer(*(rows[name] for name in texts), truncation=True, max_length=LENGTH), batched=True
    )
    data = data.rename_column(label, "labels")
    transformers.set_seed(args.seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        model_folder, num_labels=2 if args.task == "sst2" else 1
    )
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        learning_rate=5e-5,
        num_train_epochs=args.epochs,
        max_steps=args.max_steps or -1,
        bf16=True,
        use_cpu=True,
        optim="adamw_torch_fused",
        lr_scheduler_type="linear",
        warmup_steps=0.1,
        weight_decay=0.01,
        seed=args.seed,
        save_strategy="no",
        logging_steps=100,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    trainer.save_model(f"{folder}/run")
    return {"seconds": seconds, "steps": trainer.state.global_step}


def train_ours(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """`fastbert finetune`; seconds are those of the loop: reading files and saving do not count, as above."""
    from fastbert.training.finetuning import make_task
    from fastbert.training.options import FinetuneOptions
    from fastbert.training.run import execute

    options = FinetuneOptions(
        model="all-MiniLM-L6-v2",
        train=(args.train,),
        batch_size=BATCH,
        epochs=args.epochs,
        steps=args.max_steps,
        max_length=LENGTH,
        learning_rate=5e-5,
        seed=args.seed,
        output=f"{folder}/run",
        save_every=10**6,
    )
    found = execute(options, make_task)
    return {"seconds": found["seconds"], "steps": found["steps"]}


def judge(args: argparse.Namespace, folder: str) -> list[float]:
    """The metric of a saved model on each evaluation file."""
    import csv

    import transformers
    from scipy.stats import spearmanr

    import fastbert

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = fastbert.accelerate(transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval())
    columns = ("sentence",) if args.task == "sst2" else ("sentence1", "sentence2")
    scores = []
    for path in args.eval:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        rows.sort(key=lambda row: sum(len(row[name]) for name in columns))
        found = []
        for start in range(0, len(rows), 64):
            texts = [[row[name] for row in rows[start : start + 64]] for name in columns]
            batch = tokenizer(*texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
            with torch.inference_mode():
                found.append(model(**batch).logits)
        logits = torch.cat(found)
        if args.task == "sst2":
            pairs = zip(rows, logits.argmax(-1).tolist(), strict=True)
            scores.append(statistics.fmean(int(row["label"]) == label for row, label in pairs))
        else:
            scores.append(float(spearmanr(logits[:, 0].tolist(), [float(row["score"]) for row in rows])[0]))
    return scores


def run(args: argparse.Namespace, contestant: str, seed: int) -> dict[str, Any]:
    given = [args.task, "--train", args.train, "--eval", *args.eval, "--epochs", str(args.epochs)]
    given += ["--max-steps", str(args.max_steps), "--contestant", contestant, "--seed", str(seed)]
    done = subprocess.run([sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"seed {seed}, {contestant}: {found}", file=sys.stderr, flush=True)
    return found


def to_markdown(report: dict[str, Any]) -> str:
    machine, metric, runs = report["machine"], METRICS[report["task"]], report["runs"]
    ceilings = [r["ceiling_gflops"] for found in runs.values() for r in found]
    lines = [
        f"{report['task']}, {report['steps']} steps of {BATCH} examples from all-MiniLM-L6-v2, bfloat16 autocast;"
        f" {machine['cpu']}, {report['threads']} threads, torch {machine['torch']}, commit {machine['commit']},"
        f" {machine['date']}. Ceiling before each run: {min(ceilings):.0f} to {max(ceilings):.0f} GFLOP/s.",
        "",
        f"| | {metric}, by seed | mean | seconds, by run | median |",
        "|---|--:|--:|--:|--:|",
    ]
    for i, path in enumerate(report["eval"] if "scores" in runs["fastbert"][0] else [""]):
        for name, found in runs.items():
            scores = [100 * r["scores"][i] for r in found] if path else []
            shown = ", ".join(f"{score:.2f}" for score in scores) or "-"
            mean = f"{statistics.fmean(scores):.2f}" if scores else "-"
            seconds = [r["seconds"] for r in found]
            times = ", ".join(f"{s:.0f}" for s in seconds)
            shown_name = f"{name}, {path}" if path else name
            lines.append(f"| {shown_name} | {shown} | {mean} | {times} | {statistics.median(seconds):.0f} |")
    medians = [statistics.median(r["seconds"] for r in found) for found in runs.values()]
    return "\n".join([*lines, "", f"fastbert takes 1/{medians[0] / medians[1]:.2f} of the time."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=METRICS)
    parser.add_argument("--train", required=True)
    parser.add_argument("--eval", required=True, nargs="+")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for trainer-TASK.json and trainer-TASK.md")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        with tempfile.TemporaryDirectory() as folder:
            best = max(statistics.fmean(ceiling.rates(ceiling.gemms("bfloat16"), 0.2)) for _ in range(5))
            train = train_theirs if args.contestant == "transformers" else train_ours
            found = {"ceiling_gflops": best} | train(args, folder)
            if not args.max_steps:
                found["scores"] = judge(args, f"{folder}/run")
            print(json.dumps(found))
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    for seed in range(args.seeds):
        for name in CONTESTANTS if seed % 2 == 0 else reversed(CONTESTANTS):
            runs[name].append(run(args, name, seed))
    report = {
        "task": args.task,
        "machine": describe_machine(),
        "threads": torch.get_num_threads(),
        "steps": runs["fastbert"][0]["steps"],
        "eval": [Path(path).name for path in args.eval],
        "runs": runs,
    }
    print(to_markdown(report))
    if args.output:
        name = f"trainer-{args.task}" + ("-times" if args.max_steps else "")
        write_report(args.output, name, report, to_markdown(report))


if __name__ == "__main__":
    main()
