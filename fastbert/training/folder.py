"""The folder of a run: `run.yaml` (what repeats it), `data.json` (a hash of each source of its data), `log.jsonl`,
`checkpoints/`, and at the end the model, `metrics.json`, `chart.png` and a model card.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastbert.data.sources import digest_of
from fastbert.errors import ConfigError, InputError
from fastbert.files import parse_json, write_text
from fastbert.training.distributed import ProcessGroup
from fastbert.training.options import DATA, MAY_CHANGE, RunOptions, options_of, read_yaml, to_yaml

RUN, LOG, METRICS, CHART = "run.yaml", "log.jsonl", "metrics.json", "chart.png"
DIGESTS = "data.json"  # {option: {source: SHA-256}}


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


def check_data(folder: Path, options: RunOptions, process_group: ProcessGroup) -> None:
    """Before anything is made of the data of a run that goes on: rank 0 reads them, and all ranks hear what it says.

    Raises ConfigError: a source has other content than when the run began.
    """
    said = ""
    if process_group.is_main:
        try:
            _check_same_data(folder, options)
        except (ConfigError, InputError) as error:
            said = str(error)
    if said := next(filter(None, process_group.gather(said)), ""):
        raise ConfigError(said)


def _check_same_data(folder: Path, options: RunOptions) -> None:
    if not (folder / DIGESTS).is_file():
        warnings.warn(
            f"{folder} has no {DIGESTS}, as runs of older versions: whether its data have changed since it began is not"
            " known. What they are now is kept from here on",
            stacklevel=2,
        )
        _write_digests(folder, options)
        return
    before, now = parse_json((folder / DIGESTS).read_bytes(), folder / DIGESTS, ConfigError), _digests(options)
    for name, sources in now.items():
        for source, digest in sources.items():
            if (old := before.get(name, {}).get(source)) != digest:
                raise ConfigError(
                    f"the run in {folder} has {name} {source!r} with SHA-256 {str(old)[:12]}..., and it has"
                    f" {digest[:12]}... now: a run goes on as it began. Restore it, or begin a new run from its model"
                )


def _digests(options: RunOptions) -> dict[str, dict[str, str]]:
    return {name: {source: digest_of(source, split) for source in vars(options)[name]} for name, split in DATA.items()}


def _write_digests(folder: Path, options: RunOptions) -> None:
    write_text(folder / DIGESTS, json.dumps(_digests(options), indent=2, ensure_ascii=False) + "\n")


def begin(folder: Path, options: RunOptions) -> None:
    """Write data.json and then run.yaml, which makes it the folder of a run. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_digests(folder, options)
    write_text(folder / RUN, f"# fastbert {options.command} --config {RUN} --output NEW_FOLDER\n{to_yaml(options)}")


@contextmanager
def held(folder: Path, process_group: ProcessGroup) -> Iterator[None]:
    """No other process goes on with this run meanwhile. A lock of POSIX's: it ends with this process, however that
    ends, and forked workers do not have it. Raises ConfigError on all ranks: another process has it.
    """
    import fcntl  # here: it is POSIX's

    file, refused = None, False
    if process_group.is_main:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        file = (folder / "checkpoints/.lock").open("w")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            refused = True
        except OSError:  # a file system without locks, some network ones
            pass
    try:
        if any(process_group.gather(refused)):
            raise ConfigError(f"another process works on the run in {folder}: wait for its end, or stop it")
        yield
    finally:
        if file is not None:
            file.close()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The log's rows."""
    return [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
