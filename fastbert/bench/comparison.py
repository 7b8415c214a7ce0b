"""Several encoders side by side: their size, operations and memory, and how fast they run when they take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from fastbert.bench.timing import Timing, measure_once
from fastbert.config.operations import operations
from fastbert.data.budget import token_batches
from fastbert.data.tokenized import tokenize
from fastbert.files import writing
from fastbert.models.base import EncoderModel
from fastbert.models.quantized import int8_weights
from fastbert.packed_inputs import PackedInputs, pack_inputs

LENGTHS = (16, 128, 512)  # of the texts that operations are counted for
TRAINING_BYTES = 16  # a parameter: the weight, its gradient, AdamW's two moments, in float32
BATCH_TOKENS = 8192
TURN_SECONDS = 0.2  # a turn is as many calls as fill this, at least one


@dataclass(frozen=True)
class Candidate:
    name: str
    model: EncoderModel
    tokenizer: Tokenizer | None = None  # of a checkpoint

    @property
    def limit(self) -> int | None:
        """The longest text, in tokens; None: any."""
        return self.model.table_sizes().longest(self.model.config)

    def lengths(self, wanted: Sequence[int]) -> list[int]:
        """These, each cut to what the model takes."""
        limit = self.limit
        return [n if limit is None else min(n, limit) for n in wanted]

    def lengths_of(self, texts: Sequence[str]) -> list[int] | None:
        """In this model's own tokens, before any cut; None without a tokenizer."""
        return None if self.tokenizer is None else tokenize(self.tokenizer, texts, with_types=False).lengths.tolist()

    def batches(self, wanted: Sequence[int]) -> list[PackedInputs]:
        """Random tokens, in batches of up to BATCH_TOKENS."""
        generator = torch.Generator().manual_seed(0)
        low, high = min(1000, self.model.config.vocab_size // 2), self.model.config.vocab_size
        lengths = self.lengths(wanted)
        return [
            pack_inputs([torch.randint(low, high, (lengths[i],), generator=generator).tolist() for i in chosen])
            for chosen in token_batches(lengths, BATCH_TOKENS)
        ]


def facts_of(candidate: Candidate, wanted: Sequence[int]) -> dict[str, Any]:
    """What can be counted: parameters by part, operations a token, bytes of weights, and which texts are cut."""
    model, config = candidate.model, candidate.model.running_config
    int8 = int8_weights(model)
    total = sum(t.numel() for t in (*model.parameters(), *int8))
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    layers = {path: model.get_submodule(path) for path in config.layer_paths}
    in_layers = sum(t.numel() for layer in layers.values() for t in (*layer.parameters(), *int8_weights(layer)))
    per_token = {}
    for length in dict.fromkeys(candidate.lengths(LENGTHS)):
        count = operations(config, [length])
        per_token[length] = {"executed": count.executed / length, "transformers": count.transformers / length}
    return {
        "name": candidate.name,
        "family": config.model_type,
        "parameters": {"all": total, "embeddings": embeddings, "layers": in_layers},
        "operations_per_token": per_token,
        "weight_bytes": sum(t.nbytes for t in (*model.parameters(), *int8)),
        "training_bytes": None if int8 else TRAINING_BYTES * total,
        "limit": candidate.limit,
        "texts": len(wanted),
        "texts_cut": sum(n != m for n, m in zip(candidate.lengths(wanted), wanted, strict=True)),
    }


def compare(candidates: Sequence[Candidate], wanted: Sequence[Sequence[int]], rounds: int) -> list[dict[str, Any]]:
    """The facts of each, with the real tokens and texts a second of texts that have, for each candidate, so many
    tokens: medians of so many rounds, in which all take a turn, so that a machine's slow minute is everyone's.
    """

    def run(candidate: Candidate, batches: Sequence[PackedInputs]) -> None:
        for batch in batches:
            candidate.model.last_hidden_state(batch)

    all_batches = [candidate.batches(lengths) for candidate, lengths in zip(candidates, wanted, strict=True)]
    seconds: list[list[float]] = [[] for _ in candidates]
    with torch.inference_mode():
        for round_number in range(rounds + 1):
            for i, (candidate, batches) in enumerate(zip(candidates, all_batches, strict=True)):
                taken = measure_once(partial(run, candidate, batches), TURN_SECONDS)
                if round_number:  # the first packs weights
                    seconds[i].append(taken)
    rows = []
    for candidate, lengths, times in zip(candidates, wanted, seconds, strict=True):
        timing, tokens = Timing.of(times), sum(candidate.lengths(lengths))
        rate = {"tokens_per_second": tokens / timing.median, "texts_per_second": len(lengths) / timing.median}
        rows.append(facts_of(candidate, lengths) | rate | {"seconds": timing.to_dict(), "tokens": tokens})
    return rows


def to_table(rows: Sequence[dict[str, Any]], machine: dict[str, Any], dtype: str) -> str:
    """Markdown."""
    columns = ["model", "parameters", "of them embeddings", "weights", "to train"]
    columns += [f"Mop a token, S = {n}" for n in LENGTHS]
    columns += ["real tokens/s", "texts/s", "times the first's texts/s"]
    has_quality = any(row.get("quality") for row in rows)
    columns += ["quality"] if has_quality else []
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, {dtype}. Operations of the layers, in brackets what"
        " transformers executes. To train: weights, gradients and AdamW's moments in float32, without activations.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---|" + "--:|" * (len(columns) - 1),
    ]
    for row in rows:
        parameters, counts = row["parameters"], row["operations_per_token"]
        cells = [
            row["name"],
            f"{parameters['all'] / 1e6:,.1f} M",
            f"{parameters['embeddings'] / parameters['all']:.0%}",
            f"{row['weight_bytes'] / 1e6:,.0f} MB",
            "-" if row["training_bytes"] is None else f"{row['training_bytes'] / 1e6:,.0f} MB",
        ]
        for length in LENGTHS:
            count = counts.get(length)
            both = "-" if count is None else f"{count['executed'] / 1e6:,.1f} ({count['transformers'] / 1e6:,.1f})"
            cells.append(both)
        speed = row["texts_per_second"]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{speed:,.1f}", f"{speed / rows[0]['texts_per_second']:.2f}x"]
        if has_quality:
            quality = row.get("quality")
            cells.append(f"{100 * quality['value']:.2f} ({quality['measure']})" if quality else "-")
        lines.append("| " + " | ".join(cells) + " |")
    for row in rows:
        if row["texts_cut"]:
            lines += [
                "",
                f"{row['name']}: {row['texts_cut']} of {row['texts']} texts are cut to {row['limit']} tokens.",
            ]
    return "\n".join(lines)


def write_chart(path: Path, rows: Sequence[dict[str, Any]], machine: dict[str, Any], dtype: str) -> None:
    """A bar a model, the fastest first; where quality is known, speed against quality. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    ordered = sorted(rows, key=lambda row: row["texts_per_second"])
    judged = [row for row in ordered if row.get("quality")]
    figure = Figure(figsize=(8, 5 if judged else 1.4 + 0.5 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlabel("texts/s")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="both" if judged else "x", color="#dddddd", linewidth=0.8, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    sizes = {row["name"]: f"{row['parameters']['all'] / 1e6:,.0f} M parameters" for row in rows}
    if judged:
        measures = sorted({row["quality"]["measure"] for row in judged})
        axes.set_ylabel(f"{', '.join(measures)}, x 100")
        axes.margins(0.25)
        speeds = [row["texts_per_second"] for row in judged]
        if max(speeds) > 5 * min(speeds):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:,.0f}")
        else:
            axes.set_xlim(0, 1.5 * max(speeds))
        for row in judged:
            point = row["texts_per_second"], 100 * row["quality"]["value"]
            axes.scatter(*point, s=60, color="#0072b2", zorder=2)
            label = f"{Path(row['name']).name}\n{sizes[row['name']]}"
            axes.annotate(label, point, (8, 4), textcoords="offset points", fontsize=9)
    else:
        speeds = [row["texts_per_second"] for row in ordered]
        bars = axes.barh([Path(row["name"]).name for row in ordered], speeds, color="#0072b2", height=0.7, zorder=2)
        labels = [f"{speed:,.0f}   {sizes[row['name']]}" for speed, row in zip(speeds, ordered, strict=True)]
        axes.bar_label(bars, labels, padding=4, fontsize=9)
        axes.margins(x=0.35)
    axes.set_title(f"{machine['cpu']}, {machine['threads']} threads, {dtype}", loc="left", fontsize=11)
    with writing(path) as new:
        figure.savefig(new, dpi=150, format="png")
