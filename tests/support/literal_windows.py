"""Windows of long texts as transformers' tokenizers cut them, one by one: what a literal loop over them needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch


class LiteralWindow(NamedTuple):
    """inputs: what the model is given. numbers: of each token, its number among those of the text; -1: it is of none.
    words: which word it is of, or None, where texts were split into words. spans: its characters.
    """

    inputs: dict[str, torch.Tensor]
    numbers: np.ndarray
    words: list[int | None]
    spans: list[tuple[int, int]]


def windows_of(tokenizer: Any, *texts: Any, length: int, overlap: int) -> list[LiteralWindow]:
    """Of a text, or of the second one of a pair; or of a list of words."""
    is_pair = len(texts) == 2
    made = tokenizer(
        *texts,
        truncation="only_second" if is_pair else True,
        max_length=length,
        stride=overlap,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        is_split_into_words=isinstance(texts[0], list),
    )
    found, begin = [], 0
    for i, ids in enumerate(made["input_ids"]):
        inside = np.array([s == int(is_pair) for s in made.sequence_ids(i)])
        numbers = np.full(len(ids), -1)
        numbers[inside] = begin + np.arange(inside.sum())
        inputs = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([made["token_type_ids"][i]])}
        found.append(LiteralWindow(inputs, numbers, made.word_ids(i), made["offset_mapping"][i]))
        begin += int(inside.sum()) - overlap
    return found


def owners(windows: list[LiteralWindow]) -> dict[int, int]:
    """Which window each token counts in: the one in which it is farthest from a cut, and of equal ones the first."""
    last = max((window.numbers.max(initial=-1) for window in windows), default=-1)
    best: dict[int, tuple[int, int]] = {}
    for w, window in enumerate(windows):
        inside = window.numbers[window.numbers >= 0].tolist()
        for t in inside:
            left = 10**6 if inside[0] == 0 else t - inside[0]
            right = 10**6 if inside[-1] == last else inside[-1] - t
            if t not in best or min(left, right) > best[t][0]:
                best[t] = (min(left, right), w)
    return {t: w for t, (_, w) in best.items()}


def counted(windows: list[LiteralWindow]) -> list[list[bool]]:
    """Which tokens of each window count: all that are not another window's."""
    owner = owners(windows)
    return [[n < 0 or owner[n] == w for n in window.numbers.tolist()] for w, window in enumerate(windows)]
