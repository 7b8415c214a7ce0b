"""Reads a sentencepiece model (spm.model) without sentencepiece: of its protobuf message, what a tokenizer is made of.

A message is a row of fields, each a tag (number << 3 | wire type) and a value; the numbers are those of sentencepiece's
sentencepiece_model.proto (Kudo and Richardson 2018). Fields that are not read here are passed over.
"""

from __future__ import annotations

import math
import reprlib
import struct
from pathlib import Path
from typing import Any, NamedTuple

from fastbert.errors import CheckpointError

_VARINT, _BYTES = 0, 2  # wire types
_SIZES = {1: 8, 5: 4}  # of those whose values have one size
_UNIGRAM = 1  # of model_type
_MODEL_TYPES = {2: "BPE", 3: "word", 4: "character"}
_CONTROL, _USER_DEFINED = 3, 4  # types of pieces


class SpmFile(NamedTuple):
    """pieces: (text, score), by id. control: pieces that no text contains, such as [CLS]. user_defined: pieces that are
    never cut.
    """

    pieces: list[tuple[str, float]]
    control: list[str]
    user_defined: list[str]


class _Damaged(ValueError):
    """What is wrong with the bytes."""


def read_spm(path: Path) -> SpmFile:
    """Raises CheckpointError, naming the file: it is damaged, or made otherwise than tokenizers of ours can read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    try:
        pieces, trainer, normalizer = _parts(content)
        spm = _pieces(pieces)
    except _Damaged as error:
        raise CheckpointError(f"{path} is no sentencepiece model: {error}") from None
    if (model_type := trainer.get(3, _UNIGRAM)) != _UNIGRAM:
        raise CheckpointError(
            f"{path} holds a {_MODEL_TYPES.get(model_type, model_type)} model; fastbert reads unigram models"
        )
    # With the other value each of them would move every space of a text. Its table of characters, byte_fallback and
    # remove_extra_whitespaces are left unread, as transformers leaves them.
    for settings, number, name, only in (
        (trainer, 24, "treat_whitespace_as_suffix", False),
        (normalizer, 3, "add_dummy_prefix", True),
        (normalizer, 5, "escape_whitespaces", True),
    ):
        if bool(settings.get(number, only)) != only:
            raise CheckpointError(f"{path}: {name} is {str(not only).lower()}; fastbert reads {str(only).lower()} only")
    return spm


def _parts(content: bytes) -> tuple[list[bytes], dict[int, int], dict[int, int]]:
    """The messages of the pieces, and the numbers among the settings of training and of normalisation."""
    pieces, settings = [], {2: dict[int, int](), 3: dict[int, int]()}
    for number, wire, value in _fields(content):
        if wire == _BYTES and number == 1:
            pieces.append(value)
        elif wire == _BYTES and number in settings:
            settings[number] |= {of: one for of, wire_type, one in _fields(value) if wire_type == _VARINT}
    return pieces, settings[2], settings[3]


def _pieces(messages: list[bytes]) -> SpmFile:
    spm, texts = SpmFile([], [], []), set[str]()
    for i, message in enumerate(messages):
        text, score, piece_type = "", 0.0, 1
        for number, wire, value in _fields(message):
            if number == 1 and wire == _BYTES:
                try:
                    text = value.decode("utf-8")
                except UnicodeDecodeError:
                    raise _Damaged(f"piece {i} is not UTF-8") from None
            elif number == 2 and wire == 5:
                (score,) = struct.unpack("<f", value)
            elif number == 3 and wire == _VARINT:
                piece_type = value
        if not text or text in texts:
            twice = f"piece {i} is {reprlib.repr(text)}, which is there twice"
            raise _Damaged(twice if text else f"piece {i} has no text")
        if not math.isfinite(score):
            raise _Damaged(f"piece {i} has score {score}")
        texts.add(text)
        spm.pieces.append((text, score))
        if piece_type == _CONTROL:
            spm.control.append(text)
        elif piece_type == _USER_DEFINED:
            spm.user_defined.append(text)
    if not texts:
        raise _Damaged("it has no pieces")
    return spm


def _fields(message: bytes) -> list[tuple[int, int, Any]]:
    """(number, wire type, value) of each field; a value is an int, or bytes."""
    fields, at, end = list[tuple[int, int, Any]](), 0, len(message)
    while at < end:
        tag, at = (message[at], at + 1) if message[at] < 128 else _varint(message, at)  # a call for each takes long
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            fields.append((tag >> 3, wire, value))
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        elif wire in _SIZES:
            size = _SIZES[wire]
        else:
            raise _Damaged(f"byte {at} begins a field of the unknown wire type {wire}")
        if at + size > end:
            raise _Damaged(f"a field of {size} bytes begins at byte {at} of {end}")
        fields.append((tag >> 3, wire, message[at : at + size]))
        at += size
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """An integer in groups of 7 bits, the lowest first, and where the next field begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise _Damaged(f"it ends in the middle of an integer, at byte {at}")
        byte = message[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise _Damaged(f"the integer before byte {at} has no end")
