"""Tokens that have white space in them: what they stand for in a text has none at its ends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import spaced
import torch
from literal_windows import windows_of
from seeds import numpy_generator
from test_spans import WINDOWS, of_transformers
from tiny import WORDS

import fastbert
from fastbert import Windows
from fastbert.data.windows import Cutter
from fastbert.data.windows.answers import MAX_ANSWER

KINDS = tuple(spaced.KINDS)


def texts_of(count: int) -> list[str]:
    draw, words = numpy_generator(4), np.array([*WORDS.split(), "housecat"])
    blanks = np.array([" ", " ", " ", "  ", "\n", " \t "])
    return ["".join(draw.choice(blanks) + word for word in draw.choice(words, 30)) + " " for _ in range(count)]


def written(tokenizer, ids: list[int]) -> str:
    """What tokens stand for, by the decoder alone, without white space."""
    return "".join(tokenizer.decode(ids, skip_special_tokens=False).split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_stands_for_characters_without_white_space(kind):
    tokenizer, texts = spaced.tokenizer_of(kind), texts_of(10)
    made = Cutter(tokenizer, 16, 4).cut(texts)
    for (start, end), one, source, part in zip(
        made.spans.tolist(), made.ids.tolist(), made.source[made.of_token].tolist(), made.parts.tolist(), strict=True
    ):
        if not part:
            assert (start, end) == (-1, -1)
        elif start >= 0:
            assert texts[source][start:end] == (written(tokenizer, [one]) or texts[source][start])
            assert not texts[source][start].isspace()
        else:
            assert written(tokenizer, [one]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_blank_before_a_word_is_the_words(kind):
    """As in word_ids of transformers, of texts that are split into words."""
    tokenizer = spaced.tokenizer_of(kind)
    text = " ".join(words := ["the", "\u6771", "cat", "\u6771"])
    made = Cutter(tokenizer, 64, 4).cut([text])
    theirs = tokenizer.encode(
        words if kind != "bytes" else [words[0], *(" " + w for w in words[1:])], is_pretokenized=True
    )
    assert made.ids.tolist() == theirs.ids
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    for (start, end), word in zip(made.spans.tolist(), theirs.word_ids, strict=True):
        assert (start, end) == (-1, -1) if word is None else starts[word] <= start < end < starts[word + 1]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers_without_white_space(kind, tmp_path):
    folder = spaced.write_model(tmp_path, kind, head="QuestionAnswering", num_labels=2)
    model, tokenizer = of_transformers(folder, "AutoModelForQuestionAnswering")
    ours = fastbert.QuestionAnswerer(folder, device="cpu", dtype="float64")
    blanks = 0
    for text in texts_of(3):
        best, answer = -np.inf, ""
        for window in windows_of(tokenizer, "who sat ?", text, **WINDOWS):
            output, ids = model(**window.inputs), window.inputs["input_ids"][0].tolist()
            start, end = output.start_logits[0].tolist(), output.end_logits[0].tolist()
            ends = [i for i in np.flatnonzero(window.numbers >= 0).tolist() if written(tokenizer, [ids[i]])]
            for i, j in itertools.product(ends, repeat=2):
                if i <= j < i + MAX_ANSWER and start[i] + end[j] > best:
                    best, answer = start[i] + end[j], written(tokenizer, ids[i : j + 1])
        found = ours.predict(("who sat ?", text), windows=Windows(**WINDOWS))
        assert found["answer"] == text[found["start"] : found["end"]] == found["answer"].strip()
        assert "".join(found["answer"].split()) == answer
        blanks += " " in found["answer"]
    assert blanks
