"""Which layer tells the senses of a word apart: 20 ambiguous words, ten sentences each (word_senses.tsv).

    python examples/word_senses.py [MODEL] [--page senses.html]

A word's vector is the mean of its tokens' hidden states. Of each word's ten, is the nearest other vector one of the
same sense? Prints how often, layer by layer, and what is taken for another sense at the best of them; the page shows a
map of each word.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

import torch

import fastbert
from fastbert import inspect

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="all-MiniLM-L6-v2")
parser.add_argument("--page", type=Path, help="where a page with a map of each word goes")
options = parser.parse_args()

with open(Path(__file__).with_name("word_senses.tsv"), encoding="utf-8", newline="") as file:
    rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
encoder = fastbert.SentenceEncoder(options.model)
encodings = encoder.tokenizer.encode_batch([row["sentence"] for row in rows])
places = []
for row, encoding in zip(rows, encodings, strict=True):
    match = re.search(rf"\b{row['word']}\b", row["sentence"], re.IGNORECASE)
    places.append(inspect.tokens_of_word(encoding, *match.span()))
states = inspect.hidden_states(encoder.model, fastbert.pack_inputs([encoding.ids for encoding in encodings]))
vectors = inspect.word_vectors(states, places)  # (layers, 200, hidden_size)

words = list(dict.fromkeys(row["word"] for row in rows))
of_word = {word: [i for i, row in enumerate(rows) if row["word"] == word] for word in words}
right = torch.stack(
    [inspect.neighbour_accuracy(vectors[:, at], [rows[i]["sense"] for i in at]) for at in of_word.values()]
)
accuracy = right.mean(0)
for layer, share in enumerate(accuracy.tolist()):
    print(f"layer {layer:2}: {share:.3f}" + ("  (word and position alone)" if layer == 0 else ""))
best = int(accuracy.argmax())
print(f"\nTaken for another sense at layer {best}:")
page = fastbert.inspect.Page(f"Word senses in {options.model}", f"vectors of layer {best}")
for word, at in of_word.items():
    near = inspect.cosines(vectors[best, at])
    near.fill_diagonal_(-torch.inf)
    for i, j in enumerate(near.argmax(-1).tolist()):
        one, other = rows[at[i]], rows[at[j]]
        if one["sense"] != other["sense"]:
            print(f"  {one['sentence']} ({one['sense']}) as: {other['sentence']} ({other['sense']})")
    points = inspect.principal_components(vectors[best, at])
    page.add_map(points, [rows[i]["sentence"] for i in at], [rows[i]["sense"] for i in at], word)
if options.page is not None:
    page.write(options.page)
