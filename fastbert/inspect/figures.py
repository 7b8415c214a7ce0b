"""Pictures of attention, by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fastbert.files import writing
from fastbert.inspect.attention import AttentionMaps

MOST_NAMED = 24  # tokens that are written beside a picture


def draw_attention(path: str | os.PathLike[str], tokens: Sequence[str], maps: AttentionMaps, text: int = 0) -> None:
    """Every layer and head of one text as a picture, into a .png or an .svg: rows look, columns are looked at.

    Of one layer and one head up to 24 tokens are named. Raises ValueError: as many tokens as the text does not have, or
    another ending. Raises ImportError without matplotlib. Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    file_format = Path(path).suffix.removeprefix(".")
    if file_format not in ("png", "svg"):
        raise ValueError(f"{path}: the name must end in .png or .svg")
    weights = maps[text].cpu()
    if weights.shape[-1] != len(tokens) or not tokens:
        raise ValueError(f"tokens has {len(tokens)} entries; the text has {weights.shape[-1]} tokens")
    rows, columns = len(maps.layers), len(maps.heads)
    size = max(0.9, 6.0 / max(rows, columns))
    figure = Figure(figsize=(1.2 + size * columns, 1.0 + size * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for i, of_layer in enumerate(figure.subplots(rows, columns, squeeze=False)):
        for j, axes in enumerate(of_layer):
            axes.imshow(weights[i, j].numpy(), cmap="Blues", vmin=0.0, aspect="equal", interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if i == 0:
                axes.set_title(f"head {maps.heads[j]}", fontsize=8)
            if j == 0:
                axes.set_ylabel(f"layer {maps.layers[i]}", fontsize=8)
            if rows == columns == 1 and len(tokens) <= MOST_NAMED:
                # "$" would begin a formula.
                names = [token.replace("$", r"\$") for token in tokens]
                axes.set_xticks(range(len(tokens)), names, rotation=90, fontsize=8)
                axes.set_yticks(range(len(tokens)), names, fontsize=8)
    with writing(Path(path)) as new:
        figure.savefig(new, dpi=150, format=file_format)
