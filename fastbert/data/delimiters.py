"""What is between the fields of a .csv or a .tsv: found by its first lines, or given. Nothing here imports torch."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice, tee
from pathlib import Path

from fastbert.errors import TextFileError

HELP = "the character between the fields of a .csv or a .tsv, or tab; by default it is found from the first lines"
MAX_LINE_BYTES = 16 << 20  # a longer line is taken for a binary file, and never read into memory
KINDS = (".csv", ".tsv")
_DELIMITERS = ",;\t|"  # of what spreadsheets write into a .csv
_FIRST_ROWS = 20  # that are looked at where the header does not tell
_FIRST_LINES = 10_000  # that these rows may take: a quotation mark that is left open takes all lines behind it
_HEADER_LINES = 100  # of names in quotation marks, at most
_QUOTED = re.compile(r'(?:^|(?<=[,;\t|]))"(?:[^"]|"")*"(?!")')  # a whole field: a mark inside of one is doubled
_OPEN = re.compile(r'(?:^|(?<=[,;\t|]))".*', re.DOTALL)  # a field that has not ended, once whole ones are left out


def sign_of(delimiter: str) -> str:
    """The character that a user means. Raises TextFileError."""
    sign = "\t" if delimiter in ("tab", "\\t") else delimiter
    if len(sign) != 1 or not sign.isascii() or sign.isalnum() or sign in '"\r\n\0':
        raise TextFileError(f"delimiter is {delimiter!r}; it must be one character, such as ';', or tab")
    return sign


def check_delimiter(delimiter: str | None, name: str, suffix: str | None) -> None:
    """Raise TextFileError where a delimiter is given for a file of a kind that has none."""
    if delimiter is not None and suffix not in KINDS:
        raise TextFileError(f"{name}: a delimiter is for {' and '.join(KINDS)} files; leave out --delimiter")


def delimiter_of(path: Path, lines: Iterable[str], *, is_tsv: bool, delimiter: str | None = None) -> str:
    """What is between the fields of a .csv or a .tsv, by its header, which begins with the first of its lines that is
    not blank. What stands in the quotation marks of a .csv is a name. Where a header of a .csv may be read in several
    ways, the first rows decide: most of them have as many fields as it, where a few may be broken.

    delimiter: what the user says that it is.

    Raises TextFileError: it is not clear, a .tsv has no tabs, or a header with several columns has not what was given.
    """
    rest = iter(lines)
    header, outside = _header(rest, is_tsv)
    shown = _shown(header)
    signs = [sign for sign in _DELIMITERS if sign in outside]
    if delimiter is not None:
        sign = sign_of(delimiter)
        if signs and sign not in outside:
            raise TextFileError(f"{path}: the first line has no {sign!r}, which was given as the delimiter: {shown}")
        return sign
    if is_tsv:
        if "\t" not in signs and signs:
            raise TextFileError(f"{path}: the first line has no tab: {shown}; is this a .csv? Or say --delimiter")
        return "\t"
    if len(signs) < 2:
        return signs[0] if signs else ","
    first = chain(header, islice(rest, _FIRST_LINES))
    counts = [_fitting(copy, sign) for sign, copy in zip(signs, tee(first, len(signs)), strict=True)]
    if not max(counts) or counts.count(max(counts)) > 1:
        raise TextFileError(
            f"{path}: what is between the fields of the first line, {' or '.join(map(repr, signs))}? {shown}: say it"
            " with --delimiter"
        )
    return signs[counts.index(max(counts))]


def _header(lines: Iterator[str], is_tsv: bool) -> tuple[list[str], str]:
    """The lines of a header, and what of them stands in no quotation marks. The lines behind it are left."""
    header = [next((line for line in lines if line.strip()), "")]
    if is_tsv:
        return header, header[0]
    while _OPEN.search(outside := _QUOTED.sub("", "".join(header))) and len(header) < _HEADER_LINES:
        if (line := next(lines, None)) is None:
            break
        header.append(line)
    return header, _OPEN.sub("", outside)


def _fitting(lines: Iterator[str], sign: str) -> int:
    """How many of the first rows of a .csv have as many fields as its header. Some may be broken."""
    csv.field_size_limit(MAX_LINE_BYTES)
    rows, widths = csv.reader(lines, delimiter=sign, strict=True), list[int]()
    while len(widths) <= _FIRST_ROWS:
        try:
            row = next(rows)
        except StopIteration:
            break
        except csv.Error:
            widths.append(0)
            continue
        if row:  # no blank line
            widths.append(len(row))
    return widths[1:].count(widths[0]) if widths and widths[0] else 0


def _shown(header: list[str], limit: int = 40) -> str:
    shown = json.dumps("".join(header).rstrip("\r\n"))
    return shown if len(shown) <= limit else shown[:limit] + "..."
