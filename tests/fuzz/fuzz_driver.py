"""What every fuzzer shares: how a case draws its choices, and how a round of cases runs, ends and is repeated.

A fuzzer is a function of a `Draw`. It makes all of its choices through it, says what it does by `draw.note`, and raises
where something is wrong. A round is a number of cases that follow from one seed alone.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import hypothesis
import hypothesis.errors
from draw import Draw
from hypothesis import strategies


@dataclass(frozen=True)
class Fuzzer:
    """`case` is run `cases` times a round. Cases that start processes (`is_slow`) are not shrunk."""

    name: str
    case: Callable[[Draw], None]
    cases: int
    is_slow: bool = False


@dataclass
class Finding:
    """What a case raised: `key` is alike for findings alike."""

    key: str
    text: str


@dataclass
class Round:
    seed: int
    cases: int = 0
    has_compiled: bool = False
    finding: Finding | None = None
    draw: Draw | None = field(default=None, repr=False)


def run_round(
    fuzzer: Fuzzer, seed: int, without: Sequence[str] = (), shrink: bool = False, cases: int | None = None
) -> Round:
    """The cases of one seed, up to the first that raises; `shrink` looks for the smallest that raises the same.

    `cases`: their number, where it is not the fuzzer's own.
    """
    done, cases = Round(seed), cases or fuzzer.cases

    def run_case(integer: Callable[[int, int], int]) -> None:
        done.cases += 1
        done.draw = Draw(integer, frozenset(without))
        try:
            fuzzer.case(done.draw)
        finally:
            done.has_compiled |= done.draw.has_compiled

    try:
        if fuzzer.is_slow:
            for number in range(cases):
                run_case(random.Random(f"{seed}/{number}").randint)
        else:
            _hypothesis_round(run_case, cases, seed, shrink)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit) or done.draw is None:
            raise
        done.finding = _finding(error, done.draw)
    return done


def _hypothesis_round(run_case: Callable, cases: int, seed: int, shrink: bool) -> None:
    phases = (hypothesis.Phase.generate, *((hypothesis.Phase.shrink,) if shrink else ()))

    @hypothesis.settings(
        max_examples=cases,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.seed(seed)
    @hypothesis.given(strategies.data())
    def cases_of_the_round(data):
        run_case(lambda low, high: data.draw(strategies.integers(low, high)))

    cases_of_the_round()


def _finding(error: BaseException, draw: Draw) -> Finding:
    if isinstance(error, hypothesis.errors.FlakyFailure):
        error = error.exceptions[0]
        draw.note("(and not again in the same process: threads, or what a process keeps)")
    lines = str(error).splitlines() or [""]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/fuzz_" in frame.filename or "/fastbert/" in frame.filename]
    kind = re.sub(r"[-+]?\d[\d.e+-]*", "#", re.sub(r"'?/\S+/", "", f"{type(error).__name__}: {lines[0]}"))[:100]
    where = f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].name}" if ours else "outside"
    key = f"{kind} ({draw.doing if isinstance(error, AssertionError) else where})"
    shown = "".join(traceback.format_list([*ours[-4:], *(frame for frame in frames[-3:] if frame not in ours)]))
    text = "\n".join([f"{type(error).__name__}: {str(error)[:1500]}", *(f"  {note}" for note in draw.notes), shown])
    return Finding(key, text)
