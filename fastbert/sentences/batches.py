"""Texts as users give them: their checks, chunks of them, and the bar that shows how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from fastbert.data.tokenized import CHUNK_TEXTS
from fastbert.errors import InputError

if TYPE_CHECKING:
    from fastbert.data.chunks import Windows
    from fastbert.sentences.signatures import Encode, EncodeSparse, Score

CHUNK_CHARS = 4 << 20  # with CHUNK_TEXTS texts enough to sort well; a token takes some 70 bytes, those cut off, too
PROGRESS_DELAY_S = 2.0  # shorter work shows no progress bar


Method = TypeVar("Method", bound=Callable[..., Any])


def takes_sentences(method: Method) -> Method:
    """`inputs` may be given as `sentences`, its name in older releases of sentence-transformers."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if "sentences" in options:
            if args or "inputs" in options:
                raise TypeError("inputs and its old name sentences are both given: give inputs")
            options["inputs"] = options.pop("sentences")
        return method(self, *args, **options)

    return cast("Method", call)


def encodes(method: Callable[..., Any]) -> Encode:
    return cast("Encode", takes_sentences(method))


def encodes_sparse(method: Callable[..., Any]) -> EncodeSparse:
    return cast("EncodeSparse", takes_sentences(method))


def scores_pairs(method: Callable[..., Any]) -> Score:
    return cast("Score", takes_sentences(method))


def check_texts(texts: Any, *, pairs: bool = False, windows: Windows | None = None) -> list[Any]:
    """The texts as a list, and the pairs of texts where they may be there, too.

    Raises TypeError or InputError, naming the first that is none; InputError for a pair where texts are cut into
    `windows`.
    """
    check_iterable("texts", texts, "a string or a list of strings")
    listed = [texts] if isinstance(texts, str) else list(texts)
    for i, text in enumerate(listed):
        if pairs and isinstance(text, (list, tuple)):
            listed[i] = check_pair(f"texts[{i}]", text)
            if windows is not None:
                raise InputError(f"windows are for texts, and there are pairs of texts: texts[{i}]")
        else:
            check_text(f"texts[{i}]", text)
    return listed


def check_iterable(name: str, inputs: Any, wanted: str, *, pairs: bool = False) -> None:
    """Raises TypeError for what gives no inputs, or other ones than are meant: the names of a table's columns."""
    if hasattr(inputs, "columns"):  # of pandas, Polars, Arrow
        raise TypeError(f"{name} is a {type(inputs).__name__}; {_of_table(inputs, pairs)}")
    if isinstance(inputs, (bytes, Mapping)) or not isinstance(inputs, Iterable):
        raise TypeError(f"{name} is a {type(inputs).__name__}; it must be {wanted}")


def check_listed(name: str, inputs: Any, wanted: str, *, pairs: bool = False) -> None:
    """The same where a text by itself would be taken for a list of letters."""
    if isinstance(inputs, str):
        raise TypeError(f"{name} is a str; it must be {wanted}")
    check_iterable(name, inputs, wanted, pairs=pairs)


def _of_table(table: Any, pairs: bool) -> str:
    """How its columns are given. Arrow's are of scalars, which are no strings."""
    is_arrow = hasattr(table, "column_names")
    columns = [*(table.column_names if is_arrow else table.columns), "text", "text"]
    first, second = (f"table[{column!r}]{'.to_pylist()' if is_arrow else ''}" for column in columns[:2])
    if pairs:
        return f"give two of its columns as pairs, such as list(zip({first}, {second}))"
    return f"give one of its columns, such as {first}"


def check_pair(name: str, pair: Any) -> tuple[str, str]:
    """A pair of texts. Raises TypeError, or InputError for what is no Unicode."""
    if isinstance(pair, (str, bytes, Mapping)) or not isinstance(pair, Iterable):
        raise TypeError(f"{name} is a {type(pair).__name__}; it must be a pair of texts")
    texts = tuple(pair)
    if len(texts) != 2:
        raise TypeError(f"{name} has {len(texts)} parts; it must be a pair of texts")
    for i, text in enumerate(texts):
        check_text(f"{name}[{i}]", text)
    return texts


def check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} is a {type(text).__name__}, not a string")
    if text.isascii():  # known without a look at it
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not valid Unicode: {error}") from None


def chars_of(one: Any) -> int:
    """Of a text, or of the texts of a pair; 0 for what is neither, which is looked at later."""
    if isinstance(one, str):
        return len(one)
    return sum(len(part) for part in one if isinstance(part, str)) if isinstance(one, (list, tuple)) else 0


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


def in_places(
    count: int, parts: Iterable[tuple[np.ndarray, torch.Tensor]], device: str | None = None
) -> torch.Tensor | None:
    """`count` rows, of which each part says some places and what stands there, on `device`; None where no part is."""
    rows = None
    for places, part in parts:
        if count == 1:
            return part if device is None else part.to(device)
        if rows is None:
            rows = part.new_empty((count, part.shape[1]), device=device)
        rows[torch.from_numpy(places).to(rows.device)] = part.to(rows.device)
    return rows


def progress_bar(total: int | None, show: bool | None, **options: Any) -> Any:
    """A tqdm bar over texts. None: only on a terminal, and only once the work has taken PROGRESS_DELAY_S."""
    if not show if show is not None else sys.stderr is None or not sys.stderr.isatty():
        return _NoBar()
    from tqdm import tqdm

    delay = 0.0 if show else PROGRESS_DELAY_S
    options = {"desc": "encoding", "unit": " texts", "delay": delay, **options}
    return tqdm(total=total, dynamic_ncols=True, **options)


def bar_of(windows: Any) -> dict[str, Any]:
    """How a bar counts: tokens where texts are cut into `windows`, for one may take hours; else as it is."""
    return {} if windows is None else {"unit": " tokens", "unit_scale": True}


class _NoBar:
    """No bar: a tqdm that is disabled takes a fiftieth of one short text's time."""

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def update(self, count: int) -> None:
        pass

    def close(self) -> None:
        pass
