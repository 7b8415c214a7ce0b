"""`fastbert quantize`: a model's folder with its layers in int8, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fastbert.cli_texts import UsageError, read_texts
from fastbert.config import EncoderConfig
from fastbert.hub import resolve
from fastbert.layers.quantized import QuantizedLinear
from fastbert.models.auto import model_classes
from fastbert.models.base import EncoderModel, PreTrainedModel
from fastbert.quantization import is_quantized, quantization_error, quantize
from fastbert.sentence_folder import Recipe, load_encoder, transformer_folder
from fastbert.sentences import SentenceEncoder, position_limit
from fastbert.tokenization import load_tokenizer

# Weights in whatever format, which the new folder must not hold beside its own.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.msgpack", "*.ot")
_EXPORTS = ("onnx", "openvino")


@dataclass(frozen=True)
class Job:
    """The arguments of one `fastbert quantize`."""

    model: str
    output: Path
    keep: list[str]
    report: Path | None


def quantize_folder(job: Job, show: Callable[[str], None]) -> str:
    """Write `job.model`, in int8, to `job.output`; returns a one-line summary. `show` prints a line of the report.

    Raises UsageError, before anything is written, for an output or texts that cannot be had, and for a model that is
    int8 already; the errors of from_pretrained and of fastbert.quantize; OSError.
    """
    if job.output.exists() and (not job.output.is_dir() or any(job.output.iterdir())):
        raise UsageError(f"{job.output} exists already, and is no empty folder")
    if not job.output.absolute().parent.is_dir():
        raise UsageError(f"{job.output}: {job.output.absolute().parent} is not a folder")
    texts = None if job.report is None else list(read_texts(job.report))
    root = resolve(job.model)
    folder = transformer_folder(root)
    model = _load(folder, job.model)
    if is_quantized(model):
        raise UsageError(f"{job.model} is int8 already")
    before = _size(model)
    errors = {} if texts is None else _errors(model, folder, texts)
    quantize(model, keep=job.keep)
    if texts is not None:
        _report(model, errors, len(texts), show)
    with tempfile.TemporaryDirectory(dir=job.output.absolute().parent) as beside:
        copy = Path(beside) / "model"
        shutil.copytree(root, copy, ignore=lambda at, names: _left_out(names) if Path(at) == folder else ())
        model.save_pretrained(copy / folder.relative_to(root))
        os.replace(copy, job.output)
    leaves = [leaf for leaf in model.modules() if isinstance(leaf, QuantizedLinear)]
    return f"{len(leaves)} layers in int8, {before / 1e6:,.1f} MB -> {_size(model) / 1e6:,.1f} MB -> {job.output}"


def _load(folder: Path, name: str) -> PreTrainedModel:
    """The model with the head that the folder was saved with, or without one where fastbert has no such head."""
    config = EncoderConfig.from_file(folder / "config.json")
    architectures = config.extra.get("architectures") or [""]
    kind = model_classes(config.model_type).get(architectures[0])
    if kind is None or issubclass(kind, EncoderModel):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a pooler that is not there is left out
            base = None if kind is None else kind.from_pretrained(folder)
        return base if base is not None and not base.missing_keys else load_encoder(folder, name, None)
    model = kind.from_pretrained(folder)
    if model.missing_keys:
        raise UsageError(f"{name} lacks {', '.join(model.missing_keys[:3])}, ...: train its head first")
    return model


def _errors(model: PreTrainedModel, folder: Path, texts: list[str]) -> dict[str, float]:
    base = model.base_model
    encoder = SentenceEncoder(base, load_tokenizer(folder), Recipe(), position_limit(base))
    prefix = "" if base is model else f"{model.family.prefix}."
    return {prefix + name: error for name, error in quantization_error(encoder, texts).items()}


def _report(model: PreTrainedModel, errors: dict[str, float], num_texts: int, show: Callable[[str], None]) -> None:
    show(f"||int8 output - output|| / ||output|| of each layer, over {num_texts:,} texts")
    modules = dict(model.named_modules())
    for name, error in errors.items():
        kept = "" if isinstance(modules[name], QuantizedLinear) else "   kept"
        show(f"  {error:7.2%}  {name}{kept}")


def _left_out(names: list[str]) -> set[str]:
    weights = {name for name in names for pattern in _WEIGHTS if Path(name).match(pattern)}
    return weights | set(_EXPORTS).intersection(names)


def _size(model: nn.Module) -> int:
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)
