"""`fastbert encode --engine ray`: parquet files into a folder of parquet files, on all machines of a Ray cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.loading import rate_of, say_cut
from fastbert.cli.parser import UsageError
from fastbert.cli.stopping import raise_if_stopped, say
from fastbert.data.text_files import pick_column

if TYPE_CHECKING:
    from fastbert.bulk.ray_engine import Pool

VECTORS = "embedding"  # the column that is added


def encode_on_ray(
    source: str,
    output: str,
    *,
    model: str,
    column: str | None,
    dtype: str,
    device: str | None,
    batch_tokens: int | None,
    workers: int | None,
    force: bool,
) -> str:
    """Returns a one-line summary. Raises UsageError, InputError and ConfigError for what a user can mend."""
    _check_is_folder(output)
    from fastbert.bulk.blocks import absolute, column_names
    from fastbert.bulk.ray_engine import encode_files, import_ray
    from fastbert.bulk.worker import WorkerSettings
    from fastbert.checkpoint.pretrained import read_config
    from fastbert.data.sentence_folder import transformer_folder
    from fastbert.hub import resolve

    raise_if_stopped()
    import_ray()
    folder = resolve(model)
    read_config(transformer_folder(folder))  # a wrong model is told here, and not by each worker

    texts_in = pick_column(source, column_names(source), column)

    def settings(pool: Pool) -> WorkerSettings:
        return WorkerSettings(
            model=absolute(model) if Path(model).is_dir() else model,
            column=texts_in,
            output_column=VECTORS,
            dtype=dtype,
            device=pool.device,
            batch_tokens=batch_tokens,
            normalize=None,
            prompt_name=None,
            threads=pool.threads,
        )

    identity = _identity_of(model, folder, dtype, device, batch_tokens)
    progress = _Progress()
    try:
        texts = encode_files(
            source,
            output,
            settings=settings,
            identity=identity,
            device=device,
            workers=workers,
            force=force,
            on_plan=progress.on_plan,
            on_block=progress.on_block,
        )
    except KeyboardInterrupt:
        say("stopped; the same command goes on with the blocks that are left")
        raise
    finally:
        progress.close()
    say_cut(progress.cut, progress.max_length, say, "--windows, without --engine ray,")
    return f"{texts:,} texts{rate_of(progress.tokens, time.perf_counter() - progress.start)} -> {output}"


def _identity_of(model: str, folder: Path, dtype: str, device: str | None, batch_tokens: int | None) -> dict[str, Any]:
    """What must be the same where a run goes on."""
    from fastbert.cli.outputs.growing_array import fingerprint
    from fastbert.version import __version__

    return {
        "model": model,
        "model files": fingerprint(folder),
        "dtype": dtype,
        "device": device,
        "batch tokens": batch_tokens,
        "fastbert": __version__,
    }


def _check_is_folder(output: str) -> None:
    if output.endswith((".npy", ".jsonl", ".parquet")):
        raise UsageError(
            f"--output {output}: with --engine ray it is a folder, which gets a parquet file for each block"
        )


class _Progress:
    """The bar of a run, and what its blocks add up to."""

    def __init__(self) -> None:
        self.tokens, self.cut, self.max_length = 0, 0, 0
        self.start = time.perf_counter()
        self.bar: Any = None

    def on_plan(self, texts: int, done: int, pool: Pool) -> None:
        from fastbert.sentences.batches import progress_bar

        if done:
            say(f"{done:,} of {texts:,} texts were encoded before: going on from there")
        what = f"{pool.device}, {pool.threads} threads each" if pool.device == "cpu" else pool.device
        say(f"{pool.workers} workers ({what})")
        self.bar, self.start = progress_bar(texts, None, initial=done), time.perf_counter()

    def on_block(self, done: dict[str, Any]) -> None:
        raise_if_stopped()
        self.tokens, self.cut = self.tokens + done["tokens"], self.cut + done["cut"]
        self.max_length = done["max_length"]
        self.bar.update(done["texts"])

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
