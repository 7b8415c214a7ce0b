"""Novels, searched by meaning: each paragraph is a vector, and a question finds the nearest ones.

    python examples/gallery/search_novels.py novels.txt.gz "a whale destroys the ship" --picture where.png

A paragraph a line; .gz, too. Without a file it takes sentences of novels from this repository. The picture shows where
in the text each question is near.
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fastbert

QUESTIONS = ["a proposal of marriage is refused", "a storm at sea", "he is afraid of death"]
parser = argparse.ArgumentParser()
parser.add_argument("text", nargs="?", type=Path, default=Path(__file__).parents[1] / "sentences.txt")
parser.add_argument("questions", nargs="*", default=QUESTIONS)
parser.add_argument("--picture", type=Path)
options = parser.parse_args()

opened = gzip.open if options.text.suffix == ".gz" else open
with opened(options.text, "rt", encoding="utf-8") as file:
    paragraphs = [line.strip() for line in file if line.strip()]
encoder = fastbert.SentenceEncoder("all-MiniLM-L6-v2")
begin = time.perf_counter()
vectors = encoder.encode(paragraphs)
seconds = time.perf_counter() - begin
print(f"{len(paragraphs):,} paragraphs, {sum(map(len, paragraphs)) / 1e6:.1f} MB of text, in {seconds:.0f} s")

scores = encoder.encode(options.questions) @ vectors.T  # cosines: the vectors have length 1
for question, row in zip(options.questions, scores, strict=True):
    print(f"\n{question}")
    for i in row.argsort()[::-1][:3]:
        print(f"  {row[i]:.2f}  {paragraphs[i][:100]}")

if options.picture is not None:
    figure, axes = plt.subplots(len(scores), 1, figsize=(9, 1.4 * len(scores) + 0.5), sharex=True, layout="constrained")
    for axis, question, row in zip(np.atleast_1d(axes), options.questions, scores, strict=True):
        parts = np.array_split(row, min(400, len(row)))
        axis.fill_between(np.linspace(0, 100, len(parts)), [part.max() for part in parts])
        axis.set(title=question, xlim=(0, 100), ylim=(0, 1))
        axis.title.set_fontsize(9)
    axis.set_xlabel("place in the text, in per cent; height: the best cosine there")
    figure.savefig(options.picture, dpi=110)
