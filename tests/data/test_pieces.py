"""Long texts in pieces: what is cut off is not tokenised, and what is left has the tokens of the whole."""

from __future__ import annotations

import json

import pytest
from test_tokenized import tokenizer_of_words
from test_windows import texts_of, trained
from tokenizers import AddedToken, Tokenizer

from fastbert.data import pieces
from fastbert.data.pieces import as_far_as_needed, uncut
from fastbert.data.tokenized import tokenize, tokenize_one

LONG, LONGER = " ".join(texts_of(200)), " ".join(texts_of(300))


@pytest.mark.parametrize("side", ("right", "left"))
@pytest.mark.parametrize("kind", ("wordpiece", "bytes", "unigram", "no pre-tokenizer"))
def test_what_is_cut_has_the_tokens_of_the_whole(kind, side, monkeypatch):
    tokenizer = trained(kind)
    inputs = ["a dog", LONG, "a" * 2000, (LONG[:50], LONG), (LONG, LONG[:50]), (LONG, LONGER), (LONGER, LONG)]
    for length in (30, 31):  # of two long texts the one of more tokens gets the odd one
        tokenizer.enable_truncation(length, direction=side)
        expected = [tokenizer.encode(*(one if isinstance(one, tuple) else (one,))).ids for one in inputs]
        monkeypatch.setattr(pieces, "PIECE_CHARS", 300)
        made = tokenize(tokenizer, inputs, with_types=False)
        assert [one["input_ids"].tolist() for one in made] == expected
        assert [tokenize_one(tokenizer, one, with_types=False)["input_ids"].tolist() for one in inputs] == expected
        assert {1, 3, 4, 5, 6} <= set(made.cut) <= set(range(1, 7))  # the word without an end may be one token
        monkeypatch.undo()


@pytest.mark.parametrize("side", ("right", "left"))
def test_only_what_is_kept_is_tokenised(side, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_CHARS", 300)
    tokenizer = trained("wordpiece")
    tokenizer.enable_truncation(30, direction=side)
    part = as_far_as_needed(tokenizer, LONG)
    assert 250 < len(part) < 1000 and (LONG.startswith if side == "right" else LONG.endswith)(part)
    assert as_far_as_needed(tokenizer, ("who", LONG)) == ("who", part)
    assert as_far_as_needed(tokenizer, (LONG, "who")) == (part, "who")
    first, second = as_far_as_needed(tokenizer, (LONG, LONGER))
    counts = [len(uncut(tokenizer).encode(text).ids) for text in (LONG, second)]
    assert first == LONG and counts[0] < counts[1] and len(second) < len(LONGER)
    tokenizer.no_truncation()
    assert as_far_as_needed(tokenizer, LONG) == LONG


def test_an_uncut_tokenizer_is_the_other_without_its_limit():
    tokenizer = tokenizer_of_words(8)
    tokenizer.add_special_tokens([AddedToken("<one>", lstrip=True), "[SEP]"])
    tokenizer.add_tokens(["the cat"])
    tokenizer.enable_padding(length=20)
    text = "  <one>the cat sat on a mat, and the dog ran  <one> in to [SEP] house"
    made, copy = uncut(tokenizer), Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    assert made.truncation is made.padding is None and tokenizer.truncation is not None
    assert made.encode(text).ids == copy.encode(text).ids and made.encode(text).offsets == copy.encode(text).offsets
    content = json.loads(tokenizer.to_str())
    content["added_tokens"][-1]["id"] = 90  # a hole: new tokens would get other ids
    moved = Tokenizer.from_str(json.dumps(content))
    assert uncut(moved).encode("the cat").ids == [1, 90, 2] and uncut(moved).truncation is None
