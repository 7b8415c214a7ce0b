"""Entities and answers in long texts: against a literal loop over transformers' models, window by window."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from literal_windows import owners, windows_of
from seeds import numpy_generator
from seqeval.metrics.sequence_labeling import get_entities

import fastbert
from fastbert import Windows
from fastbert.data.chunks.answers import MAX_ANSWER
from fastbert.errors import ConfigError, InputError

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
WINDOWS = {"length": 24, "overlap": 6}


def documents(count: int) -> list[list[str]]:
    draw, words = numpy_generator(2), np.array(tiny.WORDS.split() * 3 + ["Zebras", "housecat"])
    return [[], ["the"], *(list(map(str, draw.choice(words, n))) for n in draw.integers(1, 90, count - 2))]


def questions(count: int) -> list[tuple[str, str]]:
    """A text that is empty is none to transformers."""
    return [("who sat on the mat ?"[: 3 + i % 18], " ".join(words)) for i, words in enumerate(documents(count + 1)[1:])]


def write_answering_model(folder: Path) -> Path:
    """The first of several drawn models that finds no answer in some texts: many find one in every text."""
    texts = questions(20)
    for seed in range(60):
        tiny.write_model(folder, head="QuestionAnswering", num_labels=2, seed=seed)
        answerer = fastbert.QuestionAnswerer(folder, device="cpu")
        found = answerer.predict(texts, windows=Windows(**WINDOWS), no_answer=True)
        if sum(row["answer"] == "" for row in found) >= 2:
            return folder
    raise AssertionError("every model finds an answer in every text")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("spans")
    tokens = tiny.write_model(root / "tokens", head="TokenClassification", num_labels=5)
    made = {"tokens": tokens, "qa": write_answering_model(root / "qa")}
    tiny.edit_config(made["tokens"], id2label=dict(enumerate(TAGS)))
    return made


def of_transformers(folder, auto: str):
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, auto).from_pretrained(folder).double().eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def tags_of(parts, words: list[str]) -> dict[str, list[tuple[int, float]]]:
    """(tag, its probability) of each word, by its first token, for each aggregate."""
    model, tokenizer = parts
    windows = windows_of(tokenizer, words, **WINDOWS)
    owner, first = owners(windows), dict[int, int]()  # of each word the number of its first token
    for window in windows:
        for number, word in zip(window.numbers.tolist(), window.words, strict=True):
            if word is not None:
                first[word] = min(first.get(word, number), number)
    vectors = [model.bert(**window.inputs).last_hidden_state[0] for window in windows]
    logits = [model.classifier(x) for x in vectors]
    found: dict[str, list[torch.Tensor]] = {"core": [], "logits": [], "probabilities": [], "vectors": []}
    for word in range(len(words)):
        number = first[word]
        seen = {
            w: window.numbers.tolist().index(number) for w, window in enumerate(windows) if number in window.numbers
        }
        every = torch.stack([logits[w][t] for w, t in seen.items()])
        found["core"].append(logits[owner[number]][seen[owner[number]]].softmax(-1))
        found["logits"].append(every.mean(0).softmax(-1))
        found["probabilities"].append(every.softmax(-1).mean(0))
        found["vectors"].append(torch.stack([vectors[w][t] for w, t in seen.items()]).mean(0))
    found["vectors"] = list(model.classifier(torch.stack(found["vectors"])).softmax(-1))
    return {name: [(int(row.argmax()), float(row.max())) for row in rows] for name, rows in found.items()}


@pytest.mark.parametrize("count", (12, pytest.param(200, marks=pytest.mark.full)))
def test_entities_of_documents_are_those_of_a_loop(folders, count):
    texts, theirs = documents(count), of_transformers(folders["tokens"], "AutoModelForTokenClassification")
    classifier = fastbert.TokenClassifier(folders["tokens"], device="cpu", dtype="float64")
    assert classifier.labels == tuple(TAGS)
    expected = [tags_of(theirs, words) if words else {} for words in texts]
    spelt_by_all = 0
    for aggregate in ("core", "logits", "probabilities", "vectors"):
        found = classifier.predict(texts, windows=Windows(**WINDOWS), aggregate=aggregate)
        for words, entities, wanted in zip(texts, found, expected, strict=True):
            said, text, at = wanted.get(aggregate, []), " ".join(words), np.cumsum([0, *(len(w) + 1 for w in words)])
            spelt = get_entities([TAGS[tag] for tag, _ in said])
            assert [entity["label"] for entity in entities] == [label for label, *_ in spelt]
            for entity, (_, a, b) in zip(entities, spelt, strict=True):
                assert (entity["start"], entity["end"]) == (at[a], at[b] + len(words[b]))
                assert entity["text"] == text[entity["start"] : entity["end"]]
                assert entity["score"] == pytest.approx(np.mean([p for _, p in said[a : b + 1]]), rel=1e-5)
            spelt_by_all += len(spelt)
    assert spelt_by_all > 4 * count  # of four ways; of some drawn weights few words are tagged


def test_entities_alone_in_a_batch_and_in_raw_texts(folders):
    """Equal, but for the last bits of float32, which a product's other rows change."""
    classifier, texts = fastbert.TokenClassifier(folders["tokens"], device="cpu"), documents(12)
    classifier.windows = Windows(**WINDOWS)
    found = classifier.predict(texts)
    raw = [" ".join(words) for words in texts]
    others = [[classifier.predict([words])[0] for words in texts], [classifier.predict(text) for text in raw]]
    for other in (*others, classifier.predict(raw), classifier.predict(raw, batch_tokens=50)):
        for one, same in zip(found, other, strict=True):
            scores = [[entity["score"] for entity in entities] for entities in (one, same)]
            np.testing.assert_allclose(*scores, rtol=1e-5)
            assert [e | {"score": 0} for e in one] == [e | {"score": 0} for e in same]


def test_only_the_begin_where_that_is_asked_for(folders):
    classifier, text = fastbert.TokenClassifier(folders["tokens"], device="cpu"), " ".join(documents(9)[-1] * 9)
    assert classifier.predict(text)[-1]["end"] > len(text) - 60
    assert classifier.predict(text, windows=Windows(pool="first"))[-1]["end"] < 400


@torch.no_grad()
def answers_of(parts, pair: tuple[str, str]) -> dict[tuple[str, bool], tuple[float, int, int]]:
    """(score, start, end) of the best of all spans of all windows, by what they are compared by; 0, 0 where there may
    be no answer, and every window says so with more.
    """
    model, tokenizer = parts
    spans, nothing = [], []  # (sum of logits, probability, ...)
    for window in windows_of(tokenizer, *pair, **WINDOWS):
        output = model(**window.inputs)
        start, end = output.start_logits[0], output.end_logits[0]
        sure = (start.softmax(0)[:, None] * end.softmax(0)[None]).tolist()
        total = (start[:, None] + end[None]).tolist()
        for a, b in itertools.product(np.flatnonzero(window.numbers >= 0).tolist(), repeat=2):
            if a <= b < a + MAX_ANSWER:
                spans.append((total[a][b], sure[a][b], window.spans[a][0], window.spans[b][1]))
        nothing.append((total[0][0], sure[0][0]))
    found = {}
    for key, aggregate in enumerate(("logits", "probabilities")):
        best, least = max(spans, key=lambda span: span[key]), min(nothing, key=lambda one: one[key])
        found[aggregate, False] = best[1:]
        found[aggregate, True] = (least[1], 0, 0) if least[key] > best[key] else best[1:]
    return found


@pytest.mark.parametrize("count", (12, pytest.param(200, marks=pytest.mark.full)))
def test_answers_of_documents_are_those_of_a_loop(folders, count):
    pairs, theirs = questions(count), of_transformers(folders["qa"], "AutoModelForQuestionAnswering")
    expected = [answers_of(theirs, pair) for pair in pairs]
    answerer = fastbert.QuestionAnswerer(folders["qa"], device="cpu", dtype="float64")
    for aggregate, no_answer in itertools.product(("logits", "probabilities"), (False, True)):
        found = answerer.predict(pairs, windows=Windows(**WINDOWS), aggregate=aggregate, no_answer=no_answer)
        for row, pair, each in zip(found, pairs, expected, strict=True):
            score, start, end = each[aggregate, no_answer]
            assert (row["start"], row["end"], row["answer"]) == (start, end, pair[1][start:end])
            assert row["score"] == pytest.approx(score, rel=1e-9)
        silent = sum(row["answer"] == "" for row in found)
        assert bool(silent) == no_answer


def test_answers_alone_and_in_a_batch(folders):
    answerer, pairs = fastbert.QuestionAnswerer(folders["qa"], device="cpu"), questions(12)
    found = answerer.predict(pairs, windows=Windows(**WINDOWS))
    alone = [answerer.predict(pair, windows=Windows(**WINDOWS)) for pair in pairs]
    for one, same in zip(found, alone, strict=True):
        assert one | {"score": 0} == same | {"score": 0}
        assert one["score"] == pytest.approx(same["score"], rel=1e-5)


def test_a_question_has_half_of_a_window(folders):
    """What is longer is left out: the text has its place whatever the question."""
    answerer = fastbert.QuestionAnswerer(folders["qa"], device="cpu")
    made = answerer.cut([("cat " * 99, "the dog ran " * 30)], Windows(24, 3))
    assert {(one["input_ids"] == tiny.VOCAB.index("cat")).sum() for one in made} == {11}


@pytest.mark.parametrize("text", ("", "   \n ", "a" * 3000, "\u200d" * 500), ids=("empty", "spaces", "word", "unseen"))
def test_odd_texts(folders, text):
    """A text without a token has no answer and no entity."""
    answer = fastbert.QuestionAnswerer(folders["qa"], device="cpu").predict(("who ?", text))
    assert (answer["answer"], answer["start"], answer["end"]) == ((text, 0, 3000) if "a" in text else ("", 0, 0))
    entities = fastbert.TokenClassifier(folders["tokens"], device="cpu").predict(text)
    assert len(entities) <= 1 and (not entities or entities[0]["end"] == len(text) == 3000)


def test_what_cannot_be_is_refused(folders):
    classifier = fastbert.TokenClassifier(folders["tokens"], device="cpu")
    answerer = fastbert.QuestionAnswerer(folders["qa"], device="cpu")
    known = "there are core, logits, probabilities, vectors"
    for call, error, message in (
        (lambda: classifier.predict("a", aggregate="sum"), InputError, f"unknown aggregate 'sum'; {known}"),
        (lambda: classifier.predict(["a", ["b"]]), InputError, "some rows hold a text, and some a list of words"),
        (lambda: classifier.predict([3]), TypeError, "inputs[0] is a int, not a string"),
        (lambda: classifier.predict([["a", 3]]), TypeError, "inputs[0][1] is a int, not a string"),
        (
            lambda: classifier.predict("a", windows=Windows(99)),
            InputError,
            "length of windows is 99; this model takes 64",
        ),
        (lambda: classifier.predict("a", windows=Windows(pool="max")), InputError, "spans have only 'first'"),
        (lambda: answerer.predict(("a", "b"), aggregate="vectors"), InputError, "there are logits, probabilities"),
        (lambda: answerer.predict(["a"]), TypeError, "inputs has 1 parts; it must be a pair of texts"),
        (lambda: answerer.predict(("a b", "c"), windows=Windows(6, 2)), InputError, "may overlap by 0 to 0, not by 2"),
        (lambda: fastbert.TokenClassifier(folders["qa"]), ConfigError, "is no token classifier: it is for qa"),
        (lambda: fastbert.QuestionAnswerer(folders["tokens"]), ConfigError, "no question answerer: it is for tokens"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()
    assert classifier.predict([]) == [] and answerer.predict([]) == []
