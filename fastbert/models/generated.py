"""Writes what is generated from the families' data: classes.pyi, which type checkers and IDEs read in the place of
classes.py; the table of families in docs/models.md; and their names in README.md.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from textwrap import fill

from fastbert.config import EncoderConfig
from fastbert.families import _FILES, FAMILIES
from fastbert.families.schema import Choice, Family
from fastbert.files import writing
from fastbert.layer_spec import RelativeBias
from fastbert.models.classes import head_class
from fastbert.models.heads import HeadModel

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).with_name("classes.pyi")
SECTION = re.compile(r"(<!-- families: .*? -->\n).*?(<!-- end of families -->)", re.DOTALL)

_HEADS = {
    "MaskedLM": "masked LM",
    "SequenceClassification": "sequence classification and regression",
    "TokenClassification": "token classification",
    "QuestionAnswering": "question answering",
    "MultipleChoice": "multiple choice",
    "PreTraining": "pre-training",
    "NextSentencePrediction": "next sentence",
}
_GATED = {"gelu": "GeGLU", "gelu_tanh": "GeGLU (tanh)", "silu": "SwiGLU", "relu": "ReGLU"}  # Shazeer 2020


def _documented(file: str) -> tuple[str, str]:
    """The name and the paper with which a family's file begins: "BERT (Devlin et al. 2018): ..."."""
    text = " ".join((import_module(f"fastbert.families.{file}").__doc__ or "").split())
    heading = re.match(r"(.+?) \((.+?)\)", text)
    assert heading is not None, f"{file}: its docstring must begin with a name and, in parentheses, the paper"
    return heading[1], heading[2]


def _layers(family: Family) -> str:
    """In words, what the layers of the family's default config are."""
    config = EncoderConfig.of_family(family.model_type)
    specs = config.layer_specs
    first = specs[0]
    words = ["pre-norm" if first.norm_first else "post-norm"]
    words += ["RMSNorm"] if first.norm.type != "layer" else []
    words += ["norms of queries and keys"] if first.attention.norm is not None else []
    words += ["norms behind sublayers"] if first.names.attention_output_norm is not None else []
    words += ["causal"] if all(spec.attention.window_size[1] == 0 for spec in specs) else []
    words += ["rotary positions"] if _may_turn(family, config) else []
    words += ["disentangled attention"] if "relative_attention" in family.fields else []
    words += ["a bias by distance"] if isinstance(first.attention.position, RelativeBias) else []
    if first.feed_forward.gated:
        words.append(_GATED.get(first.feed_forward.activation, f"gated {first.feed_forward.activation}"))
    windows = [spec.attention.window_size for spec in specs if spec.attention.window_size[0] >= 0]
    if windows:
        left, right = windows[0]
        where = "to each side" if left == right else "before theirs"
        words.append(f"{len(windows)} of {len(specs)} layers see {left} tokens {where}")
    words += ["grouped queries"] if "num_key_value_heads" in family.fields else []
    words += ["shared weights"] if config.num_hidden_groups else []
    words += [] if first.biases else ["no biases"]
    words += ["narrow embeddings"] if config.embeddings.project is not None else []
    return ", ".join(words)


def _may_turn(family: Family, config: EncoderConfig) -> bool:
    """Whether the default config has rotary positions, or another may ask for them."""
    asked = family.fields.get("position_embedding_type")
    may_ask = isinstance(asked, Choice) and "rotary" in asked.values
    return may_ask or any(spec.attention.rotary is not None for spec in config.layer_specs)


def tables() -> str:
    """What stands between the markers of docs/models.md."""
    common = [head for head in _HEADS if all(head in family.heads for family in FAMILIES.values())]
    others = [head for head in _HEADS if head not in common]
    heads = ", ".join(_HEADS[head] for head in common)
    said = f"All of them have the encoder, and heads for {heads}. Positions are learned ones unless a row says more."
    lines = [_filled(said), ""]
    lines.append(f"| family | `model_type` | layers | {' | '.join(_HEADS[head] for head in others)} | paper |")
    lines.append(f"|---|---|---|{':-:|' * len(others)}---|")
    for file, family in zip(_FILES, FAMILIES.values(), strict=True):
        name, paper = _documented(file)
        cells = ["yes" if head in family.heads else "-" for head in others]
        lines.append(f"| {name} | `{family.model_type}` | {_layers(family)} | {' | '.join(cells)} | {paper} |")
    return "\n".join(lines)


def names() -> str:
    """What stands between the markers of README.md."""
    titles = [_documented(file)[0] for file in _FILES]
    return _filled(f"{len(titles)} families, with their heads ([table](docs/models.md)): {', '.join(titles)}.")


def _filled(text: str) -> str:
    return fill(text, 120, break_on_hyphens=False)


WRITTEN = {"README.md": names, "docs/models.md": tables}


def stub() -> str:
    """The text of classes.pyi."""
    imports, body = set(), []
    for family in FAMILIES.values():
        body.append(f"class {family.classes}Model(EncoderModel): ...")
        for name, head in family.heads.items():
            base = head_class(name, head)
            imports.add((base.__module__, base.__name__))
            body.append(f"class {family.classes}For{name}({base.__name__}): ...")
    imports.add((HeadModel.__module__, HeadModel.__name__))
    lines = ["# Written by `python -m fastbert.models.generated` from the families; a test compares.", ""]
    lines.append("from fastbert.families.schema import Head")
    lines.append("from fastbert.models.base import EncoderModel, PreTrainedModel")
    for module in sorted({module for module, _ in imports}):
        names = sorted(name for other, name in imports if other == module)
        line = f"from {module} import {', '.join(names)}"
        lines += [line] if len(line) <= 120 else [f"from {module} import (", *(f"    {name}," for name in names), ")"]
    lines.append("")
    lines += ["CLASSES: dict[tuple[str, str], type[PreTrainedModel]]", ""]
    lines += ["def head_class(name: str, head: Head) -> type[HeadModel]: ...", ""]
    return "\n".join([*lines, *body, ""])


def write(root: Path, stub_file: Path) -> None:
    """Write the stub and fill in the pages below `root`. All texts are made first: an error leaves every file alone."""
    texts = {stub_file: stub(), **{root / page: _page(root / page, text()) for page, text in WRITTEN.items()}}
    with ExitStack() as stack:
        for path, text in texts.items():
            stack.enter_context(writing(path)).write_text(text, encoding="utf-8")


def _page(path: Path, text: str) -> str:
    """The page with `text` between its markers."""
    filled, count = SECTION.subn(lambda m: f"{m[1]}{text}\n{m[2]}", path.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{path.name} has {count} sections of families, not 1")
    return filled


if __name__ == "__main__":
    write(ROOT, STUB)
