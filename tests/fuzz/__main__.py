"""python tests/fuzz [NAME ...]: run the fuzzers in turn for --minutes in all, or one round of a seed again.

Each fuzzer runs in a process of its own, which a fault of C++ may kill: that is a finding, too. The exit status is 1
when something was found.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE.parent / "support")]  # this package, conftest, what tests share

NAMES = ("models", "configs", "ops", "optimizer", "isas", "files", "cli", "resume")
NO_END = 900  # seconds without the end of a round, which takes a few: it hangs
# Bytes that a process may gain in the second half of its rounds. The first half fills caches, which libraries have for
# each shape: torch's own products took 400 MB in 20,000 cases, and no more then. A leak goes on.
GROWTH = 2**29
RUNNING: list[subprocess.Popen] = []


@dataclass
class Tally:
    """What one fuzzer did."""

    name: str
    cases: int = 0
    rounds: int = 0
    seconds: float = 0.0
    peak: int = 0  # bytes
    findings: dict[str, int] = field(default_factory=dict)  # how often each was met

    def add(self, key: str, text: str, repeat: str) -> None:
        self.findings[key] = self.findings.get(key, 0) + 1
        if self.findings[key] == 1:
            print(f"\nFOUND by {self.name}: {key}\n{text}\n  again: {repeat}", flush=True)


def main() -> int:
    options = parse()
    if options.worker is not None:
        return work(options)
    names = options.name or NAMES
    tallies = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    scratch, caches = (Path(tempfile.mkdtemp(prefix="fuzz-")) for _ in range(2))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches)  # which torch makes when it likes: not left by us
    try:
        for number, name in enumerate(names):
            share = None if options.minutes is None else options.minutes * 60 / len(names)
            tallies.append(run_fuzzer(name, options, options.seed + 10**6 * number, share, scratch))
    finally:
        for process in RUNNING:  # one, where this ends by Ctrl-C or SIGTERM
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(scratch)
        shutil.rmtree(caches)
    print(
        f"\n{'fuzzer':8} {'cases':>8} {'rounds':>7} {'findings':>9} {'seconds':>8} {'peak MB':>8}   seed {options.seed}"
    )
    for t in tallies:
        print(f"{t.name:8} {t.cases:8} {t.rounds:7} {len(t.findings):9} {t.seconds:8.0f} {t.peak / 1e6:8.0f}")
        for key, count in t.findings.items():
            print(f"    {count:4} x {key}")
    return 1 if any(t.findings for t in tallies) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("name", nargs="*", choices=[*NAMES, []], help="fuzzers; default: all")
    parser.add_argument("--minutes", type=float, help="for all together; without: --rounds, and findings are shrunk")
    parser.add_argument("--rounds", type=int, default=1, help="of seeds one after the other, in one process")
    parser.add_argument("--seed", type=int, help="of the first round; default: another each time")
    parser.add_argument("--without", default="", help="names of ops, steps or damages, with commas, to leave out")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(4), "little") % 10**8 * 10
    return options


def run_fuzzer(name: str, options: argparse.Namespace, seed: int, share: float | None, scratch: Path) -> Tally:
    """Processes of one fuzzer until its share of seconds is over; one that dies is followed by the next seed's."""
    tally, start = Tally(name), time.monotonic()
    seed = options.seed if share is None else seed
    while True:
        left = None if share is None else share - (time.monotonic() - start)
        if left is not None and left <= 0 and tally.rounds:
            break
        following = run_worker(name, options, seed, left, scratch, tally)
        if share is None or following is None:
            break
        seed = following
    for path in scratch.iterdir():
        tally.add(
            f"left {path.name[:6]}... in the temporary folder", str(path), f"python tests/fuzz {name} --seed {seed}"
        )
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    tally.seconds = time.monotonic() - start
    return tally


def run_worker(name, options, seed, left, scratch, tally) -> int | None:
    """One process; the seed to go on with where it died, None where it ended by itself."""
    read, write = os.pipe()
    command = [sys.executable, "-X", "faulthandler", str(HERE), name, "--seed", str(seed), "--worker", str(write)]
    command += ["--rounds", str(options.rounds)] if left is None else ["--minutes", str(max(left, 0) / 60)]
    again = f"python tests/fuzz {name}" + (f" --without {options.without}" if options.without else "")
    command += ["--without", options.without]
    with (scratch / "stderr").open("a+") as errors:
        process = subprocess.Popen(
            command,
            pass_fds=[write],
            env={**os.environ, "TMPDIR": str(scratch)},
            stderr=errors,
            stdout=errors,
            start_new_session=True,
        )
        os.close(write)
        RUNNING.append(process)
        current, sizes, of_compiler = seed, [0], 0
        with os.fdopen(read) as lines:
            while True:
                if not select.select([lines], [], [], NO_END)[0]:
                    os.killpg(process.pid, signal.SIGABRT)
                    break
                line = lines.readline()
                if not line:
                    break
                done = json.loads(line)
                current = done["seed"] + 1
                tally.rounds, tally.cases = tally.rounds + 1, tally.cases + done["cases"]
                tally.peak = max(tally.peak, done["bytes"])
                if done["has_compiled"]:
                    of_compiler += done["bytes"] - of_compiler - sizes[-1]
                sizes.append(done["bytes"] - of_compiler)
                if done["finding"]:
                    context = f"; with what came before: {again} --seed {seed} --rounds {current - seed}"
                    tally.add(*done["finding"], f"{again} --seed {done['seed']}{context}")
        code = process.wait()
        if grown := growth(sizes[1:]):
            tally.add("memory grows", grown, f"{again} --seed {seed} --rounds {len(sizes) - 1}")
        errors.seek(0)
        tail = errors.read()[-3000:]
    (scratch / "stderr").unlink()
    if code == 0:
        return None
    tally.add(f"the process ended with {code}", tail, f"{again} --seed {current}")
    return None if code == 1 else current + 1  # 1: Python's own error, outside of all cases


def growth(sizes: list[int]) -> str:
    """What is said of a process that had `sizes` bytes after its rounds, without what rounds with torch.compile have
    added: plain transformers models leave 4 MB of each graph, too. Empty: it does not grow."""
    if not sizes or sizes[-1] <= sizes[len(sizes) // 2] + GROWTH:
        return ""
    return f"from {sizes[len(sizes) // 2]:,} to {sizes[-1]:,} bytes in the second half of {len(sizes)} rounds"


def work(options: argparse.Namespace) -> int:
    """Rounds of one fuzzer, each told to the parent in a line of JSON."""
    import importlib

    import conftest  # noqa: F401  (Triton's interpreter, and torch as the tests have it)
    import torch
    from fuzz_driver import run_round

    torch.set_num_threads(2)
    fuzzer = importlib.import_module(f"fuzz_{options.name[0]}").FUZZER
    end = None if options.minutes is None else time.monotonic() + options.minutes * 60
    without = [name for name in options.without.split(",") if name]
    number = 0
    with os.fdopen(options.worker, "w") as report:
        while number < options.rounds if end is None else (time.monotonic() < end or number == 0):
            os.ftruncate(sys.stderr.fileno(), 0)  # cases tell there what they do: all that a crash leaves
            done = run_round(fuzzer, options.seed + number, without, shrink=end is None)
            finding = None if done.finding is None else [done.finding.key, done.finding.text]
            size = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            told = {"seed": done.seed, "cases": done.cases, "finding": finding, "bytes": size}
            print(json.dumps(told | {"has_compiled": done.has_compiled}), file=report)
            report.flush()
            number += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
