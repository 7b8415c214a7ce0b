"""How a case draws its choices: from a fuzzer's, or from a seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

Option = TypeVar("Option")


class Draw:
    """The choices of one case. `without`: names that no case may choose, to look behind what is known already."""

    def __init__(self, integer: Callable[[int, int], int], without: frozenset[str] = frozenset()):
        self.integer, self.without = integer, without
        self.notes: list[str] = []
        self.doing = ""  # by which findings are told apart
        self.has_compiled = False  # torch.compile, which keeps megabytes of each graph for as long as the process lives

    def choice(self, options: Iterable[Option]) -> Option:
        """One of the options; the first is the simplest, to which a finding is shrunk. LookupError: there is none."""
        allowed = [option for option in options if not (isinstance(option, str) and option in self.without)]
        if not allowed:
            raise LookupError("nothing to choose from")
        return allowed[self.integer(0, len(allowed) - 1)]

    def flag(self, one_in: int = 2) -> bool:
        """True once in `one_in` cases."""
        return self.integer(0, one_in - 1) == one_in - 1

    def seed(self) -> int:
        """For torch's generator: values are not drawn one by one."""
        return self.integer(0, 2**31 - 1)

    def note(self, text: str) -> None:
        """What the case does next: told with a finding, and to stderr, which outlives a crash."""
        self.notes.append(text)
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
