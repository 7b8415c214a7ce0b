"""From texts to batches: checks, chunks, packed ids, and the bar that shows how far it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from fastbert.errors import InputError

# What is tokenised at a time: enough to sort well; a token takes some 70 bytes, those that are cut off too.
CHUNK_TEXTS = 4096
CHUNK_CHARS = 4 << 20
PROGRESS_DELAY_S = 2.0  # shorter work shows no progress bar


def check_texts(texts: str | Iterable[str]) -> list[str]:
    """The texts as a list. Raises TypeError or InputError, naming the first that is none."""
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Iterable):
        raise TypeError(f"texts is a {type(texts).__name__}; it must be a string or a list of strings")
    listed = [texts] if isinstance(texts, str) else list(texts)
    for i, text in enumerate(listed):
        check_text(f"texts[{i}]", text)
    return listed


def check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not valid Unicode: {error}") from None


def chars_of(one: Any) -> int:
    """Of a text, or of a pair of texts; 0 for what is neither, which is looked at later."""
    return len(one) if isinstance(one, str) else sum(map(len, one)) if isinstance(one, tuple) else 0


def in_chunks(inputs: Iterable[Any], max_inputs: int, *, aligned: bool = False) -> Iterator[list[Any]]:
    """Lists of `max_inputs` inputs, or of fewer that have CHUNK_CHARS characters.

    `aligned`: a list begins at each `max_inputs`-th input, whatever came before: who begins there gets the same lists.
    """
    chunk: list[Any] = []
    total = 0
    for number, one in enumerate(inputs, 1):
        chunk.append(one)
        total += chars_of(one)
        if len(chunk) == max_inputs or total >= CHUNK_CHARS or (aligned and number % max_inputs == 0):
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def longest_first(inputs: Sequence[Any]) -> Iterator[tuple[list[int], list[Any]]]:
    """Chunks of inputs, each with its places among all of them.

    Longest first: a batch too large for the memory fails at once, and the estimate of the time left errs to the long
    side. Characters stand for tokens here; within a chunk the tokens are counted.
    """
    order = sorted(range(len(inputs)), key=lambda i: -chars_of(inputs[i]))
    done = 0
    for chunk in in_chunks((inputs[i] for i in order), CHUNK_TEXTS):
        yield order[done : done + len(chunk)], chunk
        done += len(chunk)


def packed(sequences: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids, int64 (total_tokens,); cu_seqlens, int32 (sequences + 1,); max_seqlen) of sequences of ids."""
    lengths = [len(sequence) for sequence in sequences]
    cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)
    return flat(sequences, device), cu_seqlens, max(lengths)


def flat(sequences: list[list[int]], device: torch.device) -> torch.Tensor:
    count = sum(map(len, sequences))
    return torch.from_numpy(np.fromiter(chain.from_iterable(sequences), np.int64, count)).to(device)


def progress_bar(total: int | None, show: bool | None, **options: Any) -> Any:
    """A tqdm bar over texts. None: only on a terminal, and only once the work has taken PROGRESS_DELAY_S."""
    from tqdm import tqdm

    hidden = not show if show is not None else sys.stderr is None or not sys.stderr.isatty()
    delay = 0.0 if show else PROGRESS_DELAY_S
    options = {"desc": "encoding", "unit": " texts", "delay": delay, **options}
    return tqdm(total=total, disable=hidden, dynamic_ncols=True, **options)
