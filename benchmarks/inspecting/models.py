"""What looking inside takes: `python -m benchmarks.inspecting.models --output benchmarks/results/<machine>`.

Integrated gradients of 32 sentences beside Captum's over transformers' model of the same weights, which gets them one
by one and as padded batches; and attention of one layer of BERT-large at 512 tokens beside the layers up to it, which
run without its probabilities. All in one process, in turn; medians.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import fastbert
from benchmarks.peak_memory import forget_peak
from fastbert import inspect
from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine, peak_memory
from fastbert.hub import resolve
from fastbert.models.auto import model_class
from fastbert.testing.cases import MODELS

TEXTS, STEPS, TOKENS_AT_ONCE = 32, 50, 8192
ROOT = Path(__file__).parents[2]


def in_turn(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median of the seconds that each takes; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def attributions(rounds: int) -> dict[str, Any]:
    """MiniLM with a classifier, whose weights are random."""
    import transformers
    from captum.attr import IntegratedGradients

    folder = str(resolve("all-MiniLM-L6-v2"))
    torch.manual_seed(0)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval().requires_grad_(False)
    config = fastbert.EncoderConfig.from_dict(theirs.config.to_dict())
    ours = fastbert.BertForSequenceClassification(config).eval()
    ours.load_state_dict(theirs.state_dict())
    encoder = fastbert.SentenceEncoder(folder)
    sentences = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()[:TEXTS]
    ids = [encoding.ids for encoding in encoder.tokenizer.encode_batch(sentences)]
    words = theirs.get_input_embeddings()
    method = IntegratedGradients(lambda embeds, mask: theirs(inputs_embeds=embeds, attention_mask=mask).logits)

    def captum(rows: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, rows))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        kept = (padded == 101) | (padded == 102)
        base = words(padded.where(kept, 0))
        return method.attribute(
            words(padded),
            base,
            target=1,
            additional_forward_args=mask,
            n_steps=STEPS,
            internal_batch_size=max(TOKENS_AT_ONCE // longest, len(rows)),
        ).sum(-1)

    def packed() -> list[inspect.Attribution]:
        batch = fastbert.pack_inputs(ids)
        return inspect.integrated_gradients(
            ours, batch, 1, kept_ids=(101, 102), steps=STEPS, batch_tokens=TOKENS_AT_ONCE
        )

    def in_bfloat16() -> list[inspect.Attribution]:
        with torch.autocast("cpu", torch.bfloat16):
            return packed()

    calls = {
        "Captum, text by text": lambda: [captum([row]) for row in ids],
        "Captum, a padded batch": lambda: captum(ids),
        "fastbert": packed,
        "fastbert, autocast to bfloat16": in_bfloat16,
    }
    expected = [captum([row])[0] for row in ids]
    scale = max(float(scores.abs().max()) for scores in expected)
    errors = {}
    for name, found in (("float32", packed()), ("bfloat16", in_bfloat16())):
        apart = max(float((one.scores - scores).abs().max()) for one, scores in zip(found, expected, strict=True))
        missed = max(float(one.completeness_error) for one in found)
        errors[name] = {"to Captum": apart / scale, "completeness": missed}
    return {"seconds": in_turn(calls, rounds), "tokens": [len(row) for row in ids], "errors": errors}


def one_layer(rounds: int) -> list[dict[str, Any]]:
    """BERT-large, 512 tokens."""
    with torch.device("meta"):
        model = model_class("bert", "Model")(fastbert.EncoderConfig.of_family("bert", **MODELS["bert-large"]))
    model = model.to_empty(device="cpu").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.detach(), std=0.02)
    batch = fastbert.pack_inputs(torch.randint(1000, 30000, (1, 512)))
    rows = []
    for layer in (0, 11, 23):
        calls = {
            "attention": lambda layer=layer: inspect.attention(model, batch, layers=[layer]),
            "layers": lambda layer=layer: inspect.hidden_states(model, batch, layers=[layer + 1]),
        }
        found: dict[str, Any] = {"layer": layer, "seconds": in_turn(calls, rounds)}
        for name, call in calls.items():
            ctypes.CDLL(None).malloc_trim(0)  # what the calls before have freed is not this one's
            forget_peak()
            before = peak_memory()
            call()
            found[f"bytes of {name}"] = peak_memory() - before
        rows.append(found)
    return rows


def to_markdown(report: Mapping[str, Any]) -> str:
    machine, gradients = report["machine"], report["integrated gradients"]
    ours = gradients["seconds"]["fastbert"]
    lines = [
        f"{machine['cpu']}, {report['threads']} threads, torch {machine['torch']}, commit {machine['commit']},"
        f" {machine['date']}; medians of {report['rounds']} rounds in turn, float32.",
        "",
        f"Integrated gradients of {TEXTS} sentences ({sum(gradients['tokens'])} tokens, {STEPS} points of the path),"
        " MiniLM with a classifier.",
        *(
            f"In {name} the largest difference to Captum is {error['to Captum']:.1e} of the largest attribution, and"
            f" the completeness error {error['completeness']:.1e} at most."
            for name, error in gradients["errors"].items()
        ),
        "",
        "| | s | times fastbert's |",
        "|---|--:|--:|",
        *(f"| {name} | {s:.2f} | {s / ours:.2f} |" for name, s in gradients["seconds"].items()),
        "",
        "Attention of one layer of BERT-large, 512 tokens, beside the hidden states behind that layer:",
        "",
        "| layer | layers, ms | with attention, ms | ratio | memory, MB | with attention, MB |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report["one layer"]:
        plain, with_attention = row["seconds"]["layers"], row["seconds"]["attention"]
        lines.append(
            f"| {row['layer']} | {1e3 * plain:.0f} | {1e3 * with_attention:.0f} | {with_attention / plain:.2f}"
            f" | {row['bytes of layers'] / 1e6:.0f} | {row['bytes of attention'] / 1e6:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="a folder for inspect.json and inspect.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = {"machine": describe_machine(), "rounds": options.rounds, "threads": options.threads}
    report |= {"integrated gradients": attributions(options.rounds), "one layer": one_layer(options.rounds)}
    print(to_markdown(report))
    if options.output is not None:
        write_report(options.output, "inspect", report, to_markdown(report))


if __name__ == "__main__":
    main()
