"""What the calls of a base model really did."""

from __future__ import annotations

from collections.abc import Mapping

import torch

WHOLE, LAYERS = "whole encoder", "layers"  # the ways that are tried before layers run one by one
TEXTS = "texts"  # a SentenceEncoder's way, of a SentenceTransformer


class Calls:
    """How many calls of one base model ran packed, how many in transformers' own code, and why the last of these did.

    in_graphs: whether some ran packed in a graph of torch.compile, which cannot count. ways: of the last packed call,
    for each way that was tried, why it did not serve, "" where it did. texts: how many calls of `encode` of a
    SentenceTransformer (as_sentence_transformer) took a SentenceEncoder's way. A copy of the model counts by itself.
    """

    def __init__(
        self,
        packed: int = 0,
        others: int = 0,
        why_not: str = "",
        in_graphs: bool = False,
        ways: Mapping[str, str] | None = None,
        texts: int = 0,
    ):
        self.packed, self.others, self.why_not, self.in_graphs = packed, others, why_not, in_graphs
        self.ways = {} if ways is None else ways
        self.texts = texts

    def __reduce__(self):
        return Calls, ()

    def ran_packed(self) -> None:
        # A number that a graph reads is part of what it was compiled for: each call would compile it again.
        if not torch.compiler.is_compiling():
            self.packed += 1
        elif not torch.compiler.is_exporting():
            self.in_graphs = True

    def took_texts(self, why_not: str = "") -> None:
        """A call of `encode` took a SentenceEncoder's way, or why it did not."""
        self.texts += not why_not
        self.ways = {**self.ways, TEXTS: why_not}

    def left(self, reason: str) -> None:
        self.others += 1
        self.why_not = reason

    def __str__(self) -> str:
        """In words: "3 of 4 calls ran packed; the last that did not: ..."; "" where there was no call."""
        calls = self.packed + self.others
        said = [f"{self.packed} of {calls} calls ran packed"] if calls else []
        if self.ways.get(LAYERS):
            said.append(f"the last of these layer by layer: {self.ways[LAYERS]}")
        if self.why_not:
            said.append(f"the last that did not: {self.why_not}")
        if self.texts:
            said.append(f"{self.texts} calls of encode took a SentenceEncoder's way")
        if self.ways.get(TEXTS):
            said.append(f"the last call of encode took sentence-transformers' own: {self.ways[TEXTS]}")
        if self.in_graphs:
            said.append("calls in a graph of torch.compile ran packed, and are not counted")
        return "; ".join(said)
