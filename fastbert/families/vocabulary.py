"""The part of the schema that says what a family's tokens are: of a new vocabulary, and of one in bare files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class NewVocabulary(NamedTuple):
    """What the vocabulary of a new model is like, where none is given. As many tokens as the family's default has.

    special: role -> text, in the order of their ids. separators: between the sequences of a pair; where there are two,
    as in RoBERTa, all tokens have type 0.

    The same, and the rest, tell how a folder without tokenizer.json is read. bare: the files that it has instead, of
    this `kind`; none: a vocab.txt as BERT's. behind: roles whose tokens these files lack, and which get the ids behind
    the last one. mask_takes_space: whether the mask token is read together with the spaces before it. gives_types:
    whether transformers' tokenizer of the model_type tells a model which token is of which text, unless the files say
    more. ignores_class: transformers takes its generic tokenizer for the model_type, whatever class the files name.
    """

    kind: Literal["wordpiece", "bpe", "unigram"] = "wordpiece"
    special: Mapping[str, str] = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    separators: int = 1
    bare: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    mask_takes_space: bool = False
    gives_types: bool = True
    ignores_class: bool = False


ROBERTA_TOKENS: Mapping[str, str] = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
ALBERT_TOKENS: Mapping[str, str] = {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
