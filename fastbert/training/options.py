"""What a run is told: dataclasses whose fields are the options of the command line and the keys of a run's YAML file.

A field's metadata says what it is for (help), which values it may have (choices), and in which section of `--help` it
stands (group).
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fastbert.data import delimiters
from fastbert.errors import ConfigError
from fastbert.messages import did_you_mean

HASH_LINES = ("auto", "comment", "word")
HASH_LINES_HELP = (
    "what a line of a CoNLL file that begins with # is, where it may be a comment or a word; auto: an error that asks"
)

Options = TypeVar("Options", bound="RunOptions")


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), group: str = "run") -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "group": group})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every run is told. `command` is what repeats it."""

    command: ClassVar[str]

    output: str = option("", "the folder of the run: model, metrics, chart, log and checkpoints")
    resume: bool = option(False, "go on with the run in --output")
    dry_run: bool = option(False, "show some examples as the model gets them, and train nothing")
    seed: int = option(42, "seed of the order of examples, of masks, dropout and new weights")
    delimiter: str = option("", delimiters.HELP, group="task")

    steps: int = option(0, "steps of the optimizer; 0: as --epochs says", group="length")
    epochs: float = option(3.0, "times that every example is seen", group="length")
    batch_size: int = option(
        0, "examples of a step over all ranks, at most; 0: as many as --step-tokens allows", group="length"
    )
    step_tokens: int = option(
        0, "tokens of a step over all ranks, at most; 0: --batch-size times --max-length", group="length"
    )
    accumulation: int = option(
        1, "how many batches a rank makes of its share of a step, one after the other", group="length"
    )
    max_length: int = option(
        128, "tokens of an example, special ones included; longer ones are cut, or read in chunks", group="length"
    )
    group_by_length: bool = option(False, "examples of a step are of similar length", group="length")

    learning_rate: float = option(5e-5, "the highest learning rate of the run", group="optimizer")
    optimizer: str = option("adamw", "what makes the steps", choices=("adamw", "lamb"), group="optimizer")
    weight_decay: float = option(0.01, "weight decay of matrices and tables", group="optimizer")
    layer_decay: float = option(1.0, "a layer's learning rate, by that of the layer above it", group="optimizer")
    beta1: float = option(0.9, "decay of Adam's mean of the gradients", group="optimizer")
    beta2: float = option(0.999, "decay of Adam's mean of their squares", group="optimizer")
    eps: float = option(1e-8, "what is added to the root of that mean", group="optimizer")
    schedule: str = option(
        "linear",
        "the learning rate after the warm-up",
        choices=("linear", "cosine", "trapezoid", "constant"),
        group="optimizer",
    )
    warmup: float = option(
        0.1, "steps in which the learning rate goes up; below 1: a share of all steps", group="optimizer"
    )
    max_norm: float = option(
        1.0, "gradients with a larger norm are scaled down to this one; 0: no clipping", group="optimizer"
    )

    precision: str = option(
        "auto",
        "number format of the products; auto: bf16 where the processor has it",
        choices=("auto", "bf16", "fp32"),
        group="machine",
    )
    device: str = option("", "cpu or cuda; by default a GPU if there is one", group="machine")
    workers: int = option(0, "processes that make batches; 0: the training process itself", group="machine")
    wrapping: str = option("ddp", "how several ranks share the work", choices=("ddp", "fsdp"), group="machine")
    activation_checkpointing: bool = option(
        False, "compute layers again in backward: less memory, more time", group="machine"
    )
    timeout: float = option(1800.0, "seconds that a rank waits for the others before it fails", group="machine")

    log_every: int = option(10, "steps between rows of the log", group="reports")
    eval_every: int = option(0, "steps between evaluations; 0: after every epoch, and at the end", group="reports")
    patience: int = option(0, "evaluations without a better one after which the run ends; 0: never", group="reports")
    save_every: int = option(500, "steps between checkpoints", group="reports")
    keep: int = option(2, "checkpoints that stay", group="reports")
    tensorboard: bool = option(False, "write TensorBoard's files into the run's folder, too", group="reports")

    def __post_init__(self) -> None:
        for name, value_type in types_of(type(self)).items():
            value, metadata = getattr(self, name), _fields(type(self))[name].metadata
            if not _fits(value, value_type):
                raise ConfigError(f"{name} is {value!r}; it must be {_NAMES[value_type]}")
            if metadata["choices"] and value not in metadata["choices"]:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(metadata['choices'])}")
        positive = ("accumulation", "max_length", "log_every", "save_every", "keep", "learning_rate", "timeout")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in (
            "seed",
            "steps",
            "epochs",
            "batch_size",
            "step_tokens",
            "workers",
            "warmup",
            "max_norm",
            "eval_every",
            "patience",
            "weight_decay",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not self.steps and not self.epochs:
            raise ConfigError("steps and epochs are both 0: say how long the run is to be")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions):
    """A run of `fastbert finetune`."""

    command: ClassVar[str] = "finetune"

    task: str = option(
        "classification",
        "what the model learns to do",
        choices=("classification", "tokens", "qa", "embedding"),
        group="task",
    )
    model: str = option("", "a folder, a hub id, or all-MiniLM-L6-v2", group="task")
    train: tuple[str, ...] = option((), "files to learn from, or a data set of the hub", group="task")
    eval: tuple[str, ...] = option((), "files to judge by; without them only the loss is known", group="task")
    text_columns: tuple[str, ...] = option(
        (), "the column of texts, or two of pairs; by default found by their names", group="task"
    )
    label_column: str = option("", "the column of labels; by default found by its name", group="task")
    problem_type: str = option(
        "auto",
        "what labels are; auto: several labels in lists, a regression if numbers have fractions, else one label",
        choices=("auto", "single_label_classification", "multi_label_classification", "regression"),
        group="task",
    )
    label_type: str = option(
        "auto",
        "how several labels are written: their names, or a 0 or a 1 for each label there is",
        choices=("auto", "names", "multi_hot"),
        group="task",
    )
    hash_lines: str = option("auto", HASH_LINES_HELP, choices=HASH_LINES, group="task")
    class_weights: tuple[str, ...] = option(
        (), "how much a class counts in the loss: balanced, or a number for each", group="task"
    )
    windows: bool = option(
        False,
        "classification: a text longer than --max-length is read in chunks, each of which learns its label; its answer"
        " is the mean of theirs",
        group="task",
    )
    doc_stride: int = option(
        0, "tokens by which the chunks of a long text overlap; 0: a quarter of --max-length", group="task"
    )
    lora_rank: int = option(
        0,
        "train only LoRA adapters of this rank (by PEFT), merged into the saved model and kept in adapter/; 0: all"
        " weights",
        group="task",
    )
    lora_alpha: int = option(16, "what adapters add is multiplied by this / lora_rank", group="task")
    lora_targets: tuple[str, ...] = option(
        (), "the Linears that get an adapter, by the end of their names; by default PEFT's choice", group="task"
    )

    loss: str = option(
        "auto",
        "auto: cosent where there are scores, else ranking, in which a text has to find its partner in the batch",
        choices=("auto", "ranking", "cosent", "cosine"),
        group="embedding",
    )
    scale: float = option(20.0, "factor of the cosines in ranking and cosent", group="embedding")
    symmetric: bool = option(False, "ranking in both directions", group="embedding")
    dims: tuple[str, ...] = option(
        (), "sizes that vectors may be cut to, the whole one among them (Matryoshka)", group="embedding"
    )
    pooling: str = option(
        "",
        "how the tokens of a plain encoder make a vector; by default mean",
        choices=("", "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
        group="embedding",
    )

    batch_size: int = option(
        32, "examples of a step over all ranks, at most; 0: as many as --step-tokens allows", group="length"
    )


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(RunOptions):
    """A run of `fastbert pretrain`."""

    command: ClassVar[str] = "pretrain"

    objective: str = option(
        "mlm",
        "what the model learns; mlm: masked tokens; +nsp, +sop: also how two sentences follow each other; rtd: which"
        " tokens were replaced; distil: what --teacher computes",
        choices=("mlm", "mlm+nsp", "mlm+sop", "rtd", "distil"),
        group="task",
    )
    train: tuple[str, ...] = option((), "files of text to learn from, or a data set of the hub", group="task")
    eval: tuple[str, ...] = option((), "files to judge by; without them only the loss is known", group="task")
    model: str = option("", "go on with this model; without it a new one is made", group="task")
    teacher: str = option("", "the model that distil learns from", group="task")
    preset: str = option("", "the shape of a new model: baby, tiny, base, large or modern (default baby)", group="task")
    family: str = option("", "family of the new model, if not the preset's: roberta, albert, ...", group="task")
    tokenizer: str = option("", "a folder with a tokenizer; without it a new model gets a new one", group="task")
    vocab_size: int = option(0, "tokens of a new vocabulary; 0: as the preset or the family has", group="task")
    vocab_kind: str = option(
        "", "kind of a new vocabulary: wordpiece, bpe or unigram; by default the family's", group="task"
    )
    cased: bool = option(False, "a new vocabulary tells capitals from small letters (bpe always does)", group="task")
    column: str = option("text", "where the text stands in files that are no plain text", group="task")
    unit: str = option("token", "what is masked as a whole", choices=("token", "word", "span"), group="task")
    masking: str = option("0.15", "share of tokens to guess; 0.3:0.15 goes from one to the other", group="task")

    phases: str = option(
        "", "share of the run:max length, in turn, as 0.9:128,0.1:512; without it --max-length", group="length"
    )
    batch_warmup: float = option(
        0.0, "share of the run in which steps grow from a quarter to all of their tokens", group="length"
    )
    learning_rate: float = option(5e-4, "the highest learning rate of the run", group="optimizer")
    step_tokens: int = option(8192, "tokens of a step over all ranks, at most", group="length")


# What may change when a run goes on: where and how it runs, and what is reported of it, but not what is learnt.
MAY_CHANGE = {
    "output",
    "resume",
    "dry_run",
    "accumulation",
    "device",
    "workers",
    "wrapping",
    "timeout",
    "log_every",
    "save_every",
    "keep",
    "tensorboard",
    "activation_checkpointing",
}

# The options that name data, and the split of a data set on the hub that each reads: their content must stay, too.
DATA = {"train": "train", "eval": "validation"}

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "a list of texts"}


def types_of(cls: type[RunOptions]) -> dict[str, type]:
    """The type of each option: int, float, bool, str, or tuple (of texts)."""
    hints = typing.get_type_hints(cls)
    return {name: typing.get_origin(hints[name]) or hints[name] for name in _fields(cls)}


def _fields(cls: type[RunOptions]) -> dict[str, Any]:
    return {entry.name: entry for entry in dataclasses.fields(cls)}


def _fits(value: Any, value_type: type) -> bool:
    if value_type is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if value_type is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if value_type is tuple:
        return isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)
    return isinstance(value, value_type)


def options_of(cls: type[Options], entries: Mapping[str, Any], where: str) -> Options:
    """The options in a mapping, such as a YAML file has. Raises ConfigError, naming `where`: an unknown key, or a value
    of the wrong type.
    """
    types, values = types_of(cls), dict[str, Any]()
    for name, value in entries.items():
        key = str(name).replace("-", "_")
        if key not in types:
            near = did_you_mean(key, types)
            hint = f"did you mean {near}?" if near else f"it knows {', '.join(types)}"
            raise ConfigError(f"{where} has {name!r}, which {cls.command} does not know; {hint}")
        if types[key] is tuple:
            value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        if types[key] is str and isinstance(value, (int, float)) and not isinstance(value, bool):  # masking: 0.3
            value = str(value)
        if types[key] is float and isinstance(value, str):  # 5e-5 is a text in YAML 1.1
            with contextlib.suppress(ValueError):
                value = float(value)
        values[key] = value
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises ConfigError: no YAML, or no mapping; OSError."""
    import yaml

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"{path} holds no options: it must have lines such as `learning_rate: 3e-5`")
    return entries


def to_yaml(options: RunOptions) -> str:
    """All options but those of one start (output, resume, dry_run)."""
    import yaml

    values = {name: getattr(options, name) for name in types_of(type(options))}
    kept = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if k not in _OF_ONE_START}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


_OF_ONE_START = ("output", "resume", "dry_run")
