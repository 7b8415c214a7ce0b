"""Sentence embeddings side by side: fastbert and sentence-transformers' trainer, same weights and data.

python benchmarks/training/embedding_training.py --data DATA prints a table, and can write it to a folder.

"stsb": CoSENT on the STS benchmark; Spearman on its dev set. "pairs": in-batch negatives over its pairs with a score of
4 and more; likewise. "banking": in-batch negatives over two sentences of one intent of banking77; how often the nearest
one among the test sentences has the same intent. --fresh gives the upper half of the layers new weights, so that there
is something to learn; else the real model goes on.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fastbert.bench import ceiling
from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine

TASKS = ("stsb", "pairs", "banking")


def write_data(task: str, data: Path, folder: Path, limit: int) -> dict[str, str]:
    """The files that both read: train.jsonl, eval.jsonl."""
    import random

    if task == "banking":
        draw, by_intent = random.Random(0), dict[str, list[str]]()
        with (data / "banking77/banking77_train.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                by_intent.setdefault(row["category"], []).append(row["text"])
        train = []
        for texts in by_intent.values():
            draw.shuffle(texts)
            train += [{"anchor": a, "positive": b} for a, b in zip(texts[::2], texts[1::2], strict=False)]
        draw.shuffle(train)
        with (data / "banking77/banking77_test.csv").open(encoding="utf-8", newline="") as file:
            held_out = [{"text": row["text"], "label": row["category"]} for row in csv.DictReader(file)]
    else:
        train, held_out = (_stsb(data / f"stsb/{part}.tsv") for part in ("train", "dev"))
        if task == "pairs":
            train = [{"anchor": r["sentence1"], "positive": r["sentence2"]} for r in train if r["score"] >= 4]
    train = train[:limit] if limit else train
    for name, rows in (("train", train), ("eval", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")}


def _stsb(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [{"sentence1": r["sentence1"], "sentence2": r["sentence2"], "score": float(r["score"])} for r in rows]


def write_model(name: str, fresh: bool, folder: Path) -> str:
    """The folder that both begin with."""
    import torch

    import fastbert

    encoder = fastbert.SentenceEncoder(name, dtype="float32", device="cpu")
    if fresh:
        torch.manual_seed(0)
        for path in encoder.model.config.layer_paths[len(encoder.model.config.layer_paths) // 2 :]:
            encoder.model.get_submodule(path).apply(encoder.model._init_weights)
    encoder.save_pretrained(folder)
    return str(folder)


def quality(folder: str, task: str, held_out: str) -> float:
    """Of a trained folder, by one and the same code for both."""
    import numpy as np

    import fastbert
    from fastbert.training.finetuning.embedding_metrics import spearman

    rows = [json.loads(line) for line in Path(held_out).read_text(encoding="utf-8").splitlines()]
    encoder = fastbert.SentenceEncoder(folder, device="cpu")
    if task == "banking":
        vectors = encoder.encode([row["text"] for row in rows], normalize_embeddings=True, convert_to_tensor=True)
        cosines = vectors @ vectors.T
        nearest = cosines.fill_diagonal_(-2).argmax(1).tolist()
        return float(np.mean([rows[i]["label"] == rows[j]["label"] for i, j in enumerate(nearest)]))
    texts = [row["sentence1"] for row in rows] + [row["sentence2"] for row in rows]
    vectors = encoder.encode(texts, convert_to_tensor=True)
    columns = [np.arange(len(rows)), np.arange(len(rows), 2 * len(rows))]
    return spearman(vectors, columns, np.array([row["score"] for row in rows]))


def train_ours(given: argparse.Namespace) -> float:
    begin = time.perf_counter()
    from fastbert.training.finetuning import make_task
    from fastbert.training.options import FinetuneOptions
    from fastbert.training.run import execute

    options = FinetuneOptions(
        task="embedding",
        model=given.start,
        train=(given.train,),
        output=given.output,
        seed=given.seed,
        epochs=given.epochs,
        batch_size=given.batch_size,
        learning_rate=given.lr,
        precision=given.precision,
        save_every=10**9,
        log_every=50,
        warmup=0.1,
        weight_decay=0.01,
        max_length=128,
    )
    execute(options, make_task)
    return time.perf_counter() - begin


def train_theirs(given: argparse.Namespace) -> float:
    begin = time.perf_counter()
    import datasets
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss

    model = SentenceTransformer(given.start, device="cpu")
    model.max_seq_length = 128
    rows = datasets.load_dataset("json", data_files=given.train, split="train")
    loss = CoSENTLoss(model) if "score" in rows.column_names else MultipleNegativesRankingLoss(model)
    steps = -(-len(rows) // given.batch_size) * given.epochs
    arguments = SentenceTransformerTrainingArguments(
        given.output,
        num_train_epochs=given.epochs,
        per_device_train_batch_size=given.batch_size,
        learning_rate=given.lr,
        weight_decay=0.01,
        warmup_steps=round(0.1 * steps),
        seed=given.seed,
        bf16=given.precision == "bf16",
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=50,
        disable_tqdm=True,
        optim="adamw_torch_fused",
    )
    SentenceTransformerTrainer(model, arguments, rows, loss=loss).train()
    model.save_pretrained(given.output)
    return time.perf_counter() - begin


def run(contestant: str, **given: Any) -> dict[str, float]:
    """A training in a process of its own: the ceiling of the matrix products measured, and then the `seconds` in which
    libraries are imported (but torch), files are read, and the model is loaded, trained and saved.
    """
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, __file__, "--contestant", contestant, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with stsb/ and banking77/")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--fresh", action="store_true", help="new weights in the upper half of the layers")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--limit", type=int, default=0, help="examples of the training data; 0: all")
    parser.add_argument("--report", type=Path, help="folder for embedding-training.json and .md")
    for name in ("contestant", "start", "train", "output"):  # of one training, in its own process
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        best = max(statistics.fmean(ceiling.rates(ceiling.gemms("bfloat16"), 0.2)) for _ in range(5))
        seconds = {"fastbert": train_ours, "sentence-transformers": train_theirs}[given.contestant](given)
        print(json.dumps({"ceiling_gflops": best, "seconds": seconds}))
        return

    of_one = ("data", "report", "contestant", "start", "train", "output", "seed")  # or of this machine's disk
    options = {name: str(value) for name, value in vars(given).items() if name not in of_one}
    report: dict[str, Any] = {"machine": describe_machine(), "options": options}
    report["rows"] = []
    for task in given.tasks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            files = write_data(task, given.data, root, given.limit)
            start = write_model(given.model, given.fresh, root / "start")
            row: dict[str, Any] = {"task": task, "before": quality(start, task, files["eval"]), "seconds": {}}
            row |= {"after": {}, "ceiling_gflops": []}
            for seed in map(int, given.seeds.split(",")):
                for name in ("fastbert", "sentence-transformers"):  # in turn, so that both meet the same machine
                    output = str(root / f"{name}-{seed}")
                    shared = {"epochs": given.epochs, "batch_size": given.batch_size, "lr": given.lr}
                    found = run(
                        name,
                        start=start,
                        train=files["train"],
                        output=output,
                        seed=seed,
                        precision=given.precision,
                        **shared,
                    )
                    row["seconds"].setdefault(name, []).append(found["seconds"])
                    row["ceiling_gflops"].append(found["ceiling_gflops"])
                    row["after"].setdefault(name, []).append(quality(output, task, files["eval"]))
            report["rows"].append(row)
            print(to_markdown(report), flush=True)
    if given.report:
        write_report(given.report, "embedding-training", report, to_markdown(report))


def to_markdown(report: dict[str, Any]) -> str:
    machine, options = report["machine"], report["options"]
    ceilings = [best for row in report["rows"] for best in row["ceiling_gflops"]]
    lines = [
        f"Sentence embeddings from {options['model']}{' with new upper layers' if options['fresh'] == 'True' else ''},"
        f" batches of {options['batch_size']}, learning rate {options['lr']}, {options['epochs']} epochs, seeds"
        f" {options['seeds']}, {options['precision']}. Wall time of the whole training, imports, files and"
        " saving included."
        f" {machine['cpu']}, torch {machine['torch']}, commit {machine['commit']}, {machine['date']}."
        f" Ceiling before each run: {min(ceilings):.0f} to {max(ceilings):.0f} GFLOP/s.",
        "",
        "| task | before | fastbert | sentence-transformers | seconds, fastbert | sentence-transformers | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        after = [_mean(row["after"][name]) for name in ("fastbert", "sentence-transformers")]
        seconds = [sorted(row["seconds"][name])[len(row["seconds"][name]) // 2] for name in row["seconds"]]
        lines.append(
            f"| {row['task']} | {100 * row['before']:.2f} | {100 * after[0]:.2f} | {100 * after[1]:.2f} |"
            f" {seconds[0]:.1f} | {seconds[1]:.1f} | {seconds[1] / seconds[0]:.2f} |"
        )
    return "\n".join(lines)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
