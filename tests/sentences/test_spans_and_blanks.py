"""Tokens that have white space in them: what they stand for in a text has none at its ends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import spaced
import tiny
import torch
from full import left_to_full
from literal_windows import windows_of
from seeds import numpy_generator
from test_spans import WINDOWS, of_transformers

import fastbert
from fastbert import Windows
from fastbert.data.chunks import CORE, Cutter
from fastbert.data.chunks.answers import MAX_ANSWER
from fastbert.data.chunks.words import Words
from fastbert.data.tokenization import load_tokenizer
from fastbert.training.finetuning.inputs.squad import Questions
from fastbert.training.finetuning.question_answering import examples_of

KINDS = tuple(spaced.KINDS)


def texts_of(count: int) -> list[str]:
    draw, words = numpy_generator(4), np.array([*tiny.WORDS.split(), "housecat"])
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
@left_to_full(lambda p: p["kind"] not in ("bytes", "metaspace"))
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


# Characters that BERT's normalizer deletes, and the one that spaced.tokenizer_of's does.
DELETED = {kind: "\u200f" for kind in KINDS} | {"wordpiece": "\u200f\u200b\ufeff\u00ad\u200d\ufe0f\ufffd\u0301"}


@pytest.mark.parametrize("kind", DELETED)
@pytest.mark.parametrize("everywhere", (False, True), ids=("core", "everywhere"))
def test_words_speak_by_their_first_token(kind, everywhere, tmp_path):
    """That of word_ids in transformers, though a normalizer has deleted the first characters of a word."""
    if kind == "wordpiece":
        tiny.write_tokenizer(tmp_path)
        tokenizer = load_tokenizer(tmp_path)
    else:
        tokenizer = spaced.tokenizer_of(kind)
    draw, plain = numpy_generator(5), [*tiny.WORDS.split(), "housecat", "\u6771"]
    before = ["", *DELETED[kind], DELETED[kind]]
    words = ["the", *(draw.choice(before) + draw.choice(plain) for _ in range(60))]
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])[:-1]
    ends = starts + [len(word) for word in words]
    made = Cutter(tokenizer, 16, 6).cut([" ".join(words)])
    found = Words(made, [" ".join(words)], starts, ends, np.array([len(words)]), everywhere=everywhere)
    given = words if kind != "bytes" else [words[0], *(" " + word for word in words[1:])]
    theirs = tokenizer.encode(given, is_pretokenized=True, add_special_tokens=False)
    firsts = [theirs.word_ids.index(i) for i in range(len(words))]
    assert made.ids[made.parts == CORE].tolist() == theirs.ids
    assert made.positions[found.tokens].tolist() == [firsts[i] for i in found.of_word]
    windows_with = (
        np.isin(made.positions, firsts) if everywhere else np.isin(made.positions, firsts) & (made.parts == CORE)
    )
    assert found.tokens.tolist() == np.flatnonzero(windows_with).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_learnt_by_the_tokens_of_their_characters(kind):
    """Also where a normalizer deletes the first of them, where a character is of several tokens, or has a blank."""
    tokenizer, words = spaced.tokenizer_of(kind), ["the", "\u6771", "cat", "\u200fsat", "\u6771", "on"] * 4
    text, begins = " ".join(words), np.cumsum([0, *(len(word) + 1 for word in words)])
    given = words if kind != "bytes" else [words[0], *(" " + word for word in words[1:])]
    theirs = np.array(tokenizer.encode(given, is_pretokenized=True, add_special_tokens=False).word_ids)
    spans = [(a, b) for a in range(len(words)) for b in range(a, min(a + 3, len(words)))]
    answers = [[(text[begins[a] : begins[b + 1] - 1], int(begins[a]))] for a, b in spans]
    count = len(spans)
    data = Questions([str(i) for i in range(count)], ["who ?"] * count, [text] * count, answers, "train")
    made = Cutter(tokenizer, 24, 8).cut(data.contexts)
    labels, found = examples_of(made, data).labels, np.zeros(count, int)
    for i, (start, stop) in enumerate(zip(labels["start_positions"], labels["end_positions"], strict=True)):
        numbers = made.positions[made.offsets[i] : made.offsets[i + 1]].tolist()
        a, b = spans[made.source[i]]
        wanted = int(np.flatnonzero(theirs == a)[0]), int(np.flatnonzero(theirs == b)[-1])
        if wanted[0] in numbers and wanted[1] in numbers:
            assert (numbers[start], numbers[stop]) == wanted
            found[made.source[i]] += 1
        else:
            assert (start, stop) == (0, 0)
    assert (found[[b - a < 1 for a, b in spans]] > 0).all()
