"""Texts whose words have tags: CoNLL files, a word a line, or rows with a list of words and one of tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastbert.data.sources import check_columns, delimiter_for, load_source
from fastbert.data.text_files import lines_of, suffix_of
from fastbert.errors import InputError, TextFileError
from fastbert.training.finetuning.inputs.labels import in_order, plain
from fastbert.training.options import FinetuneOptions

CONLL = (".conll", ".bio", ".iob", ".iob2", ".txt")  # the ends of names of files with a word a line
WORDS = ("tokens", "words")
_MAY_BE_COMMENT = re.compile(r"#\s|#(begin|end) document\b")  # "#" may be a word, too
_OF_DOCUMENTS = re.compile(r"#(begin|end) document\b")
_TAG = re.compile(r"O|[BIESLUM]-\S+")
_TAGS = ("ner_tags", "tags", "labels", "pos_tags", "label")


@dataclass(frozen=True)
class Tagged:
    """Texts in words, and a tag for each word. columns: where the words were; empty for CoNLL files."""

    words: list[list[str]] = field(repr=False)
    tags: list[list[str]] = field(repr=False)
    name: str
    columns: tuple[str, ...] = ()


def load_tagged(options: FinetuneOptions) -> tuple[Tagged, Tagged | None, tuple[str, ...]]:
    """(what to learn from, what to judge by, the tags). Raises InputError."""
    if not options.train:
        raise InputError("train is missing: the file to learn from")
    _check_options(options)
    train = _load(options.train, options, "train")
    held_out = _load(options.eval, options, "validation") if options.eval else None
    names = tuple(in_order({tag for tags in train.tags for tag in tags}))
    names = (*(name for name in names if name == "O"), *(name for name in names if name != "O"))
    if len(names) < 2:
        raise InputError(f"{train.name} has one tag alone, {names[0]!r}: there is nothing to learn")
    if held_out is not None:
        check_tags(held_out, names)
    return train, held_out, names


def _check_options(options: FinetuneOptions) -> None:
    """Raises InputError for an option that would be ignored."""
    conll = [path for path in (*options.train, *options.eval) if is_conll(path)]
    if options.hash_lines != "auto" and not conll:
        raise InputError(f"hash_lines is for CoNLL files ({', '.join(CONLL)}), and {options.train[0]} is none")
    column_options = [name for name in ("text_columns", "label_column") if getattr(options, name)]
    if column_options and len(conll) == len(options.train) + len(options.eval):
        raise InputError(f"{column_options[0]} is for files that have columns by name, and {conll[0]} has none")


def _load(names: Sequence[str], options: FinetuneOptions, split: str) -> Tagged:
    name = ", ".join(names)
    sign = delimiter_for(names, (*options.train, *options.eval), options.delimiter)
    if not sign and all(is_conll(path) for path in names):
        texts = [text for path in names for text in read_conll(Path(path), hash_lines=options.hash_lines)]
        tagged = Tagged(
            [[word for word, _ in text] for text in texts], [[tag for _, tag in text] for text in texts], name
        )
    else:
        rows = load_source(list(names), split, delimiter=sign)
        columns = rows.column_names
        words = options.text_columns[0] if options.text_columns else _first(columns, WORDS, name, "words")
        tags = options.label_column or _first(columns, _TAGS, name, "tags")
        check_columns(rows, [words, tags], name)
        tagged = Tagged(rows[words][:], plain(rows, tags), name, (words,))
    _check(tagged)
    return tagged


def is_conll(path: str) -> bool:
    return suffix_of(Path(path)) in CONLL


def read_conll(path: Path, *, with_tags: bool = True, hash_lines: str = "auto") -> list[list[tuple[str, str]]]:
    """(word, tag) of each text: the first column and the last one, by tabs or blanks; a blank line ends a text.
    Comments above a text ("# id 1", "#begin document") are left out.

    hash_lines: what a line that begins with "# " is where the file does not tell, "comment" or "word"; "auto": an
    error. Without tags, lines with more columns than any word has are comments.

    Raises InputError, naming the line: a word without a tag, or what may be a comment or a word.
    """
    try:
        lines = [line.strip() for line in lines_of(path)]
    except TextFileError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    rows = [[part.strip() for part in line.split("\t" if "\t" in line else None)] for line in lines]
    words = _Words.of(lines, rows)
    texts: list[list[tuple[str, str]]] = [[]]
    unclear = list[int]()
    for number, (line, columns) in enumerate(zip(lines, rows, strict=True), 1):
        if not line:
            texts.append([])
            continue
        is_word: bool | None = columns[0] != "-DOCSTART-"
        if _MAY_BE_COMMENT.match(line):
            is_word = words.has(line, columns, is_first=not texts[-1], with_tags=with_tags)
            if is_word is None and hash_lines == "auto":
                unclear.append(number)
            is_word = hash_lines == "word" if is_word is None else is_word
        elif is_word and with_tags and len(columns) < 2:
            raise InputError(f"{path}, line {number}: {line!r} is no word with a tag")
        if is_word:
            texts[-1].append((columns[0], columns[-1]))
    if unclear:
        raise _unclear(path, lines, unclear)
    return [text for text in texts if text]


@dataclass(frozen=True)
class _Words:
    """What a file's words look like, by the lines that are no comments for sure: the shapes of lines, whether they have
    tabs and how many columns, and the tags.
    """

    shapes: set[tuple[bool, int]]
    tags: set[str]

    @classmethod
    def of(cls, lines: Sequence[str], rows: Sequence[list[str]]) -> _Words:
        words = cls(set(), set())
        for line, columns in zip(lines, rows, strict=True):
            if line and columns[0] != "-DOCSTART-" and not _MAY_BE_COMMENT.match(line):
                words.shapes.add(("\t" in line, len(columns)))
                words.tags.add(columns[-1])
        return words

    def has(self, line: str, columns: list[str], *, is_first: bool, with_tags: bool) -> bool | None:
        """Whether a line is a word, and no comment; None: it may be either."""
        has_tab = "\t" in line
        if self.shapes and not has_tab and all(tab for tab, _ in self.shapes):
            return False  # whatever its last word is: "# text = the cat ." has the tag of full stops behind it
        is_like_words = (has_tab, len(columns)) in self.shapes or not self.shapes
        is_tagged = columns[-1] in self.tags or _TAG.fullmatch(columns[-1]) is not None
        if not with_tags and self.shapes and len(columns) > max(width for _, width in self.shapes):
            return False
        if is_like_words and (is_tagged or (has_tab and columns[0] == "#")):
            return True
        if is_first and not is_tagged and (not is_like_words or _OF_DOCUMENTS.match(line)):
            return False
        return None


def _unclear(path: Path, lines: Sequence[str], numbers: Sequence[int]) -> InputError:
    others = ", ".join(map(str, numbers[1:6])) + (", ..." if len(numbers) > 6 else "")
    more = f" (as may line {others})" if others else ""
    return InputError(
        f"{path}, line {numbers[0]}: {lines[numbers[0] - 1]!r:.80} may be a comment, or a word with a tag{more}: say"
        " --hash-lines comment, or word. Where a file has both, tabs between the columns tell them apart"
    )


def _first(columns: Sequence[str], usual: Sequence[str], where: str, what: str) -> str:
    for name in usual:
        if name in columns:
            return name
    flag = "--text-columns" if what == "words" else "--label-column"
    raise InputError(
        f"no column of {where} has a name that {what} usually have; choose one with {flag}: {', '.join(columns)}"
    )


def _check(tagged: Tagged) -> None:
    """Raises InputError, naming the text."""
    if not tagged.words:
        raise InputError(f"{tagged.name} holds no texts")
    for i, (words, tags) in enumerate(zip(tagged.words, tagged.tags, strict=True)):
        where = f"{tagged.name}, text {i + 1}"
        if not _is_list(words) or not _is_list(tags):
            raise InputError(
                f"{where}: a text needs a list of words, and one of tags; it has {words!r:.60} and {tags!r:.60}"
            )
        if not words:
            raise InputError(f"{where} has no words: leave such texts out")
        if len(words) != len(tags):
            raise InputError(f"{where} has {len(words)} words and {len(tags)} tags")
        if bad := [word for word in words if not isinstance(word, str) or not word.strip()]:
            raise InputError(f"{where}: {bad[0]!r} is no word")
        if bad := [tag for tag in tags if tag is None]:
            raise InputError(f"{where}: a tag is missing")
        tagged.tags[i] = [str(tag) for tag in tags]


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def check_tags(tagged: Tagged, names: Sequence[str]) -> None:
    """Raises InputError, naming the text: a tag that the training data do not have."""
    known = set(names)
    for i, tags in enumerate(tagged.tags):
        if stranger := next((tag for tag in tags if tag not in known), None):
            raise InputError(
                f"{tagged.name}, text {i + 1}: the tag {stranger!r} is none of the {len(names)} of the training data:"
                f" {', '.join(names)}"
            )
