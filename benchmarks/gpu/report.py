"""What `make gpu` makes of its parts: targets beside what was reached, and tables in Markdown."""

from __future__ import annotations

from typing import Any, NamedTuple

Content = dict[str, Any]  # of a part's JSON file


class Target(NamedTuple):
    """A figure's name in the parts' results, what it is in words, and the bound that it is to keep."""

    label: str
    bound: float
    at_most: bool = False

    def is_met(self, reached: float) -> bool:
        return reached <= self.bound if self.at_most else reached >= self.bound

    def text(self) -> str:
        return f"{'<=' if self.at_most else '>='} {number(self.bound)}"


# On an H200; the table says which GPU it was.
TARGETS = {
    "attention_fwd_512": Target("attention forward, S = 512, TFLOP/s", 335),
    "attention_fwd_1024": Target("attention forward, S = 1024, TFLOP/s", 375),
    "attention_fwd_2048": Target("attention forward, S = 2048, TFLOP/s", 400),
    "attention_bwd_512": Target("attention backward, S = 512, TFLOP/s", 265),
    "attention_bwd_1024": Target("attention backward, S = 1024, TFLOP/s", 345),
    "attention_bwd_2048": Target("attention backward, S = 2048, TFLOP/s", 390),
    "attention_ragged_fwd": Target("attention forward, ragged rate / equal lengths' rate", 0.9),
    "attention_ragged_bwd": Target("attention backward, ragged rate / equal lengths' rate", 0.9),
    "add_layer_norm_fwd": Target("add_layer_norm forward, share of copy bandwidth", 0.85),
    "add_layer_norm_bwd": Target("add_layer_norm backward, share of copy bandwidth", 0.85),
    "embed_layer_norm_fwd": Target("embed_layer_norm forward, share of copy bandwidth", 0.85),
    "pooling_fwd": Target("pooling forward, share of copy bandwidth", 0.85),
    "forward_bert-base": Target("forward BERT-base 64 x 512, tokens/s", 2.6e6),
    "forward_bert-large": Target("forward BERT-large 64 x 512, tokens/s", 0.76e6),
    "training_bert-base": Target("training BERT-base 64 x 512, tokens/s", 0.87e6),
    "training_bert-large": Target("training BERT-large 64 x 512, tokens/s", 0.25e6),
    "forward_over_compile_full": Target("forward over transformers + compile, no padding", 1.3),
    "forward_over_compile_half": Target("forward over transformers + compile, half padding", 2.5),
    "training_over_compile_full": Target("training over transformers + compile, no padding", 1.4),
    "training_over_compile_half": Target("training over transformers + compile, half padding", 2.5),
    "training_memory_ratio": Target("training's peak memory, ours / transformers'", 0.6, at_most=True),
    "latency_ms": Target("latency, 1 x 32, CUDA graphs, ms", 0.6, at_most=True),
}


def number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def figures_of(contents: list[Content]) -> dict[str, float]:
    return {name: value for content in contents for name, value in content["figures"].items()}


def targets_table(contents: list[Content]) -> list[str]:
    figures = figures_of(contents)
    lines = ["| target | | reached | |", "|---|--:|--:|---|"]
    for name, target in TARGETS.items():
        reached = figures.get(name)
        verdict = "not measured" if reached is None else "met" if target.is_met(reached) else "missed"
        lines.append(f"| {target.label} | {target.text()} | {'' if reached is None else number(reached)} | {verdict} |")
    return lines


def parts_table(contents: list[Content]) -> list[str]:
    lines = ["| part | entries | failed | skipped | seconds | |", "|---|--:|--:|--:|--:|---|"]
    for content in contents:
        entries = content["entries"].values()
        failed, skipped = (sum(kind in e for e in entries) for kind in ("failed", "skipped"))
        state = "failed" if failed else "" if content["complete"] else "not finished"
        lines.append(
            f"| {content['part']} | {len(entries)} | {failed} | {skipped} | {content['seconds']:.0f} | {state} |"
        )
    return lines


def problems(contents: list[Content]) -> list[str]:
    return [
        f"- {content['part']} {name}: {kind}: {entry[kind]}"
        for content in contents
        for name, entry in content["entries"].items()
        for kind in ("failed", "skipped")
        if kind in entry
    ]


def entry_tables(contents: list[Content]) -> list[str]:
    """A table a part, of the numbers that its entries hold under "numbers": {row: {column: number}}."""
    lines: list[str] = []
    for content in contents:
        for name, entry in content["entries"].items():
            rows = entry.get("numbers")
            if not rows:
                continue
            columns = list(dict.fromkeys(column for row in rows.values() for column in row))
            unit = f", {entry['unit']}" if "unit" in entry else ""
            lines += ["", f"{content['part']}: {name}{unit}", "", f"| | {' | '.join(columns)} |"]
            lines.append("|---|" + "--:|" * len(columns))
            for label, row in rows.items():
                cells = [row.get(column, "") for column in columns]
                text = [c if isinstance(c, str) else number(c) for c in cells]
                lines.append(f"| {label} | {' | '.join(text)} |")
            if "note" in entry:
                lines += ["", entry["note"]]
    return lines


def to_markdown(contents: list[Content]) -> str:
    """All parts of one folder."""
    stamp = max((content["stamp"] for content in contents), key=lambda stamp: stamp["time"])
    smoke = " Smoke test on small sizes: these numbers mean nothing." if any(c["smoke"] for c in contents) else ""
    lines = [
        f"{stamp['gpu'] or 'no GPU'}, driver {stamp['driver']}, torch {stamp['torch']}, Triton {stamp['triton']},"
        f" transformers {stamp['transformers']}; fastbert {stamp['commit']}{' (dirty)' if stamp['dirty'] else ''},"
        f" kernels {stamp['kernel_hash']}, {stamp['time']}.{smoke}",
        "",
        *targets_table(contents),
        "",
        *parts_table(contents),
        *entry_tables(contents),
    ]
    found = problems(contents)
    return "\n".join([*lines, *(["", *found] if found else [])])
