"""What tests cost: core-seconds of folders, files and set-ups, beside a budget. `make test` ends with what is over it.

A core-second is processor time of the worker and of the processes that it has waited for, so a busy machine changes it
little. `pytest --core-seconds FILE` writes all of it as a table.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

# By folder of tests/, for `make test` on two cores: pytest is to take 255 s there, 25 of them to import and collect.
BUDGET = {
    "ops": 91, "models": 72, "training": 53, "acceleration": 30, "cli": 27, "checkpoint": 25, "sentences": 24,
    "data": 19, "project": 17, "ecosystem": 17, "gpu": 10, "layers": 10, "serve": 10, "bench": 8, "fuzz": 7,
    "inspect": 5, "bulk": 2, "native": 1,
}  # fmt: skip
SLACK = 1.15  # clocks differ from machine to machine


def processor_time() -> float:
    return sum(os.times()[:4])


class CoreSeconds:
    """A plugin. Workers measure, and the reports of their tests carry it; who prints adds them up."""

    def __init__(self, table: Path | None, is_whole: bool):
        self.table, self.is_whole = table, is_whole
        self.last = processor_time()
        self.spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])  # of a file: all, set-up, tests

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.last = processor_time()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = processor_time()
        report.core_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report):
        spent = self.spent[report.nodeid.partition("::")[0]]
        core_seconds = vars(report).get("core_seconds", 0.0)  # a worker that died has none
        spent[0] += core_seconds
        spent[1] += core_seconds if report.when == "setup" else 0.0
        spent[2] += report.when == "call"

    def of_folders(self) -> dict[str, list[float]]:
        folders: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
        for file, spent in self.spent.items():
            folder = folders[Path(file).parts[1]]
            folder[:] = [a + b for a, b in zip(folder, spent, strict=True)]
        return dict(sorted(folders.items(), key=lambda of: -of[1][0]))

    def pytest_terminal_summary(self, terminalreporter):
        if self.table is not None:
            self.table.write_text(self.as_table(), encoding="utf-8")
        if self.is_whole:
            terminalreporter.write_line(self.summary())

    def summary(self) -> str:
        folders = self.of_folders()
        total, budget = sum(spent for spent, *_ in folders.values()), sum(BUDGET.values())
        over = [f"{name} {of[0]:.0f} of {BUDGET[name]}" for name, of in folders.items() if of[0] > SLACK * BUDGET[name]]
        said = f"over budget: {', '.join(over)}" if over else "no folder is over its budget"
        return f"tests took {total:.0f} core-seconds of {budget} (tests/support/core_seconds.py); {said}"

    def as_table(self) -> str:
        rows = ["| | core-seconds | set-up | tests |", "|---|--:|--:|--:|"]
        for folder, of in self.of_folders().items():
            rows.append(f"| **{folder}** | **{of[0]:.0f}** | **{of[1]:.0f}** | **{of[2]}** |")
            files = [(file, spent) for file, spent in self.spent.items() if Path(file).parts[1] == folder]
            for file, (total, setup, count) in sorted(files, key=lambda of: -of[1][0]):
                if total >= 1:
                    rows.append(f"| {Path(file).name} | {total:.1f} | {setup:.1f} | {count} |")
        return "\n".join(rows) + "\n"
