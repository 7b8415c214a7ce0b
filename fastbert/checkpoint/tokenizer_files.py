"""The files of a tokenizer, which stay beside a model that is loaded from one folder and saved into another."""

from __future__ import annotations

import shutil
from pathlib import Path

from fastbert.files import writing

# By the names that transformers' tokenizers write.
NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model",
)  # fmt: skip


def files_of(folder: Path) -> list[Path]:
    return [folder / name for name in NAMES if (folder / name).is_file()]


def copy_tokenizer(source: Path | None, target: Path) -> None:
    """Copy a tokenizer's files, unless the target has a tokenizer: a user's, perhaps with new words. Raises OSError."""
    if source is None or files_of(target):
        return
    for path in files_of(source):
        with writing(target / path.name) as new:
            shutil.copyfile(path, new)  # follows the links of the hub's cache
