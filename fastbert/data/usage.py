"""How a fine-tuned folder is to be used: what config.json has no place for, in a small file beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fastbert.config import EncoderConfig
from fastbert.data.chunks import Windows
from fastbert.errors import ConfigError
from fastbert.files import read_json, write_text

FILE = "fastbert_task.json"
# The end of a class's name in config.json's architectures -> the task that it is for.
_TASKS = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "qa",
}


@dataclass(frozen=True)
class Usage:
    """task: as --task. text_columns: of the training data; empty: not known. max_length: tokens of a sequence. stride:
    tokens by which chunks of a longer one overlap. no_answer: of questions, whether there may be none. windows: of
    classification, whether a longer text is read in windows.
    """

    task: str
    text_columns: tuple[str, ...] = ()
    max_length: int | None = None
    stride: int | None = None
    no_answer: bool = False
    windows: bool = False

    @property
    def own_windows(self) -> Windows:
        """Those of the training."""
        return Windows(self.max_length, 0.25 if self.stride is None else self.stride)

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        write_text(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_usage(folder: Path, source: str) -> Usage:
    """Of a folder that a fine-tuning wrote, fastbert's or another's. Raises ConfigError: it is for no such task."""
    config = EncoderConfig.from_file(folder / "config.json").to_dict()
    named = [str(name) for name in config.get("architectures") or []]
    task = next((task for end, task in _TASKS.items() for name in named if name.endswith(end)), None)
    if task is None:
        raise ConfigError(
            f"{source} is a {', '.join(named) or 'model without architectures'}: predict runs models for"
            " classification of texts or of tokens, and for question answering"
        )
    if not (folder / FILE).is_file():
        return Usage(task)
    entries = read_json(folder / FILE, ConfigError)
    try:
        usage = Usage(**{**entries, "text_columns": tuple(entries["text_columns"])})
    except (TypeError, KeyError):
        raise ConfigError(f"{folder / FILE} is damaged: it has {', '.join(entries)}") from None
    if usage.task != task:
        raise ConfigError(f"{folder / FILE} says {usage.task!r}, and config.json {', '.join(named)}")
    return usage


def usage_of(folder: Path) -> Usage | None:
    """What a folder's fine-tuning says, where it says something. Raises ConfigError: a file is damaged."""
    return read_usage(folder, str(folder)) if (folder / FILE).is_file() else None
