"""What bfloat16 and int8 lose of a model of EmbeddingGemma's kind: of its layers, and of a small one trained here.

    python benchmarks/gemma_precision.py --data DATA --output benchmarks/results/<machine>

Layers: EmbeddingGemma's shape with random weights, one kind of each. Words are multiplied by sqrt(768), and the weights
behind sublayers are scaled: as a new config has them; up to 40 in each channel; and so that the residual stream leaves
float16's range. Errors are to transformers in float64.

Model: a small one of the same form, trained with in-batch negatives over two sentences of one intent of banking77; how
often the nearest training sentence of a test sentence has its intent, with the 95 % interval of 2,000 bootstraps.
"""

from __future__ import annotations

import argparse
import copy
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer

import fastbert
from fastbert import ops
from fastbert.bench.jobs import fields_without_type
from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine
from fastbert.data.budget import token_batches
from fastbert.models.auto import model_class
from fastbert.testing.cases import MODELS

LENGTHS = (12, 31, 55, 90, 167, 300)  # the last is longer than the windows
SCALES = {"as a new config has them": 0.0, "up to 40": 40.0, "beyond float16": 40000.0}
SMALL = {
    "vocab_size": 30522,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "intermediate_size": 256,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "use_bidirectional_attention": True,
    "max_position_embeddings": 128,
}
EPOCHS, PAIRS, TEMPERATURE = 6, 64, 0.05


def scaled(theirs: torch.nn.Module, largest: float) -> torch.nn.Module:
    """The same, with weights of norms behind sublayers drawn up to `largest`, and the others around 1."""
    generator = torch.Generator().manual_seed(0)
    for name, p in theirs.named_parameters():
        if p.dim() == 1 and largest:
            top = largest if "post_" in name else 1.0
            p.data.copy_(torch.rand(p.shape, generator=generator).square() * top)
    return theirs


def layer_errors(largest: float) -> dict[str, Any]:
    """Of the last hidden states: the norm of the error over the norm of what is right, and 1 - cosine of the mean."""
    import transformers

    config = transformers.Gemma3TextConfig(**fields_without_type(MODELS["embeddinggemma-6-layers"]))
    torch.manual_seed(0)
    theirs = scaled(transformers.Gemma3TextModel(config).eval(), largest)
    texts = [torch.randint(5, config.vocab_size, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]

    def outputs(model: torch.nn.Module) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [model(input_ids=ids).last_hidden_state[0].double() for ids in texts]

    largest_seen: list[float] = []
    oracle = copy.deepcopy(theirs).double()
    hook = oracle.norm.register_forward_pre_hook(lambda _, inputs: largest_seen.append(float(inputs[0].abs().max())))
    right = outputs(oracle)
    hook.remove()

    def errors(model: torch.nn.Module) -> dict[str, float]:
        pairs = [*zip(outputs(model), right, strict=True)]
        off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        turned = max(1 - float(torch.cosine_similarity(a.mean(0), b.mean(0), dim=0)) for a, b in pairs)
        return {"error": off, "1 - cosine": turned}

    ours = {
        "fastbert float32": fastbert.accelerate(copy.deepcopy(theirs)),
        "fastbert bfloat16": fastbert.accelerate(copy.deepcopy(theirs).bfloat16()),
        "fastbert int8": fastbert.quantize(fastbert.accelerate(copy.deepcopy(theirs).bfloat16())),
    }
    rows = {"transformers bfloat16": errors(copy.deepcopy(theirs).bfloat16())}
    return {"largest residual": max(largest_seen), "rows": rows | {name: errors(model) for name, model in ours.items()}}


def vectors(model: Any, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Means of the last hidden states, of length 1, float32."""
    offsets = torch.tensor([0, *map(len, texts)]).cumsum(0).int()
    longest = max(map(len, texts))
    hidden = model.encode_packed(torch.tensor([i for text in texts for i in text]), offsets, longest)
    return torch.nn.functional.normalize(ops.pooling(hidden, offsets).float(), dim=-1)


def read(data: Path, part: str) -> tuple[list[str], list[str]]:
    with (data / f"banking77/banking77_{part}.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    return [text for text, _ in rows], [label for _, label in rows]


def train(texts: list[list[int]], labels: list[str]) -> Any:
    torch.manual_seed(0)
    config = fastbert.EncoderConfig.of_family("gemma3_text", **SMALL)
    model = model_class("gemma3_text", "Model")(config).train()
    by_label: dict[str, list[int]] = {}
    for i, label in enumerate(labels):
        by_label.setdefault(label, []).append(i)
    generator = torch.Generator().manual_seed(0)
    kinds, steps = [*by_label], EPOCHS * len(texts) // (2 * PAIRS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randperm(len(kinds), generator=generator)[:PAIRS].tolist()
        pairs = [torch.randperm(len(by_label[kinds[k]]), generator=generator)[:2].tolist() for k in chosen]
        anchors, others = (
            vectors(model, [texts[by_label[kinds[k]][pair[side]]] for k, pair in zip(chosen, pairs, strict=True)])
            for side in (0, 1)
        )
        loss = torch.nn.functional.cross_entropy(anchors @ others.T / TEMPERATURE, torch.arange(len(chosen)))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def encode(model: Any, texts: list[list[int]]) -> torch.Tensor:
    out = torch.empty(len(texts), SMALL["hidden_size"])
    with torch.inference_mode():
        for chosen in token_batches([len(text) for text in texts], 4096):
            out[list(chosen)] = vectors(model, [texts[i] for i in chosen])
    return out


def quality(data: Path) -> dict[str, Any]:
    tokenizer = BertWordPieceTokenizer(str(data / "vocab/bert-base-uncased/vocab.txt"))
    (texts, labels), (tests, wanted) = read(data, "train"), read(data, "test")
    ids, test_ids = ([e.ids[:128] for e in tokenizer.encode_batch(each)] for each in (texts, tests))
    model = train(ids, labels)
    models = {
        "float32": model,
        "bfloat16": copy.deepcopy(model).bfloat16(),
        "int8": fastbert.quantize(copy.deepcopy(model).bfloat16()),
    }
    draws = torch.randint(0, len(tests), (2000, len(tests)), generator=torch.Generator().manual_seed(0))
    hits, rows = {}, {}
    for name, each in models.items():
        nearest = (encode(each, test_ids) @ encode(each, ids).T).argmax(1).tolist()
        hits[name] = torch.tensor([float(labels[i] == want) for i, want in zip(nearest, wanted, strict=True)])
        lost = (hits[name] - hits["float32"])[draws].mean(1).quantile(torch.tensor([0.025, 0.975]))
        own = hits[name][draws].mean(1).quantile(torch.tensor([0.025, 0.975]))
        rows[name] = {"accuracy": float(hits[name].mean()), "interval": own.tolist(), "change": lost.tolist()}
    return rows


def to_markdown(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"EmbeddingGemma's layers, random weights, errors to float64; {machine['cpu']}, torch {machine['torch']},"
        f" commit {machine['commit']}, {machine['date']}.",
        "",
        "| weights of norms behind sublayers | largest residual | | error | 1 - cosine of the mean |",
        "|---|--:|---|--:|--:|",
    ]
    for name, of_scale in report["layers"].items():
        for who, row in of_scale["rows"].items():
            start = f"| {name} | {of_scale['largest residual']:,.0f} | {who}"
            lines.append(f"{start} | {row['error']:.2g} | {row['1 - cosine']:.2g} |")
    lines += [
        "",
        "A small model of this form, trained on banking77: the intent of the nearest training sentence, 3,080 tests.",
        "In brackets the 95 % interval.",
        "",
        "| | accuracy | change from float32 |",
        "|---|--:|--:|",
    ]
    for name, row in report["quality"].items():
        (low, high), (least, most) = row["interval"], row["change"]
        change = "" if name == "float32" else f"({100 * least:+.2f} to {100 * most:+.2f})"
        lines.append(f"| {name} | {100 * row['accuracy']:.2f} ({100 * low:.2f} to {100 * high:.2f}) | {change} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with banking77/ and vocab/")
    parser.add_argument("--output", type=Path, help="a folder for gemma-precision.json and gemma-precision.md")
    options = parser.parse_args()
    layers = {name: layer_errors(largest) for name, largest in SCALES.items()}
    report = {"machine": describe_machine(), "layers": layers, "quality": quality(options.data)}
    print(to_markdown(report))
    if options.output is not None:
        write_report(options.output, "gemma-precision", report, to_markdown(report))


if __name__ == "__main__":
    main()
