"""What the tasks of fine-tuning share: a head over packed inputs, its examples, and the folder that comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastbert.data.collator import PackingCollator
from fastbert.data.sentence_folder import transformer_settings
from fastbert.data.tokenization import save_lowering
from fastbert.data.tokenized import Tokenized
from fastbert.data.usage import Usage
from fastbert.packed_inputs import PackedInputs
from fastbert.training.finetuning.adapters import FOLDER, merged, save_adapters
from fastbert.training.task import Phase, Task


class LabelledSequences:
    """The examples of an epoch: tokens, and the labels that go with them under the names of a model's forward.

    `labels`: a row a sequence, or a row a token (`per_token`).
    """

    def __init__(self, sequences: Tokenized, *, per_token: bool = False, **labels: np.ndarray):
        self.sequences, self.labels, self.per_token = sequences, labels, per_token

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, i: int) -> dict[str, Any]:
        offsets = self.sequences.offsets
        if self.per_token:
            span = slice(offsets[i], offsets[i + 1])
            return self.sequences[i] | {name: values[span] for name, values in self.labels.items()}
        return self.sequences[i] | {name: values[i].tolist() for name, values in self.labels.items()}


class HeadTask(Task):
    """A model with a head, and examples that are the same in every epoch.

    `usage` goes into the saved folder. `adapters`: PEFT's config of those in the model; None: the whole model learns.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer, examples: LabelledSequences, usage: Usage, adapters: Any = None
    ):
        self.model, self.tokenizer, self.train = model, tokenizer, examples
        self.usage, self.adapters = usage, adapters
        folder = model.tokenizer_folder
        self.lowers = folder is not None and transformer_settings(folder).lowercase

    def collate(self, phase: Phase) -> Callable[[list[Any]], PackedInputs]:
        return PackingCollator(padded_outputs=False)

    def examples(self, epoch: int, phase: Phase) -> tuple[Any, Any]:
        return self.train, self.train.sequences.lengths

    def whole(self, model: Any) -> Any:
        """What is saved of a model, and judged: adapters are merged, which rounds their sums with the weights."""
        return model if self.adapters is None else merged(model)

    def save(self, model: Any, folder: Path) -> None:
        self.whole(model).save_pretrained(folder)
        if self.lowers:
            save_lowering(self.tokenizer, folder)
        self.usage.save(folder)
        if self.adapters is not None:
            save_adapters(model, self.adapters, folder / FOLDER)

    def decoded(self, batch: PackedInputs) -> list[str]:
        """The text of each sequence, special tokens included."""
        ids, ends = batch["input_ids"].tolist(), batch["batch"].cu_seqlens.tolist()
        parts = [ids[start:end] for start, end in pairwise(ends)]
        return self.tokenizer.decode_batch(parts, skip_special_tokens=False)


def note_of_cut(count: int, total: int, where: str, max_length: int, limit: int) -> str:
    """What is said where inputs were too long; empty if none was."""
    if not count:
        return ""
    more = f"; --max-length may be up to {limit}" if max_length < limit else ""
    return f"{count:,} of {total:,} inputs of {where} have more than {max_length} tokens, and are cut{more}"


def note_of_windows(more: int, where: str) -> str:
    """What is said where inputs were too long, and are read in chunks; empty if none was."""
    return f"texts of {where} that are too long go on in {more:,} more windows" if more else ""


def shown_names(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nothing"
