"""`fastbert quantize`: writes a model's folder with its layers in int8, whole or not at all."""

from __future__ import annotations

import argparse
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.parser import UsageError, add_command, add_delimiter_option, add_model
from fastbert.cli.stopping import raise_if_stopped, say
from fastbert.data.text_files import TEXT_KINDS, read_texts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fastbert.models.base import PreTrainedModel

# Weights in whatever format, which the new folder must not hold beside its own.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.msgpack", "*.ot")
_EXPORTS = ("onnx", "openvino")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "quantize",
        run,
        "write a model with its layers in int8",
        """
        Writes MODEL to the new folder OUTPUT with its layers in int8, a quarter of the size of float32. fastbert loads
        OUTPUT like any other folder. --report measures, on your own texts, the error that int8 causes in each layer. A
        layer that loses too much can stay as it is: give its name, or a pattern, to --keep.
        """,
        "fastbert quantize all-MiniLM-L6-v2 ./minilm-int8 --report reviews.txt --keep '*.layer.0.*'",
    )
    add_model(parser)
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="the folder to write")
    parser.add_argument(
        "--keep", metavar="NAME", action="append", default=[], help="a layer that stays as it is; may be repeated"
    )
    parser.add_argument(
        "--report", metavar="TEXTS", type=Path, help=f"texts to measure each layer's error on: {TEXT_KINDS}"
    )
    add_delimiter_option(parser)


def run(options: argparse.Namespace) -> int:
    if options.delimiter is not None and options.report is None:
        raise UsageError("--delimiter is for the file of --report")
    job = QuantizeJob(options.model, options.output, options.keep, options.report, options.delimiter)
    say(quantize_folder(job, print))
    return 0


@dataclass(frozen=True)
class QuantizeJob:
    """The arguments of one `fastbert quantize`."""

    model: str
    output: Path
    keep: list[str]
    report: Path | None
    delimiter: str | None = None


def quantize_folder(job: QuantizeJob, show: Callable[[str], None]) -> str:
    """Write `job.model`, in int8, to `job.output`; returns a one-line summary. `show` prints a line of the report.

    Killed, it leaves a folder beside the output, which the next run removes. Raises UsageError, before anything is
    written, for an output or texts that cannot be had, and for a model that is int8 already; the errors of
    from_pretrained and of fastbert.quantize; OSError, with nothing left behind, for a full disk.
    """
    if job.output.exists() and (not job.output.is_dir() or any(job.output.iterdir())):
        raise UsageError(f"{job.output} exists already, and is no empty folder")
    if not job.output.absolute().parent.is_dir():
        raise UsageError(f"{job.output}: {job.output.absolute().parent} is not a folder")
    texts = None if job.report is None else list(read_texts(job.report, delimiter=job.delimiter))

    from fastbert.checkpoint.saving import beside
    from fastbert.data.sentence_folder import transformer_folder
    from fastbert.files import move
    from fastbert.hub import resolve
    from fastbert.layers.quantized import QuantizedLinear
    from fastbert.models.quantized import is_quantized
    from fastbert.quantization import quantize

    raise_if_stopped()
    root = resolve(job.model)
    folder = transformer_folder(root)
    model = _load(folder, job.model, (root / "modules.json").is_file())
    if is_quantized(model):
        raise UsageError(f"{job.model} is int8 already")
    before = _size(model)
    errors = {} if texts is None else _errors(model, folder, texts)
    quantize(model, keep=job.keep)
    if texts is not None:
        _report(model, errors, len(texts), show)
    parent = job.output.absolute().parent
    with beside(parent) as new:
        copy = new / "model"
        try:
            shutil.copytree(root, copy, ignore=lambda at, names: _left_out(names, at == str(folder)))
        except shutil.Error as error:  # a list of all files that failed
            raise OSError(f"{job.output} cannot be written: {error.args[0][0][2]}") from None
        model.save_pretrained(copy / folder.relative_to(root))
        move(copy, job.output)
    leaves = [leaf for leaf in model.modules() if isinstance(leaf, QuantizedLinear)]
    return f"{len(leaves)} layers in int8, {before / 1e6:,.1f} MB -> {_size(model) / 1e6:,.1f} MB -> {job.output}"


def _load(folder: Path, name: str, is_sentence_model: bool) -> PreTrainedModel:
    """The model with the head that the folder was saved with, or without one where fastbert has no such head."""
    from fastbert.checkpoint.pretrained import read_config
    from fastbert.models.auto import load_encoder, model_classes
    from fastbert.models.base import EncoderModel

    config = read_config(folder)
    architectures, classes = config.extra.get("architectures") or [""], model_classes(config.model_type)
    model_class = classes.get(architectures[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a head that is not there is an error below, a pooler is left out
        if model_class is not None and not issubclass(model_class, EncoderModel):
            model = model_class.from_pretrained(folder)
            if not model.missing_keys:
                return model
            if not is_sentence_model:  # whose config may name the head that it was pre-trained with
                raise UsageError(f"{name} lacks {', '.join(model.missing_keys[:3])}, ...: train its head first")
            model_class = next(each for each in classes.values() if issubclass(each, EncoderModel))
        base = None if model_class is None else model_class.from_pretrained(folder)
        return base if base is not None and not base.missing_keys else load_encoder(folder, name, None)


def _errors(model: PreTrainedModel, folder: Path, texts: list[str]) -> dict[str, float]:
    from fastbert.data.tokenization import load_tokenizer
    from fastbert.quantization import quantization_error
    from fastbert.sentences import SentenceEncoder
    from fastbert.sentences.text_model import position_limit

    base = model.base_model
    encoder = SentenceEncoder.of_parts(base, load_tokenizer(folder), position_limit(base))
    prefix = "" if base is model else f"{model.family.prefix}."
    return {prefix + name: error for name, error in quantization_error(encoder, texts).items()}


def _report(model: PreTrainedModel, errors: dict[str, float], num_texts: int, show: Callable[[str], None]) -> None:
    from fastbert.layers.quantized import QuantizedLinear

    show(f"||int8 output - output|| / ||output|| of each layer, over {num_texts:,} texts")
    modules = dict(model.named_modules())
    for name, error in errors.items():
        kept = "" if isinstance(modules[name], QuantizedLinear) else "   kept"
        show(f"  {error:7.2%}  {name}{kept}")


def _left_out(names: list[str], of_the_model: bool) -> set[str]:
    """What is not copied of a folder: what killed saves have left, and the model's own weights in any format."""
    from fastbert.checkpoint.saving import BESIDE
    from fastbert.files import PARTIAL

    left_out = {name for name in names if name.startswith(BESIDE) or (name.startswith(".") and name.endswith(PARTIAL))}
    if of_the_model:
        left_out |= {name for name in names for pattern in _WEIGHTS if Path(name).match(pattern)}
        left_out |= set(_EXPORTS).intersection(names)
    return left_out


def _size(model: nn.Module) -> int:
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)
