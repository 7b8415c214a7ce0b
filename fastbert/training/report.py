"""What a run shows while it goes on, and what it leaves: a bar, TensorBoard's files, metrics, a chart, a card."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fastbert.data.sources import suffix_of
from fastbert.errors import ConfigError
from fastbert.files import write_text, writing
from fastbert.hub import origin
from fastbert.messages import install
from fastbert.training import folder as run_folder
from fastbert.training.options import DATA, RunOptions, to_yaml
from fastbert.version import __version__

_HANDED_ON = ("license", "license_name", "license_link", "language")  # from the card of the base model


class Progress:
    """A bar with loss and real tokens/s on stderr; TensorBoard's files on request."""

    def __init__(self, folder: Path, steps: int, done: int, *, tensorboard: bool, shown: bool):
        self.bar = tqdm(total=steps, initial=done, unit="step", disable=not shown, dynamic_ncols=True, smoothing=0.05)
        self.writer = _tensorboard(folder) if tensorboard else None

    def on_step(self, tokens: int) -> None:
        self.bar.update()

    def on_log(self, row: dict[str, Any]) -> None:
        metrics = {name: value for name, value in row.items() if name.startswith("eval_")}
        shown = {"loss": f"{row['loss']:.4f}", "tokens/s": f"{row['tokens_per_second']:,.0f}"}
        self.bar.set_postfix(shown, refresh=False)
        if metrics:
            values = ", ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in metrics.items())
            self.bar.write(f"step {row['step']}: loss {row['loss']:.4f}; evaluation: {values}")
        if self.writer is not None:
            for name in ("loss", "lr", "tokens_per_second", *metrics):
                self.writer.add_scalar(name.replace("eval_", "eval/"), row[name], row["step"])

    def say(self, line: str) -> None:
        if not self.bar.disable:
            self.bar.write(line)

    def close(self) -> None:
        self.bar.close()
        if self.writer is not None:
            self.writer.close()


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("tensorboard is not installed: pip install tensorboard") from None
    return SummaryWriter(str(folder / "tensorboard"))


def write_reports(folder: Path, options: RunOptions, state: Any, task: Any, world_size: int) -> dict[str, Any]:
    """Write metrics.json, and README.md where there is none; returns the metrics. Raises OSError."""
    rows = run_folder.rows_of(folder)
    evaluated = _evaluated(rows)
    best = next((row for row in evaluated if row["step"] == state.best_step), evaluated[-1] if evaluated else {})
    tokens = sum(row["tokens"] for row in rows)
    seconds = sum(row["tokens"] / row["tokens_per_second"] for row in rows)
    losses = [loss for row in rows for loss in row["losses"]]  # of all steps, those before a stop among them
    metrics = {
        "steps": state.step,
        "train_loss": sum(losses) / len(losses),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "best_step": best.get("step", state.step),
        **{name: value for name, value in best.items() if name.startswith("eval_")},
        "ranks": world_size,
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        if not torch.cuda.is_available()
        else torch.cuda.get_device_name(),
        "fastbert": __version__,
        "torch": torch.__version__,
    }
    write_text(folder / run_folder.METRICS, json.dumps(metrics, indent=2) + "\n")
    written, text = folder / "README.md", card(options, metrics, task)
    if not written.exists():
        write_text(written, text)
    elif written.read_bytes() != text.encode():
        warnings.warn(f"{written} was there before the run went on, and stays as it is", stacklevel=2)
    return metrics


def _evaluated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if any(name.startswith("eval_") for name in row)]


def can_draw() -> bool:
    """Whether there is a chart at the end; where not, a warning before the first step says so."""
    if importlib.util.find_spec("matplotlib") is None:
        warnings.warn(f"chart.png is left out: matplotlib is not installed ({install('train')})")
        return False
    return True


def draw_chart(folder: Path) -> None:
    """The loss of every step with its running mean, and each metric of the evaluations in a panel of its own, from the
    folder's log. Raises OSError.
    """
    from matplotlib.figure import Figure  # pyplot would change what the process draws with, and takes half a second
    from matplotlib.ticker import MaxNLocator

    rows = run_folder.rows_of(folder)
    evaluated = _evaluated(rows)
    losses = [(step, loss) for row in rows for step, loss in zip(_steps_of(row), row["losses"], strict=True)]
    names = [name for name in (evaluated[0] if evaluated else {}) if name.startswith("eval_")][:3]
    figure = Figure(figsize=(5 + 3.6 * len(names), 3.4), layout="tight")
    axes = figure.subplots(1, 1 + len(names), squeeze=False)[0]
    steps, values = zip(*losses, strict=True)
    single = "o" if len(rows) == 1 else None  # a line through one point shows nothing
    axes[0].plot(steps, values, marker=single, markersize=3, color="#9bb7d4", linewidth=0.8, label="each step")
    means = [row["loss"] for row in rows]
    axes[0].plot([row["step"] for row in rows], means, marker=single, color="#1f4e79", label="mean of a row")
    axes[0].set(title="training loss", xlabel="step")
    axes[0].legend(frameon=False)
    for axis, name in zip(axes[1:], names, strict=True):
        axis.plot([row["step"] for row in evaluated], [row[name] for row in evaluated], "o-", color="#1f4e79")
        axis.set(title=name.replace("eval_", "evaluation: ").replace("_", " "), xlabel="step")
    for axis in axes:
        axis.set_xlim(0, 1.05 * steps[-1])  # the run's: an axis around a single point would be of fractions
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    with writing(folder / run_folder.CHART) as new:
        figure.savefig(new, dpi=130, format="png")


def _steps_of(row: dict[str, Any]) -> range:
    return range(row["step"] - len(row["losses"]) + 1, row["step"] + 1)


def card(options: RunOptions, metrics: dict[str, Any], task: Any) -> str:
    """README.md: what the hub reads; the base, the data, the options and the figures of a run. No path of a machine."""
    from huggingface_hub import ModelCardData

    source = str(vars(options).get("model") or vars(options).get("teacher", ""))
    hub_id, terms = _base(source, task.library)
    train = [name for option in DATA for name in vars(options)[option]]
    data = ModelCardData(
        library_name=task.library,
        pipeline_tag=task.pipeline,
        base_model=hub_id,
        datasets=sorted({name.partition(":")[0] for name in train if not _is_local(name)}) or None,
        tags=["fastbert", options.command],
        **terms,
    )
    results = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {Path(options.output).resolve().name}\n",
        f"Made by `fastbert {options.command}`" + (f" from `{hub_id or _shown(source)}`" if source else "") + ".\n",
        *(["![training](chart.png)\n"] if (Path(options.output) / run_folder.CHART).exists() else []),
        "## Evaluation\n",
        *(
            ["| metric | value |", "|---|---|", *(f"| {name} | {value:.4f} |" for name, value in results.items()), ""]
            if results
            else ["There was no evaluation data.\n"]
        ),
        f"After step {metrics['best_step']} of {metrics['steps']}; {metrics['tokens']:,} tokens at"
        f" {metrics['tokens_per_second']:,.0f} a second; training loss {metrics['train_loss']:.4f}.\n",
        "## Data\n",
        *(
            f"- {option}: {', '.join(f'`{_shown(name)}`' for name in vars(options)[option])}"
            for option in DATA
            if vars(options)[option]
        ),
        f"\n`{run_folder.DIGESTS}` has their SHA-256.\n",
        "## Settings\n",
        f"```yaml\n{to_yaml(_without_paths(options))}```\n",
        f"`fastbert {options.command} --config run.yaml --output NEW_FOLDER` repeats the run.\n",
        "## Licence\n",
        _licence(source, terms),
        "## Intended use, limits\n\nTo be filled in by its authors.\n",
    ]
    return "\n".join(lines)


def _base(source: str, library: str) -> tuple[str | None, dict[str, Any]]:
    """The hub's id of the model that a run began with, and what its card says of licence and language."""
    if not source:
        return None, {}
    hub_id, folder = origin(source, "sentence-transformers" if library == "sentence-transformers" else None)
    path = Path() if folder is None else folder / "README.md"
    if not path.is_file() or not path.read_bytes().lstrip(b"\xef\xbb\xbf \r\n").startswith(b"---"):
        return hub_id, {}
    import yaml
    from huggingface_hub import ModelCard

    try:
        entries = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError) as error:  # another's file, which is no reason to fail
        warnings.warn(f"the licence of {path} cannot be read: {str(error).splitlines()[0]}", stacklevel=2)
        return hub_id, {}
    return hub_id, {name: entries[name] for name in _HANDED_ON if entries.get(name)}


def _licence(source: str, terms: dict[str, Any]) -> str:
    if "license" in terms:
        return f"`{terms['license']}`: that of the base model, by its card. The data may have terms of their own.\n"
    why = "" if not source else "The base model's card names none, or is not beside it. "
    return f"{why}To be filled in by its authors.\n"


def _is_local(name: str) -> bool:
    return name.startswith((".", "~")) or Path(name).is_absolute() or Path(name).exists() or suffix_of(name) is not None


def _shown(name: str) -> str:
    """A model's or a file's name, without the folders of this machine that it is in."""
    return Path(name).expanduser().resolve().name if _is_local(name) else name


def _without_paths(options: RunOptions) -> RunOptions:
    named = {name: vars(options)[name] for name in ("model", "teacher", "tokenizer", *DATA) if vars(options).get(name)}
    shown: dict[str, Any] = {k: _shown(v) if isinstance(v, str) else tuple(map(_shown, v)) for k, v in named.items()}
    return dataclasses.replace(options, **shown)
