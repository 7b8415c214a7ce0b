"""Words, sentences and words a sentence of a page's prose: without code, tables, headings and lists of links.

`python tests/support/prose.py [PAGE ...]` prints them for README, CONTRIBUTING and all pages of docs.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)(```+|~~~+|:::+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
# A sentence ends where a blank and something that may begin one follows; "e.g." and "0.5" do not end one.
END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<! vs)(?<!al)[.!?][)\"'*_`]*(?=\s+[\"'(*_`\[]*[A-Z0-9`])")


class Prose(NamedTuple):
    """What a page's prose has."""

    words: int
    sentences: int

    @property
    def mean(self) -> float:
        """Words a sentence."""
        return self.words / max(self.sentences, 1)


def sentences(text: str) -> list[str]:
    """The sentences of a page in Markdown; what a list's item, a paragraph or a block of code begins, begins one."""
    text = COMMENT.sub("", FENCE.sub("\n\n", FRONT_MATTER.sub("", text)))
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks: list[list[str]] = [[]]
    for line in text.split("\n"):
        stripped = line.strip()
        if not stripped or stripped.startswith(("#", "|", "+--")) or line.startswith("    "):
            blocks.append([])  # a heading, a row of a table, a block of code
            continue
        item = re.match(r"(?:[-*+]|\d+\.) +", stripped)
        if item:
            blocks.append([])
        blocks[-1].append(stripped[item.end() :] if item else stripped)
    found = [sentence.strip() for block in blocks for sentence in END.sub(r"\g<0>" + "\0", " ".join(block)).split("\0")]
    return [sentence for sentence in found if words(sentence)]


def words(sentence: str) -> int:
    """Words: what has a letter or a digit, code included."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def of(page: Path) -> Prose:
    """Words and sentences of a page's prose."""
    each = sentences(page.read_text(encoding="utf-8"))
    return Prose(sum(map(words, each)), len(each))


def pages() -> list[Path]:
    """README, CONTRIBUTING and the pages of docs, in their order."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    sys.stdout.write("| page | words | sentences | words a sentence |\n|---|--:|--:|--:|\n")
    for page in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        counted = of(page)
        row = (str(page.relative_to(ROOT)), f"{counted.words:,}", f"{counted.sentences:,}", f"{counted.mean:.1f}")
        sys.stdout.write(f"| {' | '.join(row)} |\n")


if __name__ == "__main__":
    main()
