"""Damage done to files: bytes, JSON, safetensors headers. A new kind is one function here, listed in its table."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draw import Draw

# What a field of a JSON file may hold instead; written with allow_nan, as Python does.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1.5, 0.5, -0.0, "", "x", [], {}, [1], ["x"], {"a": 1}, {"0": None}, 100_000, 2**31,
    2**63, 2**64, -(2**63), 1e308, float("nan"), float("inf"), float("-inf"), [[]], "../x", "\x00", "\ud800",
)  # fmt: skip


def flip_bits(draw: Draw, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 30)) if data else 0):
        near_start = draw.flag()
        damaged[draw.integer(0, min(len(data), 2000 if near_start else len(data)) - 1)] ^= 1 << draw.integer(0, 7)
    return bytes(damaged)


def truncate(draw: Draw, data: bytes) -> bytes:
    return data[: draw.choice((draw.integer(0, len(data)), 0, 8, max(0, len(data) - 1)))]


def append(draw: Draw, data: bytes) -> bytes:
    return data + draw.choice((b"\n", b"\x00" * 9, b"}", data))


def cut_out(draw: Draw, data: bytes) -> bytes:
    start = draw.integer(0, len(data))
    return data[:start] + data[start + draw.choice((1, 4, 64, 1000)) :]


def noise(draw: Draw, data: bytes) -> bytes:
    return random.Random(draw.seed()).randbytes(draw.choice((len(data), 0, 7, 100)))


def no_file(draw: Draw, data: bytes) -> None:
    return None


BYTES: dict[str, Callable[[Draw, bytes], bytes | None]] = {
    function.__name__: function for function in (flip_bits, truncate, append, cut_out, noise, no_file)
}


def damage_bytes(draw: Draw, path: Path) -> None:
    kind = draw.choice(BYTES)
    draw.note(f"  {kind} of {path.name}")
    damaged = BYTES[kind](draw, path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)


def odd_value(draw: Draw) -> Any:
    """A copy: what is put into a file may be changed there, and be put into itself."""
    return copy.deepcopy(draw.choice(ODD_VALUES))


def mutate(draw: Draw, entries: Any) -> Any:
    """`entries` with one entry of one of its containers changed, taken away, renamed or put deeper."""
    containers: list[Any] = []
    pending = [entries]
    while pending:
        each = pending.pop()
        if isinstance(each, dict | list):
            containers.append(each)
            pending.extend(each.values() if isinstance(each, dict) else each)
    full = [each for each in containers if each]
    if not full or draw.flag(30):
        return odd_value(draw)
    container = full[0] if draw.flag() else draw.choice(full)
    key = draw.choice(list(container) if isinstance(container, dict) else list(range(len(container))))
    kind = draw.choice(("replace", "replace", "delete", "nest", "exchange", "rename"))
    draw.note(f"  {kind} {key!r}")
    if kind == "replace":
        container[key] = odd_value(draw)
        draw.note(f"    by {container[key]!r}")
    elif kind == "delete":
        del container[key]
    elif kind == "nest":
        container[key] = draw.choice(([container[key]], {str(key): container[key]}))
    elif kind == "exchange":
        other = draw.choice(list(container) if isinstance(container, dict) else list(range(len(container))))
        container[key], container[other] = container[other], container[key]
    elif isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    return entries


# Text that no json.dumps writes, in the place of the file, or of a number in it.
ODD_TEXTS = {
    "many brackets": lambda text: "[" * 100_000 + "]" * 100_000,
    "many braces": lambda text: '{"a":' * 100_000 + "1" + "}" * 100_000,
    "a long number": lambda text: text.replace(": ", ": 1" + "0" * 5000 + ", ", 1),
    "digits at a number": lambda text: text.replace("2", "2" * 5000, 1),
    "a key twice": lambda text: text.replace("{", '{"hidden_size": 1, ', 1),
    "byte order mark": lambda text: "\ufeff" + text,
    "a comment": lambda text: "// x\n" + text,
    "an array": lambda text: f"[{text}]",
}


def damage_json(draw: Draw, path: Path) -> None:
    if draw.flag(6):
        kind = draw.choice(ODD_TEXTS)
        draw.note(f"  {kind} in {path.name}")
        path.write_text(ODD_TEXTS[kind](path.read_text("utf-8")), "utf-8")
        return
    draw.note(f"  JSON of {path.name}")
    entries = json.loads(path.read_text("utf-8"))
    for _ in range(draw.choice((1, 1, 2, 4))):
        entries = mutate(draw, entries)
    path.write_text(json.dumps(entries), "utf-8")


def read_header(data: bytes) -> tuple[dict, bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def damage_header(draw: Draw, path: Path) -> None:
    draw.note(f"  header of {path.name}")
    header, payload = read_header(path.read_bytes())
    if draw.flag(3) and isinstance(header, dict) and "fastbert_crc32" in header.get("__metadata__", {}):
        sums = mutate(draw, json.loads(header["__metadata__"]["fastbert_crc32"]))
        header["__metadata__"]["fastbert_crc32"] = json.dumps(sums)
    else:
        header = mutate(draw, header)
    text = json.dumps(header).encode()
    size = len(text) + draw.choice((0, 0, 0, 1, -1, 2**40))
    path.write_bytes(size.to_bytes(8, "little") + text + payload)


def copy_of(template: Path, folder: Path) -> Path:
    shutil.copytree(template, folder)
    return folder
