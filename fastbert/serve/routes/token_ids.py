"""Token ids that clients send instead of texts, and those that they are told: of this model's vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from fastbert.data.long_texts.pieces import as_far_as_needed, uncut
from fastbert.data.long_texts.template import Template
from fastbert.sentences.text_model import TextModel
from fastbert.serve import json_text
from fastbert.serve.engine import Engine
from fastbert.serve.json_text import MadeJson
from fastbert.serve.request_errors import RequestError

ROWS_AT_ONCE = 512
# What helps the client that has another tokenizer: LangChain's default.
HINT = "send texts (with LangChain: check_embedding_ctx_length=False)"


def side_of(tokenizer: Tokenizer) -> str:
    """At which side texts are cut."""
    return (tokenizer.truncation or {}).get("direction", "right")


def cutting_at(engine: Engine, side: str) -> Engine:
    """The same model, which cuts texts at `side`, "left" or "right"."""
    copied, model = copy.copy(engine), copy.copy(engine.model)
    model.tokenizer = _at_side(engine.model.tokenizer, side)
    model._tokenizers = {task: _at_side(one, side) for task, one in engine.model._tokenizers.items()}
    copied.model = model
    return copied


def _at_side(tokenizer: Tokenizer, side: str) -> Tokenizer:
    """Another, of the same length."""
    copied = uncut(tokenizer)
    copied.enable_truncation((tokenizer.truncation or {})["max_length"], direction=side)
    return copied


def check_ids(field: str, rows: list[list[int]], words: int) -> None:
    """Raises RequestError: an id is none of the model's `words`."""
    for i, row in enumerate(rows):
        if row and not (min(row) >= 0 and max(row) < words):
            j = next(j for j, one in enumerate(row) if not 0 <= one < words)
            told = f"{field}[{i}][{j}] is {row[j]}; the ids of this model's own tokenizer are 0 to {words - 1}"
            raise RequestError("validation", f"{told}. With another tokenizer {HINT}")


def sequences_of_ids(model: TextModel, rows: list[list[int]], prompt: str) -> tuple[list[Any], list[int], int | None]:
    """(sequences, their lengths, the first that was cut or None) of checked ids.

    The special tokens of a text are put around them, unless they are there. A prompt's tokens come first.
    """
    template = Template.of(model.tokenizer, 1)
    before, after = (part.tolist() for part in template.ids)
    said = model.tokenizer.encode(prompt.rstrip(), add_special_tokens=False).ids if prompt else []
    room = model.max_seq_length - template.added
    is_left = side_of(model.tokenizer) == "left"
    sequences: list[Any] = []
    cut = None
    for i, row in enumerate(rows):
        if template.added and row[: len(before)] == before and row[len(row) - len(after) :] == after:
            row = row[len(before) : len(row) - len(after)]
        row = [*said, *row]
        if len(row) > room:
            cut = i if cut is None else cut
            row = row[-room:] if is_left else row[:room]
        ids, types = template.around(np.array(row, np.int64))
        sequences.append({"input_ids": ids, **({"token_type_ids": types} if model.has_types else {})})
    return sequences, [len(one["input_ids"]) for one in sequences], cut


def tokens_of(
    tokenizer: Tokenizer, texts: list[str], with_special: bool, check: Callable[[int], None]
) -> list[MadeJson]:
    """Of each text its tokens: id, text, special, and the characters where it stands; null for a special one.

    `check(tokens)` raises where there are too many; the tokenizer cuts what are too many in one text.
    """
    per_text, tokens = [], 0
    for text in texts:
        part = as_far_as_needed(tokenizer, text)
        (encoding,) = tokenizer.encode_batch([part], add_special_tokens=with_special)  # `encode` holds other threads up
        tokens += len(encoding) + sum(map(len, encoding.overflowing))
        check(tokens)
        per_text.append(_rows_of(text, encoding))
    return per_text


def _rows_of(text: str, encoding: Encoding) -> MadeJson:
    """JSON, some tokens at a time: the objects of eight texts of 8,192 tokens are 11 MB, of which a server kept 8."""
    ids, spans = np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)
    pairs = enumerate(zip(encoding.tokens, encoding.special_tokens_mask, strict=True))
    special = {i: token for i, (token, is_special) in pairs if is_special}
    parts = []
    for first in range(0, len(ids), ROWS_AT_ONCE):
        some, rows = slice(first, first + ROWS_AT_ONCE), []
        for i, (token_id, (a, b)) in enumerate(zip(ids[some].tolist(), spans[some].tolist(), strict=True), first):
            if i in special:
                row = {"id": token_id, "special": True, "text": special[i], "start": None, "stop": None}
            else:
                row = {"id": token_id, "special": False, "text": text[a:b], "start": a, "stop": b}
            rows.append(row)
        parts.append(json_text.dumps(rows)[1:-1])
    return MadeJson(b"[" + b",".join(parts) + b"]")
