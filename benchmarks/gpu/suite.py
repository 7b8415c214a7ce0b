"""`make gpu`: everything that needs a GPU, in parts, each in a process of its own and with a file of its own.

A part whose results of this commit, these kernels and this machine are there is not run again, so an interrupted run
goes on where it was, in another `--output` too: what the default folder has is taken over, and the copy below build/.
What Triton and Inductor compile is kept there as well, so that the next command finds it. `--smoke` runs the parts on
small sizes, on a CPU too, with Triton's interpreter: its numbers mean nothing, its checks do. `--part cpu` needs no
GPU. `git diff --stat COMMIT -- kernels csrc fastbert/ops` says what has changed since a result's commit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import stamp as stamps
from benchmarks.gpu.record import (
    Record,
    failures_of_a_kernel,
    open_record,
    parts_table,
    problems,
    run_limited,
    targets_table,
    to_markdown,
)


class Part(NamedTuple):
    """Where its function over a Record is, after how many seconds it is ended, and whether it must be asked for."""

    module: str
    function: str
    limit_seconds: int
    is_extra: bool = False


# What is soon through and tells the most comes first; the kernels' part leaves them compiled for the others.
PARTS = {
    "steps": Part("benchmarks.gpu.steps.part", "run_part", 580),
    "kernels": Part("benchmarks.gpu.kernels", "run_part", 300),
    "ops": Part("benchmarks.gpu.ops", "run_part", 360),
    "profile": Part("benchmarks.gpu.profile", "run_part", 200),
    "models": Part("benchmarks.gpu.models", "run_part", 580),
    "sanitizer": Part("benchmarks.gpu.kernels", "run_sanitizer", 300),
    "cpu": Part("benchmarks.gpu.cpu", "run_part", 300),
    "tune": Part("benchmarks.gpu.tune", "run_part", 480, is_extra=True),
}
NO_GPU = ("cpu",)  # the parts that need none
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}  # below build/gpu-cache
LEAST_SECONDS = 30.0  # a part is not begun with less
MARGIN_SECONDS = 10.0  # that a part has to end by itself, before it is ended
HAS_FAILED = 4  # the exit code of a part's process; 1 is that of an unexpected exception


def run_part(record: Record) -> None:
    """One part, here; what it raises outside of its entries fails it as a whole."""
    part = PARTS[record.part]
    start = time.perf_counter()
    record.entries.pop(record.part, None)
    try:
        getattr(importlib.import_module(part.module), part.function)(record)
        record.complete = True
    except failures_of_a_kernel() as error:
        record.add(record.part, {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"})
    record.seconds += time.perf_counter() - start
    record.write()


def run_in_a_process(record: Record, arguments: list[str], left: float) -> None:
    """A part in a child, whose file is what it has found; a child that dies, or takes too long, fails its part."""
    limit, failed = min(left, PARTS[record.part].limit_seconds), None
    command = [sys.executable, "-m", "benchmarks.gpu", "--inside", record.part, *arguments]
    start = time.perf_counter()
    try:
        code = run_limited([*command, "--within", f"{limit - MARGIN_SECONDS:.0f}"], limit).returncode
        if code not in (0, HAS_FAILED):
            failed = f"its process ended with exit code {code}"
    except subprocess.TimeoutExpired:
        failed = f"not finished after {limit:.0f} s"
    if failed is not None:
        found = open_record(record.part, record.path.parent, record.stamp, record.say, record.smoke)
        found.complete, found.seconds = False, found.seconds + time.perf_counter() - start
        found.add(record.part, {"failed": failed})


def contents_of(folder: Path) -> list[dict[str, Any]]:
    paths = [folder / f"{part}.json" for part in PARTS]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def write_tables(folder: Path) -> list[dict[str, Any]]:
    """results.md, of what there is by now; nothing where there is nothing."""
    contents = contents_of(folder)
    if contents:
        (folder / "results.md").write_text(to_markdown(contents) + "\n", encoding="utf-8")
    return contents


def together(parts: list[str]) -> list[str]:
    """Whose results lie in a folder for which these parts are asked: an extra part's alone, or all others'. With
    results.md that is as many files as a lent machine gives back.
    """
    has_extra = any(PARTS[part].is_extra for part in parts)
    return parts if has_extra else [name for name, part in PARTS.items() if not part.is_extra]


def take_over(earlier: Path, folder: Path, stamp: dict[str, Any], parts: list[str]) -> None:
    """Copy to `folder` what another one has of these parts of the same run, so that it goes on there."""
    for part in parts:
        source, target = earlier / f"{part}.json", folder / f"{part}.json"
        if not source.exists() or target.exists():
            continue
        if stamps.same_run(json.loads(source.read_text(encoding="utf-8"))["stamp"], stamp):
            shutil.copyfile(source, target)


def keep_copy(folder: Path, kept: Path) -> None:
    """Of the parts' files, where a later command with another `--output` finds them."""
    kept.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if (folder / f"{part}.json").exists():
            shutil.copyfile(folder / f"{part}.json", kept / f"{part}.json")


def run(
    parts: list[str],
    template: Record,
    again: bool = False,
    arguments: list[str] | None = None,
    within: float = math.inf,
    kept: Path | None = None,
) -> int:
    """Run what is not there yet; `arguments` are those of the parts' processes, None runs them here.

    `kept`: a folder that gets a copy of the parts' files after each part.

    The exit code: 1 where a part failed, or was not begun because less than LEAST_SECONDS were left `within` the
    seconds given. `template`: a record of any part, whose folder, stamp and manners all share.
    """
    folder, say, deadline, late = template.path.parent, template.say, time.monotonic() + within, []
    for part in parts:
        record = open_record(part, folder, template.stamp, say, template.smoke, again)
        if record.is_done:
            say(f"{part}: done already, in {record.path}")
            continue
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            late.append(part)
            continue
        say(f"{part} ...")
        record.complete, record.deadline = False, deadline
        if arguments is None:
            run_part(record)
        else:
            if again:
                record.path.unlink(missing_ok=True)
            run_in_a_process(record, arguments, left)
        write_tables(folder)
        if kept is not None:
            keep_copy(folder, kept)
    contents = write_tables(folder)
    for line in ("", *problems(contents), "", *targets_table(contents), "", *parts_table(contents)):
        say(line)
    if late:
        say(f"not begun within {within:.0f} s, the same command goes on with: {', '.join(late)}")
    asked = [content for content in contents if content["part"] in parts]
    is_good = len(asked) == len(parts) and all(_is_good(content) for content in asked)
    say(f"results: {folder}")
    return 0 if is_good else 1


def keep_caches() -> None:
    """What this command compiles, the next one finds: in a folder of the checkout, unless the user has named others."""
    for variable, name in CACHES.items():
        os.environ.setdefault(variable, str(stamps.ROOT / "build" / "gpu-cache" / name))


def _is_good(content: dict[str, Any]) -> bool:
    return content["complete"] and not any("failed" in entry for entry in content["entries"].values())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    extra = ", ".join(name for name, part in PARTS.items() if part.is_extra)
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help=f"only this one; may be repeated; {extra} only so"
    )
    parser.add_argument(
        "--within",
        type=float,
        default=480.0,
        metavar="SECONDS",
        help="end by then, in good order; the same command goes on from there (default: 480)",
    )
    parser.add_argument("--output", type=Path, help="folder (default: benchmarks/results/<the GPU's name>)")
    parser.add_argument("--again", action="store_true", help="run what is done already, too")
    parser.add_argument("--smoke", action="store_true", help="small sizes, on a CPU too")
    parser.add_argument("--commit", help="of the sources, where they came without their git folder")
    parser.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    parts = args.part or [name for name, part in PARTS.items() if not part.is_extra]
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not args.smoke and not {*([args.inside] if args.inside else parts)} <= {*NO_GPU}:
        _say(
            "there is no GPU here; --smoke runs the parts on small sizes, in Triton's interpreter, and"
            f" --part {' --part '.join(NO_GPU)} needs none"
        )
        return 1
    if has_gpu:
        keep_caches()
    elif args.smoke:
        from benchmarks.gpu.simulated.interpreter import mend_triton_interpreter

        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported
        mend_triton_interpreter()
    stamp = stamps.make_stamp(args.commit)
    machine = stamps.slug(stamp["gpu"] or stamp["cpu"])
    default = stamps.ROOT / "build" / "gpu-smoke" if args.smoke else stamps.RESULTS / machine
    folder: Path = args.output or default
    folder.mkdir(parents=True, exist_ok=True)
    if args.smoke:
        torch.set_num_threads(1)  # sizes are small, and threads that wait spin
    if args.inside:
        record = open_record(args.inside, folder, stamp, _say, args.smoke)
        record.deadline = time.monotonic() + args.within
        run_part(record)
        return 0 if record.is_done else HAS_FAILED
    kept = None if args.smoke else stamps.ROOT / "build" / "gpu-results" / machine
    for earlier in (default, kept):
        if earlier is not None and not args.smoke and folder != earlier:
            take_over(earlier, folder, stamp, together(parts))
    arguments = ["--output", str(folder), *(["--smoke"] if args.smoke else [])]
    arguments += ["--commit", args.commit] if args.commit else []
    template = open_record("kernels", folder, stamp, _say, args.smoke)
    return run(parts, template, args.again, arguments, args.within, kept)
