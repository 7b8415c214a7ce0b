"""One page of HTML that shows what is inside of a model: it holds its data, and needs no network and no other file."""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastbert.files import write_text
from fastbert.inspect.attention import AttentionMaps
from fastbert.inspect.attribution import Attribution

MOST_TOKENS = 128  # up to which every weight is in the page
KEPT = 16  # beyond: the largest keys of a query, and the sum of the others
MOST_CELLS = 64  # tokens of a text in a table of similarities
NOT_AN_EXPLANATION = (
    "Attention says where a layer reads, not why a model decides as it does: a head may look at a word whose value"
    " changes nothing."
)


class Page:
    """Views, one below the other. In a notebook a page shows itself."""

    def __init__(self, title: str, note: str = ""):
        self.title, self.note, self.views = title, note, list[dict[str, Any]]()

    def add_attention(
        self, tokens: Sequence[str], maps: AttentionMaps, text: int = 0, title: str = "Attention"
    ) -> None:
        """What the tokens of a text look at, every layer and head of `maps`: probabilities, or their weighted lengths.

        A weight is kept in 8 bits; of more than 128 tokens, the 16 largest of a row and the sum of the others.
        Raises ValueError: as many tokens as the text does not have.
        """
        if not tokens or maps[text].shape[-1] != len(tokens):
            raise ValueError(f"tokens has {len(tokens)} entries; the text has {maps[text].shape[-1]} tokens")
        weights = maps[text].reshape(-1, len(tokens), len(tokens)).float().cpu()
        are_shares = torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-2)
        scale = 1.0 if are_shares else max(float(weights.max()), torch.finfo(torch.float32).tiny)
        view: dict[str, Any] = {"kind": "attention", "title": title, "tokens": list(tokens), "scale": scale}
        view |= {"layers": list(maps.layers), "heads": list(maps.heads)}
        note = NOT_AN_EXPLANATION
        if len(tokens) > MOST_TOKENS:
            note += f" Of each row the {KEPT} largest weights are here, and the sum of the others."
            kept = weights.topk(KEPT, dim=-1)
            rest = weights.sum(-1) - kept.values.sum(-1)
            most = max(float(rest.max()), torch.finfo(torch.float32).tiny)
            view |= {"weights": _bytes(kept.values / scale), "kept": KEPT, "rest": _bytes(rest / most), "most": most}
            view["keys"] = _base64(kept.indices.numpy().astype("<u2"))
        else:
            view["weights"] = _bytes(weights / scale)
        self.views.append(view | {"note": note})

    def add_attribution(self, tokens: Sequence[str], found: Attribution, title: str = "Which words decided") -> None:
        """What each token adds to a number, as colours of the text.

        Raises ValueError: as many tokens as the text does not have.
        """
        if len(tokens) != len(found.scores):
            raise ValueError(f"tokens has {len(tokens)} entries; the text has {len(found.scores)} tokens")
        note = (
            f"Integrated gradients. The number is {found.value:.3g} for the text and {found.baseline_value:.3g} for the"
            f" baseline; the tokens' shares miss {found.completeness_error:.1%} of the difference."
        )
        view = {"kind": "attribution", "title": title, "note": note, "tokens": list(tokens)}
        self.views.append(view | {"scores": [round(x, 6) for x in found.scores.tolist()]})

    def add_similarity(
        self,
        rows: Sequence[str],
        columns: Sequence[str],
        values: torch.Tensor,
        title: str = "Token by token",
        note: str = "",
    ) -> None:
        """A table of numbers from -1 to 1, (rows, columns): cosines of the tokens of two texts. Of a long text the
        first 64 tokens are shown, and the page says so. Raises ValueError: values of another shape.
        """
        if values.shape != (len(rows), len(columns)):
            raise ValueError(f"values has shape {tuple(values.shape)}, for {len(rows)} rows and {len(columns)} columns")
        if max(values.shape) > MOST_CELLS:
            note = f"{note} Only the first {MOST_CELLS} tokens of a text are shown.".strip()
        shown = [[round(x, 3) for x in row] for row in values[:MOST_CELLS, :MOST_CELLS].tolist()]
        view = {"kind": "similarity", "title": title, "note": note, "values": shown}
        self.views.append(view | {"rows": list(rows[:MOST_CELLS]), "columns": list(columns[:MOST_CELLS])})

    def add_map(
        self,
        points: torch.Tensor,
        labels: Sequence[str],
        groups: Sequence[str],
        title: str = "Senses of a word",
        note: str = "",
    ) -> None:
        """Points (n, 2), of `principal_components`, each with its text and the group that it is of.

        Raises ValueError: other numbers of them.
        """
        if points.shape != (len(labels), 2) or len(groups) != len(labels):
            raise ValueError(
                f"points has shape {tuple(points.shape)}; it must be (n, 2) with n labels, here {len(labels)}, and n"
                f" groups, here {len(groups)}"
            )
        view = {"kind": "scatter", "title": title, "note": note, "labels": list(labels), "groups": list(groups)}
        self.views.append(view | {"points": [[round(x, 4) for x in point] for point in points.tolist()]})

    def html(self) -> str:
        """The whole page."""
        data = {"title": self.title, "note": self.note, "views": self.views}
        # Within a script element "<" alone can end it; JSON may write every character as its number.
        written = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        before, _, after = template.partition("__DATA__")
        return before.replace("__TITLE__", html.escape(self.title)) + written + after

    def write(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError."""
        write_text(Path(path), self.html())

    def _repr_html_(self) -> str:
        """In notebooks (Jupyter, JupyterLab, VS Code): a frame of its own, whose styles and names meet no others."""
        return (
            f'<iframe srcdoc="{html.escape(self.html())}" title="{html.escape(self.title)}" width="100%" height="800"'
            ' style="border: 0"></iframe>'
        )


def _bytes(shares: torch.Tensor) -> str:
    """Numbers from 0 to 1 in 8 bits."""
    return _base64((shares * 255).round().clamp(0, 255).to(torch.uint8).numpy())


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
