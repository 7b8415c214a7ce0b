"""`fastbert info` shows what a model costs, `fastbert doctor` which backends this machine would run it with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert import __version__
from fastbert.config import EncoderConfig

if TYPE_CHECKING:
    from fastbert.models.base import EncoderModel

OLDEST_TORCH = (2, 11)
WIDTH = 100
LENGTHS = (16, 128, 512)  # sequence lengths that info reckons with
_PACKAGES = ("triton", "tokenizers", "safetensors", "transformers", "sentence-transformers")
TOKENS = 16384  # tokens at once that info reckons with

# --------------------------------------------------------------------------------------------------------------------
# info


def info_lines(name: str) -> list[str]:
    """A model's size and cost, from its config.json. Raises CheckpointError or ConfigError."""
    from fastbert.models.auto import FAMILIES
    from fastbert.sentences import position_limit

    config = _read_config(name)
    with torch.device("meta"):
        model = FAMILIES[config.model_type](config)
    total, encoder = model.num_parameters(), matmul_parameters(model)
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
    ]
    lines = [f"{name}", *(f"  {label:<15}{value}" for label, value in rows), ""]
    lines += [f"Operations per token, forward: 2 P + 4 S H L; P = {encoder:,} weights in layers, S tokens long"]
    for length in lengths:
        attention = 4 * length * config.hidden_size * config.num_hidden_layers
        share = attention / (2 * encoder + attention)
        lines.append(f"  S = {length:<9}{(2 * encoder + attention) / 1e6:10,.1f} M   attention {share:.0%}")
    lines += ["", f"Memory{'float32':>21}{'bfloat16':>12}"]
    # What is alive at the widest point of a layer with the torch backend, the hungriest: measured for MiniLM-L6 on the
    # CPU, 416 MB where this says 403.
    activations = TOKENS * (4 * config.hidden_size + 3 * config.intermediate_size)
    for label, values in (("weights", total), (f"{TOKENS:,} tokens", activations)):
        lines.append(f"  {label:<15}{4 * values / 1e6:7,.1f} MB{2 * values / 1e6:9,.1f} MB")
    return [*lines, "  (tokens in one batch: activations of inference, at most about; training keeps every layer's)"]


def _read_config(name: str) -> EncoderConfig:
    from fastbert.checkpoint.pretrained import resolve
    from fastbert.data.sentence_folder import transformer_folder

    if Path(name).is_file():
        return EncoderConfig.from_file(name)
    return EncoderConfig.from_file(transformer_folder(resolve(name, config_only=True)) / "config.json")


def _sharing(config: EncoderConfig) -> str:
    shared = config.num_unique_layers
    return f", sharing the weights of {shared}" if shared != config.num_hidden_layers else ""


def matmul_parameters(model: EncoderModel) -> int:
    """Weights of the matrix products that a token passes in the layers; a shared layer counts each time it runs."""
    from fastbert.layers.leaves import get_leaf

    layers = (get_leaf(model, path) for path in model.family.layer_paths(model.config))
    return sum(m.weight.numel() for layer in layers for m in layer.modules() if isinstance(m, nn.Linear))


# --------------------------------------------------------------------------------------------------------------------
# doctor


def doctor_lines() -> tuple[list[str], bool]:
    """The report, and whether all is well."""
    from fastbert.backend import missing_kernels

    fault = torch_fault(torch.__version__)
    versions = [("fastbert", __version__), ("python", platform.python_version())]
    versions.append(("torch", torch.__version__ + (f"   <-- {fault}" if fault else "")))
    versions += [(package, _version(package)) for package in _PACKAGES]
    lines = ["Versions", *_table(versions)]
    if fault:
        return lines, False  # the rest may not even import
    lines += ["", "Machine", *_table(_machine())]
    if (missing := missing_kernels()) is not None:
        lines += textwrap.wrap(missing, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    choice = os.environ.get("FASTBERT_BACKEND", "auto")
    if choice != "auto":
        lines.append(f"  FASTBERT_BACKEND={choice} is set: every operation that has such a kernel uses it or fails")
    lines += ["", "Which backend serves each operation"]
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        lines += _backend_table(device)
    return lines, True


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return [f"  {label:<23}{value}" for label, value in rows]


def torch_fault(version: str) -> str | None:
    """What is wrong with a version of torch; None if nothing."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"too old: fastbert needs torch {oldest} or newer" if found < OLDEST_TORCH else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> list[tuple[str, str]]:
    rows = [
        ("processor", f"{_cpu_model()}, {os.cpu_count()} cores; torch uses {torch.get_num_threads()} threads"),
        ("torch's ISA", torch.backends.cpu.get_cpu_capability()),
        ("extension", _extension()),
        *_native_products(),
    ]
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return [*rows, ("GPU", "none that torch can use" if built else "none: this torch is built for CPUs only")]
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        rows.append((f"GPU {i}", f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"))
    return rows


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return models[0] if models else platform.processor() or platform.machine()


def _extension() -> str:
    from fastbert.ops._library import extension_error

    error = extension_error()
    if error is not None:
        return "none: see below"
    from fastbert import _C

    return f"loaded, running {_C.isa()} kernels"


def _native_products() -> list[tuple[str, str]]:
    """Whether the processor has instructions for products of bfloat16 and of int8, where our kernels would use them."""
    from fastbert.ops._library import extension_error

    if extension_error() is not None:
        return []
    from fastbert import _C

    bf16 = "multiplied natively" if _C.has_bf16() else "no instruction for it: bfloat16 checkpoints compute in float32"
    # Each ISA has what those before it in the list have.
    isas = ("generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
    vnni = isas.index(_C.isa()) >= isas.index("avx512_vnni")
    int8 = "multiplied natively (VNNI)" if vnni else "no instruction for it: exact, but slower than it could be"
    return [("bfloat16", bf16), ("int8", int8)]


def _backend_table(device: str) -> list[str]:
    """A table for each group of dtypes that are served alike, with the reasons as notes below it."""
    from fastbert.backend import Backend, asked_for, backends

    reports = {dtype: backends(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    groups = [list(reports)] if reports[torch.float32] == reports[torch.bfloat16] else [[dtype] for dtype in reports]
    lines = []
    for dtypes in groups:
        report, notes = reports[dtypes[0]], []
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        lines += [f"  {f'{device}, {names}':<32}" + "".join(f"{backend.value:<11}" for backend in Backend).rstrip()]
        for op, row in report.items():
            cells = []
            for backend in Backend:
                reason = row.get(backend.value, "")
                if reason and reason not in notes:
                    notes.append(reason)
                served = "serves" if row["selected"] == backend.value else "could"
                # What was asked for by name and is there for this operation, but not for these tensors.
                refused = "fails" if row["selected"] == "none" and asked_for(None) is backend else "no"
                cells.append(f"{f'{refused} [{notes.index(reason) + 1}]' if reason else served:<11}")
            lines.append(f"    {op:<30}" + "".join(cells).rstrip())
        for i, note in enumerate(notes, 1):
            lines += textwrap.wrap(f"[{i}] {note}", WIDTH, initial_indent="    ", subsequent_indent="        ")
        lines.append("")
    return lines[:-1]
