"""Entries of many dicts, compared at once: by the extension where it is there (csrc/dict_entries.h), else by maps,
which make no Python frame or loop. Hundreds of them are looked at before each text (layers/guard.py).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from fastbert.native.availability import extension_error


class DictEntries:
    """Functions of lists of equal length: a dict, a key, and what was there; None stands for nothing there.

    are_same: the same objects, as tensors must be, whose `==` compares values. are_equal: equal values. are_false: all
    that is there is false, as an empty dict is. have_types: of lists of objects and of their types.
    """

    def __init__(
        self,
        are_same: Callable[[list[dict], list[str], list[Any]], bool],
        are_equal: Callable[[list[dict], list[str], list[Any]], bool],
        are_false: Callable[[list[dict], list[str]], bool],
        have_types: Callable[[list[Any], list[type]], bool],
    ):
        self.are_same, self.are_equal, self.are_false, self.have_types = are_same, are_equal, are_false, have_types


def _are_same(dicts: list[dict], keys: list[str], objects: list[Any]) -> bool:
    return all(map(is_, map(dict.get, dicts, keys), objects))


def _are_equal(dicts: list[dict], keys: list[str], values: list[Any]) -> bool:
    return list(map(dict.get, dicts, keys)) == values


def _are_false(dicts: list[dict], keys: list[str]) -> bool:
    return not any(map(dict.get, dicts, keys))


def _have_types(objects: list[Any], types: list[type]) -> bool:
    return list(map(type, objects)) == types


PYTHON = DictEntries(_are_same, _are_equal, _are_false, _have_types)


def dict_entries() -> DictEntries:
    if extension_error() is not None:
        return PYTHON
    from fastbert import _C

    return DictEntries(_C.are_same, _C.are_equal, _C.are_false, _C.have_types)
