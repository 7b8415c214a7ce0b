"""The folder of a run: `run.yaml` (what repeats it), `log.jsonl`, `checkpoints/`, and at the end the model,
`metrics.json`, `chart.png` and a model card.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastbert.checkpoint.saving import beside, sync
from fastbert.config import ConfigError
from fastbert.training.distributed import World
from fastbert.training.options import MAY_CHANGE, RunOptions, options_of, read_yaml, to_yaml

RUN, LOG, METRICS, CHART = "run.yaml", "log.jsonl", "metrics.json", "chart.png"


def check(options: RunOptions) -> Path:
    """The folder, which is new or empty, or holds the run that goes on. Nothing is written.

    Raises ConfigError: no folder was given, it holds a run or other files, or a run with other options.
    """
    if not options.output:
        raise ConfigError("output is missing: the folder that the run writes")
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; output must be a folder")
    if options.resume:
        _check_same(folder, options)
    elif (folder / RUN).exists():
        raise ConfigError(f"{folder} holds a run already: give --resume to go on with it, or another output")
    elif folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: give a new folder")
    return folder


def _check_same(folder: Path, options: RunOptions) -> None:
    if not (folder / RUN).is_file():
        raise ConfigError(f"{folder} holds no run to go on with: there is no {RUN}")
    before = options_of(type(options), read_yaml(folder / RUN), str(folder / RUN))
    for name, value in vars(before).items():
        if name not in MAY_CHANGE and value != getattr(options, name):
            raise ConfigError(
                f"the run in {folder} has {name} {value!r}, and {getattr(options, name)!r} was given: a run goes on as"
                " it began"
            )


def begin(folder: Path, options: RunOptions) -> None:
    """Write run.yaml. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / RUN, f"# fastbert {options.command} --config {RUN} --output NEW_FOLDER\n{to_yaml(options)}")


@contextmanager
def held(folder: Path, world: World) -> Iterator[None]:
    """No other process goes on with this run meanwhile. A lock of POSIX's: it ends with this process, however that
    ends, and forked workers do not have it. Raises ConfigError on all ranks: another process has it.
    """
    import fcntl  # here, as in checkpoint.saving

    file, refused = None, False
    if world.is_main:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        file = (folder / "checkpoints/.lock").open("w")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            refused = True
        except OSError:  # a file system without locks, some network ones
            pass
    try:
        if any(world.gather(refused)):
            raise ConfigError(f"another process works on the run in {folder}: wait for its end, or stop it")
        yield
    finally:
        if file is not None:
            file.close()


def write(path: Path, text: str) -> None:
    """Replace a file whole or not at all. Raises OSError."""
    with beside(path.parent) as new:
        (new / path.name).write_text(text, encoding="utf-8")
        sync(new / path.name)
        (new / path.name).replace(path)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The log's rows."""
    return [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
