"""Long texts in pieces: what is cut off is not tokenised, and what is left has the tokens of the whole."""

from __future__ import annotations

import resource
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from full import halved, left_to_full
from test_tokenized import tokenizer_of_words
from test_windows import texts_of, trained
from tokenizers import AddedToken, Tokenizer, processors
from tokenizers.trainers import BpeTrainer

from fastbert.data.chunks import Cutter
from fastbert.data.long_texts import pairs, pieces
from fastbert.data.long_texts.pairs import CutPair, encode
from fastbert.data.long_texts.pieces import as_far_as_needed, first_piece, groups, pieces_of, uncut
from fastbert.data.tokenized import tokenize, tokenize_one

LONG = " ".join(texts_of(200))
WORDS = LONG.split()


def with_special(kind: str) -> Tokenizer:
    made = trained(kind)
    made.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 2))
    return made


@halved
@left_to_full(lambda p: p["kind"] not in ("wordpiece", "bytes"))
@pytest.mark.parametrize("side", ("right", "left"))
@pytest.mark.parametrize("kind", ("wordpiece", "bytes", "unigram", "no pre-tokenizer"))
def test_what_is_cut_has_the_tokens_of_the_whole(kind, side, monkeypatch):
    tokenizer = with_special(kind)
    texts = [" ".join(words) for words in (WORDS[:2], WORDS[:11], WORDS[:150], WORDS[3:93])]
    inputs: list = [*texts, "a" * 800, *product(texts, texts), ("a" * 300, texts[3])]
    for length in (30, 31):  # of two long texts the one of more tokens gets the odd one
        tokenizer.enable_truncation(length, direction=side)
        expected = [tokenizer.encode(*(one if isinstance(one, tuple) else (one,))) for one in inputs]
        for chars in (40, pieces.PIECE_CHARS):
            monkeypatch.setattr(pieces, "PIECE_CHARS", chars)
            made = tokenize(tokenizer, inputs, with_types=True)
            for i, one in enumerate(expected):
                for found in (made[i], tokenize_one(tokenizer, inputs[i], with_types=True)):
                    assert found["input_ids"].tolist() == one.ids, inputs[i]
                    assert found["token_type_ids"].tolist() == one.type_ids, inputs[i]
            assert made.cut == [i for i, one in enumerate(expected) if one.overflowing]
        monkeypatch.undo()
    assert sum(isinstance(one, CutPair) for one in encode(tokenizer, inputs)) == 16


@left_to_full(lambda p: p["kind"] == "no pre-tokenizer")  # parts nothing: test_windows.py
@pytest.mark.parametrize("kind", ("wordpiece", "bytes", "unigram", "no pre-tokenizer"))
def test_texts_without_a_blank_between_words_are_parted_where_their_tokens_allow_it(kind, monkeypatch):
    """Signs, ideographs and lines; rows of the same sign, of which a token may have several."""
    monkeypatch.setattr(pieces, "PIECE_CHARS", 300)
    monkeypatch.setattr(pieces, "PLACES_TO_TRY", 5)
    tokenizer = trained(kind)
    if kind == "bytes":
        signs = "!!!! ???? .... \u4e2d\u6587\u4e2d\u6587 " * 9
        tokenizer.train_from_iterator([signs, LONG], BpeTrainer(vocab_size=800))
    tokenizer.add_tokens(["! !", "the the"])
    parted = set()
    for name, text in WITHOUT_BLANKS.items():
        whole = tokenizer.encode(text, add_special_tokens=False)
        for side in ("right", "left"):
            found = list(pieces_of(tokenizer, text, side))
            assert "".join(found[:: 1 if side == "right" else -1]) == text
            made = tokenizer.encode_batch(found, add_special_tokens=False)[:: 1 if side == "right" else -1]
            assert [i for one in made for i in one.ids] == whole.ids, (name, side)
            if len(found) > 2:
                parted.add(name)
            else:
                assert len(found) == 1 and name not in parted, (name, side, len(found))
    assert parted == PARTED[kind]


WITHOUT_BLANKS = {
    "signs": "! ? " * 300,
    "added": "! " * 601,
    "added words": "the " * 301,
    "row": "!" * 1201,
    "ideographs": "\u4e2d\u6587" * 600,
    "same ideograph": "\u4e2d" * 1201,
    "chinese": "\u4e2d\u6587\uff0c\u4e2d\u3002" * 240,
    "lines": "a\nthe cat.\n" * 110,
    "tabs": "dog\t" * 300,
    "emoji": "\U0001f600" * 1200,
    "white space": "a" + " " * 1200 + "b",
    "digits": "1234567" * 170,
}
PARTED = {
    "wordpiece": {"signs", "row", "ideographs", "same ideograph", "chinese", "lines", "tabs"},
    "bytes": {"signs", "chinese", "lines", "tabs"},
    "unigram": {"signs"},
    "no pre-tokenizer": set(),
}


@pytest.mark.parametrize("side", ("right", "left"))
def test_only_what_is_kept_is_tokenised(side, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_CHARS", 300)
    tokenizer = with_special("wordpiece")
    tokenizer.enable_truncation(30, direction=side)
    part = as_far_as_needed(tokenizer, LONG)
    assert 250 < len(part) < 1000 and (LONG.startswith if side == "right" else LONG.endswith)(part)
    read: list[int] = []
    monkeypatch.setattr(pairs, "pieces_of", lambda *given: (read.append(len(one)) or one for one in pieces_of(*given)))
    (one,) = encode(tokenizer, [(LONG, " ".join(LONG.split()[:300]))])  # both as far as the shorter one has tokens
    assert len(one) == 30 and 2000 < sum(read) < 4000 < len(LONG)
    tokenizer.no_truncation()
    assert as_far_as_needed(tokenizer, LONG) == LONG


@pytest.mark.parametrize("side", ("right", "left"))
@pytest.mark.parametrize(("tokens", "most"), ((30, 2_300), (1000, 6_300), (10_000, 50_000)))
def test_the_fewer_tokens_are_kept_the_fewer_characters_are_read(tokens, most, side):
    """Of 500,000 words that were cut to 512 tokens 16,384 characters were read, twice: 9 ms beside 30 of the model."""
    tokenizer, text = with_special("wordpiece"), " ".join([LONG] * 8)
    whole = tokenizer.encode(text).ids
    assert len(whole) > 30_000 and len(text) > 2 * most
    tokenizer.enable_truncation(tokens, direction=side)
    assert len(first_piece(tokenizer, text)) <= len(as_far_as_needed(tokenizer, text)) < most
    (one,) = encode(tokenizer, [text])
    kept = whole[1 : tokens - 1] if side == "right" else whole[1 - tokens : -1]
    assert one.ids == [whole[0], *kept, whole[-1]] and one.overflowing


@pytest.mark.parametrize("side", ("right", "left"))
def test_a_row_without_a_place_does_not_end_the_parting(side, monkeypatch):
    """From the end, all that stood before the row was one piece. From the begin, each piece looked through the rest."""
    monkeypatch.setattr(pieces, "PIECE_CHARS", 300)
    tokenizer, scanned = with_special("wordpiece"), []

    class Scanned:
        def __init__(self, made: Any):
            self.made = made

        def finditer(self, text: str, start: int, stop: int) -> Any:
            for one in self.made.finditer(text, start, stop):
                scanned.append(one.start() - start)
                start = one.start()
                yield one
            scanned.append(min(stop, len(text)) - start)

    watched = [Scanned(one) for one in pieces._places()]
    monkeypatch.setattr(pieces, "_places", lambda: watched)
    text = "!".join([LONG[:2000], *["a" * 620] * 20])
    found = list(pieces_of(tokenizer, text, side))[:: 1 if side == "right" else -1]
    assert "".join(found) == text and len(found) > 20 and max(map(len, found)) < 1600
    made = tokenizer.encode_batch(found, add_special_tokens=False)
    assert [i for one in made for i in one.ids] == tokenizer.encode(text, add_special_tokens=False).ids
    assert sum(scanned) < 4 * len(text)


def test_of_a_pair_of_long_texts_the_ids_that_are_kept_are_held(monkeypatch):
    """Of six pairs, 27 MB, all ids were, and each piece copied those before it: 158 MB more, and 23 s, not 6."""
    monkeypatch.setattr(pieces, "PIECE_CHARS", 300)
    held = list[int]()

    class Reading(pairs._Reading):
        def go_on(self) -> None:
            super().go_on()
            held.append(len(self.ids))

    monkeypatch.setattr(pairs, "_Reading", Reading)
    tokenizer = with_special("wordpiece")
    for side in ("right", "left"):
        tokenizer.enable_truncation(31, direction=side)
        encode(tokenizer, [(LONG, LONG[:5000])])
    assert max(held) == 28 and len(held) > 60


def test_a_word_without_an_end_is_tokenised_once_and_searched_in_parts(monkeypatch):
    """Where nothing can be left out, nothing is counted; a search of the whole would hold up Python's other threads."""
    monkeypatch.setattr(pieces, "PIECE_CHARS", 300)
    tokenizer = with_special("wordpiece")
    tokenizer.enable_truncation(30)
    counted, searched = list[int](), list[int]()

    def searching(found, text, start, stop):
        searched.append(stop - start)
        return found.finditer(text, start, stop)

    places = tuple(SimpleNamespace(finditer=partial(searching, found)) for found in pieces._places())
    monkeypatch.setattr(pieces, "_places", lambda: places)
    monkeypatch.setattr(pieces, "_count", lambda tokenizer, text: counted.append(len(text)) or 1)
    for text, parts in (("a" * 20_000, []), ("a" * 20_000 + ".", [20_000])):
        assert as_far_as_needed(tokenizer, text) == text
        assert counted == parts and sum(searched) <= 2 * 302  # within one word no place is looked for


def test_a_pair_that_is_cut_twice_takes_no_memory_by_the_square():
    """17,000 sequences, of 290 MB, as `tokenizers` makes it of these."""
    tokenizer = with_special("wordpiece")
    tokenizer.enable_truncation(30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = tokenize(tokenizer, [(LONG, LONG)], with_types=True)
    assert made.lengths.tolist() == [30] and made.cut == [0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


def test_documents_of_one_query_take_no_memory_by_the_square():
    """1,800 sequences for each of 30 documents, 280 MB in all, as `tokenizers` makes it of these."""
    tokenizer = with_special("wordpiece")
    tokenizer.enable_truncation(30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = tokenize(tokenizer, [("! " * 30, "? " * i + "! " * 8000) for i in range(30)], with_types=True)
    assert made.lengths.tolist() == [30] * 30 and len(made.cut) == 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


@pytest.mark.parametrize("query", (" ".join(WORDS[:40]), LONG), ids=("short", "long"))
def test_a_text_of_many_pairs_is_read_once(query, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_CHARS", 300)
    tokenizer, read = with_special("wordpiece"), []
    tokenizer.enable_truncation(30)

    class Counting:
        def __init__(self, made: Tokenizer):
            self.made = made

        def __getattr__(self, name: str) -> Any:
            return getattr(self.made, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            read.extend(texts)
            return self.made.encode_batch_fast(texts, **options)

    monkeypatch.setattr(pairs, "uncut", lambda one: Counting(uncut(one)))
    documents = [" ".join(WORDS[i : i + 60]) for i in range(30)]
    tokenize(tokenizer, [(query, document) for document in documents], with_types=True)
    assert set(documents) < set(read) and len(read) == len(set(read))
    assert sum(text in query for text in read if text not in documents) == 1


def test_texts_are_tokenised_some_at_a_time(monkeypatch):
    """By the characters of their different texts, and by their number."""
    texts = ["a" * 40, "b" * 70, "c" * 10, "c" * 10, *["q"] * 5]
    pairs = [("q" * 60, "a" * 30), ("q" * 60, "b" * 30), ("q" * 60, "c" * 30)]
    for chars, most, inputs, sizes in (
        (100, 9, texts, [2, 7]), (1000, 4, texts, [4, 4, 1]), (1, 9, texts[:3], [1, 1, 1]), (100, 9, pairs, [2, 1]),
        (120, 9, pairs, [2, 1]), (121, 9, pairs, [3]), (100, 9, [], []),
    ):  # fmt: skip
        monkeypatch.setattr(pieces, "CHARS_AT_ONCE", chars)
        found = list(groups(inputs, most))
        assert [one.stop - one.start for one in found] == sizes, (chars, most)
        assert [one for part in found for one in inputs[part]] == inputs


def test_a_pair_has_two_types_where_no_special_tokens_part_its_texts():
    assert tokenize(trained("wordpiece"), [("a dog", "the dog ran")], with_types=True)[0][
        "token_type_ids"
    ].tolist() == [0, 0, 1, 1, 1]


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
    parts = {name: getattr(tokenizer, name) for name in ("model", "normalizer", "pre_tokenizer", "post_processor")}
    moved: Any = SimpleNamespace(
        **parts,
        to_str=tokenizer.to_str,
        get_added_tokens_decoder=lambda: {90: AddedToken("a")},
        encode_special_tokens=False,
    )
    copy = uncut(moved)  # its ids are not those that new tokens get
    assert copy.encode(text).ids == made.encode(text).ids and copy.truncation is copy.padding is None


def test_special_tokens_in_texts_that_are_read_as_text():
    """By a setting that no tokenizer.json holds: short pairs kept to it, and others had real special tokens."""
    tokenizer = with_special("wordpiece")
    tokenizer.add_special_tokens(["[X]"])
    tokenizer.encode_special_tokens = True
    tokenizer.enable_truncation(30)
    inputs = [("a [X]", "dog"), ("a [X] cat " * 20, "the dog ran")]
    made, expected = tokenize(tokenizer, inputs, with_types=False), [tokenizer.encode(*one).ids for one in inputs]
    assert all(tokenizer.token_to_id("[X]") not in ids for ids in expected)
    assert [one["input_ids"].tolist() for one in made] == expected
    whole = Cutter(tokenizer, 300, 0).cut([inputs[1][0]])
    tokenizer.no_truncation()
    assert whole.ids.tolist() == tokenizer.encode(inputs[1][0]).ids
