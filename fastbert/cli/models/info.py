"""`fastbert info`: what a model is and costs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.parser import A_MODEL, add_command, add_model
from fastbert.cli.stopping import raise_if_stopped

if TYPE_CHECKING:
    from fastbert.config import EncoderConfig
    from fastbert.models.base import EncoderModel

LENGTHS = (16, 128, 512)  # sequence lengths that info reckons with
TOKENS = 16384  # tokens at once that info reckons with


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "info",
        run,
        "size, cost per token and memory of a model",
        "Shows the size of a model, its cost per token and its memory. Reads only its config.json, no weights.",
        "fastbert info all-MiniLM-L6-v2",
    )
    add_model(parser, f"a config.json, {A_MODEL}")


def run(options: argparse.Namespace) -> int:
    print("\n".join(info_lines(options.model)))
    return 0


def info_lines(name: str) -> list[str]:
    """A model's size and cost, from its config.json. Raises CheckpointError or ConfigError."""
    from torch import nn

    from fastbert.checkpoint.unfilled import unfilled
    from fastbert.config.operations import operations, weights_of_layer
    from fastbert.models.auto import base_class
    from fastbert.sentences.text_model import position_limit

    raise_if_stopped()
    config = _read_config(name)
    with unfilled():
        model = base_class(config.model_type)(config)
    total = model.num_parameters()
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    limit = position_limit(model)
    lengths = [*(n for n in LENGTHS if n < limit), limit]
    rows = [
        ("family", config.model_type),
        ("parameters", f"{total:,}; {embeddings:,} of them embeddings"),
        ("layers", f"{config.num_hidden_layers}" + _sharing(config)),
        ("hidden size", f"{config.hidden_size}; feed-forward {config.intermediate_size} ({config.hidden_act})"),
        ("heads", f"{config.num_attention_heads} of {config.head_dim}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("longest input", f"{limit:,} tokens"),
        ("saved in", _format(config)),
    ]
    lines = [f"{name}", *(f"  {label:<15}{value}" for label, value in rows), ""]
    weights = sum(weights_of_layer(spec, config.hidden_size) for spec in config.layer_specs)
    lines += [f"Operations per token, forward: each token meets {weights:,} weights in layers; of a text of S tokens"]
    for length in lengths:
        count = operations(config, [length])
        share = count.attention / count.executed if count.executed else 0.0
        per_token = [n / length / 1e6 for n in (count.executed, count.transformers)]
        lines.append(
            f"  S = {length:<9}{per_token[0]:10,.1f} M   attention {share:.0%}   transformers {per_token[1]:,.1f} M"
        )
    lines += ["", f"Memory{'float32':>21}{'bfloat16':>12}{'int8':>12}"]
    # What is alive at the widest point of a layer with the torch backend, the hungriest: measured for MiniLM-L6 on the
    # CPU, 416 MB where this says 403.
    activations = TOKENS * (4 * config.hidden_size + 3 * config.intermediate_size)
    bytes_of = {"weights": (4 * total, 2 * total, int8_bytes(model))}
    # int8 layers measure and round what they get: what stands between them is bfloat16.
    bytes_of[f"{TOKENS:,} tokens"] = (4 * activations, 2 * activations, 2 * activations)
    for label, counts in bytes_of.items():
        lines.append(
            f"  {label:<15}" + "".join(f"{count / 1e6:{9 if i else 7},.1f} MB" for i, count in enumerate(counts))
        )
    return [
        *lines,
        "  (tokens in one batch: activations of inference, at most about; training keeps every layer's."
        " int8: fastbert quantize; all but the layers' products in bfloat16)",
    ]


def _format(config: EncoderConfig) -> str:
    """What the weights of the layers are saved in, as far as the config says."""
    from fastbert.models.quantized import ENTRY, KEEP, METHOD
    from fastbert.models.tree import linear_paths

    entry = config.extra.get(ENTRY)
    if not isinstance(entry, Mapping) or METHOD not in entry:
        return str(config.extra.get("dtype") or config.extra.get("torch_dtype") or "float32")
    products, kept = len(linear_paths(config)), len(entry.get(KEEP, ()))
    return f"int8, {products - kept} of the layers' {products} products; the rest in floating point"


def int8_bytes(model: EncoderModel) -> int:
    """Of the model that `fastbert quantize` would make: a byte a weight of the layers' products, the rest bfloat16."""
    from torch import nn

    from fastbert.layers.leaves import get_leaf
    from fastbert.models.tree import linear_paths

    leaves = [leaf for path in linear_paths(model.config) if isinstance(leaf := get_leaf(model, path), nn.Linear)]
    weights = sum(leaf.weight.numel() for leaf in leaves)
    scales = sum(4 * leaf.out_features for leaf in leaves)
    return 2 * (model.num_parameters() - weights) + weights + scales


def _read_config(name: str) -> EncoderConfig:
    from fastbert.config import EncoderConfig
    from fastbert.data.sentence_folder import transformer_folder
    from fastbert.hub import resolve

    if Path(name).is_file():
        return EncoderConfig.from_file(name)
    return EncoderConfig.from_file(transformer_folder(resolve(name, config_only=True)) / "config.json")


def _sharing(config: EncoderConfig) -> str:
    shared = config.num_unique_layers
    return f", sharing the weights of {shared}" if shared != config.num_hidden_layers else ""
