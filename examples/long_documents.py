"""Find the place in long texts that answers a question, whichever end of them it is at.

    python examples/long_documents.py FILE [--ask QUESTION ...]

FILE is text, a paragraph a line, or that with gzip; books are parted by blank lines, and chapters by their headings.
Each chapter is encoded twice: cut off where the model ends, and in chunks of some whole sentences. Prints for each
question the passage that is nearest, and which chapter would be if the model had seen the beginnings alone.
"""

from __future__ import annotations

import argparse
import gzip
import re
import textwrap
from pathlib import Path

import fastbert

QUESTIONS = (
    "Who was hiding among the graves, with an iron chain on his leg?",
    "What did the captain nail to the mast as a reward?",
    "How did the Count leave his castle at night?",
    "How were the stolen stones hidden in a goose?",
)
HEADING = re.compile(r"(?i:chapter|adventure) [\dIVXLC]+\b.{0,90}|[IVXLC]+\. [A-Z][^.;]{0,60}")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path)
parser.add_argument("--ask", nargs="+", default=QUESTIONS, metavar="QUESTION")
parser.add_argument("--model", default="all-MiniLM-L6-v2")
options = parser.parse_args()

names, texts = [], []
with (gzip.open if options.file.suffix == ".gz" else open)(options.file, "rt", encoding="utf-8") as file:
    books = file.read().strip().split("\n\n")
for book in books:
    lines = book.split("\n")
    title = next((line for line in lines[:4] if line.isupper()), lines[0])
    at = [i for i, line in enumerate(lines) if HEADING.fullmatch(line)] or [0]
    for start, stop in zip(at, [*at[1:], len(lines)], strict=True):
        if len(text := "\n".join(lines[start + 1 : stop])) > 1000:  # not of a list of contents
            names.append(f"{title}, {lines[start]}")
            texts.append(text)
print(f"{len(texts)} chapters of {len(books)} books, {sum(len(text.split()) for text in texts):,} words")

encoder = fastbert.SentenceEncoder(options.model, dtype="bfloat16")
questions = encoder.encode(options.ask)
cut_off = encoder.encode(texts)
chunks = encoder.encode_chunks(texts, fastbert.Windows(length=128, overlap=0, at="sentences"))
print(f"{len(chunks):,} chunks")
for question, vector in zip(options.ask, questions, strict=True):
    near = chunks.vectors @ vector
    best = int(near.argmax())
    chapter = int(chunks.documents[best])
    passage = texts[chapter][chunks.starts[best] : chunks.ends[best]]
    of_beginnings = cut_off @ vector
    print(
        f"\n{question}\n  {names[chapter]} ({near[best]:.2f}), {chunks.starts[best] / len(texts[chapter]):.0%} into it:"
    )
    print(textwrap.indent(textwrap.fill(" ".join(passage.split()), 110), "    "))
    rank = int((of_beginnings > of_beginnings[chapter]).sum()) + 1
    print(f"  By beginnings alone this chapter is number {rank} of {len(texts)}, and the first one is")
    print(f"  {names[int(of_beginnings.argmax())]} ({of_beginnings.max():.2f})")
