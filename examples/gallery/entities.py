"""Names in an article: a model for entities, trained on tagged sentences, and what it finds, marked in the text.

    python examples/gallery/entities.py --train train.conll --article article.txt --picture names.png

Without files it takes the small ones of this repository. The model stays in the folder `--model`, and is not trained
again if it is there.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt

from fastbert.cli import main

DATA = Path(__file__).parents[1] / "data"
COLOURS = ("#ffd6a5", "#bde0fe", "#caffbf", "#ffc6ff", "#fdffb6", "#d0d1ff")
WIDTH = 88  # characters in a line of the picture

parser = argparse.ArgumentParser()
parser.add_argument("--train", type=Path, default=DATA / "ner.jsonl")
parser.add_argument("--article", type=Path, default=DATA / "article.txt")
parser.add_argument("--model", type=Path, default=Path("names"))
parser.add_argument("--epochs", default="5")
parser.add_argument("--picture", type=Path)
options = parser.parse_args()

if not options.model.exists():
    recipe = ["--config", str(DATA.parent / "finetune_ner.yaml"), "--epochs", options.epochs]
    main(["finetune", *recipe, "--train", str(options.train), "--output", str(options.model)])
predictions = options.model / "article.jsonl"
main(["predict", str(options.model), str(options.article), "--output", str(predictions), "--force"])
paragraphs = [json.loads(line) for line in predictions.read_text(encoding="utf-8").splitlines()]
for paragraph in paragraphs:
    for entity in paragraph["entities"]:
        print(f"{entity['label']:15} {entity['score']:.2f}  {entity['text']}")

if options.picture is not None:
    labels = sorted({entity["label"] for paragraph in paragraphs for entity in paragraph["entities"]})
    lines = [(p, line) for p in paragraphs for line in (*textwrap.wrap(p["text"], WIDTH), "")]
    figure, axis = plt.subplots(figsize=(9, 0.25 * len(lines) + 0.6), layout="constrained")
    axis.set(xlim=(0, WIDTH), ylim=(len(lines), -1))
    axis.axis("off")
    begin = 0
    for y, (paragraph, line) in enumerate(lines):
        begin = paragraph["text"].find(line, begin) if line else 0  # an empty line ends the paragraph
        for entity in paragraph["entities"] if line else []:
            start, end = max(entity["start"] - begin, 0), min(entity["end"] - begin, len(line))
            if start < end:
                colour = COLOURS[labels.index(entity["label"]) % len(COLOURS)]
                axis.barh(y, end - start, left=start, height=0.9, color=colour)
        for x, letter in enumerate(line):  # one by one, so that each stands where its mark is
            axis.text(x + 0.5, y, letter, ha="center", va="center", fontsize=9, family="monospace", parse_math=False)
    for i, label in enumerate(labels):
        axis.text(18 * i, -0.9, label, fontsize=9, backgroundcolor=COLOURS[i % len(COLOURS)])
    figure.savefig(options.picture, dpi=110)
