"""What a run is told: dataclasses, whose fields are the options of the command line and the keys of a run's YAML file.

A field says in `metadata` what it is for (help), which values it may have (choices), and which section of `--help` it is
in (group).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fastbert.config import ConfigError


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), group: str = "") -> Any:
    metadata = {"help": help, "choices": choices, "group": group}
    if isinstance(default, tuple):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every run is told. `command` is what repeats it."""

    command: ClassVar[str]

    output: str = option("", "the folder of the run: model, metrics, chart, log and checkpoints")
    resume: bool = option(False, "go on with the run in --output")
    dry_run: bool = option(False, "show some examples as the model gets them, and train nothing")
    seed: int = option(42, "of the order of examples, masks, dropout and new weights")

    steps: int = option(0, "steps of the optimizer; 0: as --epochs says", group="length")
    epochs: float = option(3.0, "times that every example is seen", group="length")
    batch_size: int = option(
        0, "examples of a step over all ranks, at most; 0: as many as --step-tokens allows", group="length"
    )
    step_tokens: int = option(
        0, "tokens of a step over all ranks, at most; 0: --batch-size times --max-length", group="length"
    )
    accumulation: int = option(
        1, "batches that a rank makes of its share of a step, one after the other", group="length"
    )
    max_length: int = option(
        128, "tokens of an example, special ones included; longer ones are cut, or windowed", group="length"
    )
    group_by_length: bool = option(False, "examples of a step are of similar length", group="length")

    learning_rate: float = option(5e-5, "the highest of the run", group="optimizer")
    optimizer: str = option("adamw", "what makes the steps", choices=("adamw", "lamb"), group="optimizer")
    weight_decay: float = option(0.01, "of matrices and tables", group="optimizer")
    layer_decay: float = option(1.0, "a layer's learning rate by that of the layer above", group="optimizer")
    beta1: float = option(0.9, "Adam's decay of the mean of gradients", group="optimizer")
    beta2: float = option(0.999, "Adam's decay of the mean of their squares", group="optimizer")
    eps: float = option(1e-8, "added to the root of that mean", group="optimizer")
    schedule: str = option("linear", "the learning rate after the warm-up", choices=("linear", "cosine", "trapezoid", "constant"), group="optimizer")  # fmt: skip
    warmup: float = option(
        0.1, "steps in which the learning rate goes up; below 1: a share of all steps", group="optimizer"
    )
    max_norm: float = option(1.0, "gradients longer than that are shortened; 0: not", group="optimizer")

    precision: str = option("auto", "number format of the products; auto: bf16 where the processor has it", choices=("auto", "bf16", "fp32"), group="machine")  # fmt: skip
    device: str = option("", "cpu or cuda; by default a GPU if there is one", group="machine")
    workers: int = option(0, "processes that make batches; 0: the training process itself", group="machine")
    wrapping: str = option("ddp", "how several ranks share the work", choices=("ddp", "fsdp"), group="machine")
    activation_checkpointing: bool = option(
        False, "compute layers again in backward: less memory, more time", group="machine"
    )
    timeout: float = option(1800.0, "seconds that a rank waits for the others before it fails", group="machine")

    log_every: int = option(10, "steps", group="reports")
    eval_every: int = option(0, "steps; 0: after every epoch, or at the end of a run by --steps", group="reports")
    patience: int = option(0, "evaluations without a better one after which the run ends; 0: never", group="reports")
    save_every: int = option(500, "steps between checkpoints", group="reports")
    keep: int = option(2, "checkpoints that stay", group="reports")
    tensorboard: bool = option(False, "write TensorBoard's files into the run's folder, too", group="reports")

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            choices, value = entry.metadata["choices"], getattr(self, entry.name)
            if choices and value not in choices:
                raise ConfigError(f"{entry.name} is {value!r}; it must be one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions):
    """A run of `fastbert finetune`."""

    command: ClassVar[str] = "finetune"

    task: str = option("classification", "what is learnt", choices=("classification", "tokens", "qa", "embedding"), group="task")  # fmt: skip
    model: str = option("", "a folder, a hub id, or all-MiniLM-L6-v2", group="task")
    train: tuple[str, ...] = option((), "files to learn from, or a data set of the hub", group="task")
    eval: tuple[str, ...] = option((), "files to judge by; none: only the loss is known", group="task")
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
    class_weights: tuple[str, ...] = option(
        (), "how much a class counts in the loss: balanced, or a number for each", group="task"
    )


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(RunOptions):
    """A run of `fastbert pretrain`."""

    command: ClassVar[str] = "pretrain"

    objective: str = option("mlm", "what is learnt", choices=("mlm", "mlm+nsp", "mlm+sop", "rtd", "distil"), group="task")  # fmt: skip
    train: tuple[str, ...] = option((), "files of text to learn from, or a data set of the hub", group="task")
    eval: tuple[str, ...] = option((), "files to judge by; none: only the loss is known", group="task")
    model: str = option("", "go on with this model; else --preset from scratch", group="task")


def path_of(options: RunOptions) -> Path:
    if not options.output:
        raise ConfigError("output is missing: the folder that the run writes")
    return Path(options.output)
