"""Windows of long texts: as the tokenizers cut them, and each token in one core."""

from __future__ import annotations

import functools
import re
from time import process_time

import numpy as np
import pytest
import tiny
from seeds import numpy_generator
from test_tokenized import tokenizer_of_words
from tiny import WORDS
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from fastbert.data.chunks import CORE, OVERLAP, Cutter, Windows, ranges_of
from fastbert.data.long_texts import pieces
from fastbert.data.tokenization import load_tokenizer
from fastbert.data.tokenized import tokenize
from fastbert.errors import InputError

SIZES = ((8, 0), (8, 2), (9, 5), (13, 4), (300, 20))


def texts_of(most: int, count: int = 40) -> list[str]:
    draw, words = numpy_generator(0), np.array(WORDS.split())
    return [" ".join(draw.choice(words, n)) for n in (0, 1, *draw.integers(0, most, count))]


@pytest.mark.parametrize("is_pair", (False, True), ids=("texts", "pairs"))
@pytest.mark.parametrize("length,overlap", SIZES)
def test_windows_are_those_of_the_tokenizer(length, overlap, is_pair):
    """Which gives the rest of a text as `overflowing`: return_overflowing_tokens of transformers."""
    tokenizer, texts, added = tokenizer_of_words(), texts_of(200), 3 if is_pair else 2
    questions = [" ".join(WORDS.split()[: i % max(1, length - added - overlap)]) for i in range(len(texts))]
    cutter = Cutter(tokenizer, length, overlap, with_types=True)
    made = cutter.cut(texts, [ids for ids, _ in cutter.read(questions)] if is_pair else None)
    tokenizer.enable_truncation(length, stride=overlap, strategy="only_second" if is_pair else "longest_first")
    inputs = list(zip(questions, texts, strict=True)) if is_pair else texts
    said = [(i, w) for i, one in enumerate(tokenizer.encode_batch(inputs)) for w in (one, *one.overflowing)]
    assert [one["input_ids"].tolist() for one in made] == [window.ids for _, window in said]
    assert [one["token_type_ids"].tolist() for one in made] == [window.type_ids for _, window in said]
    assert made.source.tolist() == [i for i, _ in said] and not made.cut
    spans = [
        list(span) if s == int(is_pair) else [-1, -1]
        for _, window in said
        for span, s in zip(window.offsets, window.sequence_ids, strict=True)
    ]
    assert made.spans.tolist() == spans


@pytest.mark.parametrize("length,overlap", SIZES)
def test_each_token_is_in_the_core_in_which_it_is_farthest_from_a_cut(length, overlap):
    room = length - 2
    for count in (0, 1, room - 1, room, room + 1, 2 * room, 5 * room + 3):
        ranges = ranges_of(count, room, overlap)
        cores = list(zip(ranges.core_starts, ranges.core_stops, strict=True))
        assert np.concatenate([np.arange(*core) for core in cores]).tolist() == list(range(count))
        for token in range(count):
            far = []
            for start, stop in zip(ranges.starts, ranges.stops, strict=True):
                left = count if start == 0 else token - start
                right = count if stop == count else stop - 1 - token
                far.append(min(left, right) if start <= token < stop else -1)
            (core,) = [i for i, (start, stop) in enumerate(cores) if start <= token < stop]
            assert core == far.index(max(far))


def trained(kind: str) -> Tokenizer:
    """A tokenizer of subwords, of the kind that BERT, RoBERTa, XLM-RoBERTa or DeBERTa-v3 has."""
    return Tokenizer.from_str(_trained(kind))


@functools.cache
def _trained(kind: str) -> str:
    texts = texts_of(200)
    if kind == "wordpiece":
        made, trainer = (
            Tokenizer(models.WordPiece(unk_token="[UNK]")),
            trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"]),
        )
        made.pre_tokenizer, made.normalizer = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    elif kind == "bytes":
        made, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer(vocab_size=400)
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made, trainer = (
            Tokenizer(models.Unigram()),
            trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"]),
        )
        if kind == "unigram":
            made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(texts, trainer)
    made.add_tokens(["the cat", "old house"])  # of two words
    return made.to_str()


@pytest.mark.parametrize("kind", ("wordpiece", "bytes", "unigram", "no pre-tokenizer"))
def test_a_text_in_pieces_has_the_tokens_of_the_whole(kind, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_CHARS", 300)
    tokenizer, texts = trained(kind), [" ".join(texts_of(200)), "", *texts_of(90), "a" * 2000]
    texts[0] = texts[0].replace("dog", "d\u00f6g\u2028\u00a0").replace(" ran", ", the  cat ran")
    cutter = Cutter(tokenizer, 50, 10)
    if kind == "no pre-tokenizer":  # its tokens may span words, and depend on all that stands before
        with pytest.warns(UserWarning, match="characters of a text are tokenised at once, which takes memory"):
            found = list(cutter.read(texts))
        assert len(list(cutter.pieces(texts[0]))) == 1
    else:
        assert len(list(cutter.pieces(texts[0]))) > 10
        with pytest.warns(UserWarning, match="2,000 characters of a text are tokenised at once"):
            found = list(cutter.read(texts))
    for (ids, spans), text in zip(found, texts, strict=True):
        whole = tokenizer.encode(text, add_special_tokens=False)
        assert ids.tolist() == whole.ids
        assert spans.tolist() == [[a, b] if b > a else [-1, -1] for a, b in whole.offsets]


def test_spans_end_where_their_white_space_begins():
    draw = numpy_generator(3)
    text = "".join(draw.choice(list("ab \n\u00a0\u3000"), 300))
    spans = np.sort(draw.integers(0, 301, (500, 2)), axis=1).astype(np.int32)
    spans[::50] = -1
    found = Cutter(trained("wordpiece"), 50, 10)._trimmed(text, np.full(500, -1), spans)
    for (start, stop), (begin, end) in zip(found.tolist(), spans.tolist(), strict=True):
        wanted = text[begin:end].strip() if begin >= 0 else ""
        left = len(text[begin:end]) - len(text[begin:end].lstrip())
        assert [start, stop] == ([begin + left, begin + left + len(wanted)] if wanted else [-1, -1])


MARKS = ("\u0301", "\u0323\u0302", "\ufe0f", "\u200d")  # accents, a variation selector, a joiner


@pytest.mark.parametrize("room", (1, 3))
def test_what_is_taken_off_a_character_is_in_its_span(room, tmp_path):
    """BERT's normalizer deletes marks. A chunk ends behind them, and takes no blank, nor a mark of no character."""
    tiny.write_tokenizer(tmp_path)
    draw = numpy_generator(8)
    marked = ["".join(char + draw.choice(["", "", *MARKS]) for char in word) for word in draw.choice(WORDS.split(), 40)]
    text = "\u0301" + "".join(draw.choice([" ", "  ", "\u200f "]) + word for word in marked)
    made = Cutter(load_tokenizer(tmp_path), room + 2, 0).cut([text])
    wanted = [match.span() for match in re.finditer(r"[^\s\u200f]+", text[1:])]  # each is a token
    spans = made.spans[made.spans[:, 0] >= 0] - 1
    assert spans.tolist() == [list(one) for one in wanted]
    ends = [wanted[min(i + room, len(wanted)) - 1][1] for i in range(0, len(wanted), room)]
    assert (made.characters[:, 1] - 1).tolist() == ends


def test_a_mark_that_is_a_token_is_that_tokens(tmp_path):
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert Cutter(tokenizer, 5, 0).cut(["e\u0301 a"]).spans.tolist() == [[0, 1], [1, 2], [1, 2], [3, 4], [3, 4]]


def test_much_white_space_in_one_of_many_tokens_takes_no_time():
    count = 30_000
    text = "\n" * count + "a" * count  # it took a pass over all tokens for each of the blanks: 2 s
    places = np.arange(count, 2 * count, dtype=np.int32)
    spans = np.concatenate([[[0, count + 1]], np.stack([places, places + 1], 1)]).astype(np.int32)
    cutter, start = Cutter(trained("wordpiece"), 50, 10), process_time()
    found = cutter._trimmed(text, np.full(len(spans), -1), spans)
    assert process_time() - start < 0.5
    assert found[:2].tolist() == [[count, count + 1]] * 2 and np.array_equal(found[1:], spans[1:])


def test_a_text_that_fits_is_as_without_windows():
    tokenizer, texts = tokenizer_of_words(50), texts_of(40)
    made, plain = (
        Cutter(tokenizer, 50, 10, with_types=True).cut(texts),
        tokenize(tokenizer, texts, with_types=True),
    )
    for name in ("ids", "types", "offsets", "source"):
        np.testing.assert_array_equal(getattr(made, name), getattr(plain, name))
        assert getattr(made, name).dtype == getattr(plain, name).dtype
    assert not (made.parts == OVERLAP).any()


def test_a_limit_says_what_it_leaves_out():
    tokenizer, words = tokenizer_of_words(), WORDS.split() * 2
    texts = [" ".join(words[:n]) for n in (3, 6, 10, 30)]
    cutter = Cutter(tokenizer, 8, 2, limit=2)
    with pytest.warns(UserWarning, match=r"1 of 4 texts have more than limit=2 chunks; their last 20 tokens are"):
        made = cutter.cut(texts)
    assert made.source.tolist() == [0, 1, 2, 2, 3, 3] and made.cut == [3]
    assert (made.parts == CORE).sum() == 3 + 6 + 10 + 10


def test_an_overlap_may_be_a_share_of_a_window():
    """Of its own length, whatever the model takes."""
    for given, tokens in ((Windows(20), (20, 5)), (Windows(30, 0.5), (30, 15)), (Windows(), (64, 16))):
        assert given.tokens(64) == tokens


@pytest.mark.parametrize(
    "given,message",
    (
        ({"pool": "sum"}, "pool of windows is 'sum'; there are mean, max, top3, first"),
        ({"length": 0}, "length of windows is 0; it must be at least 1"),
        ({"limit": 0}, "limit of windows is 0; it must be at least 1"),
        ({"overlap": -1}, "overlap of windows is -1; it is a share below 1, or a number of tokens"),
        ({"overlap": 1.5}, "overlap of windows is 1.5; it is a share below 1, or a number of tokens"),
        ({"length": 513}, "length of windows is 513; this model takes 512 tokens"),
        ({"overlap": 510}, "chunks of 512 tokens, 2 special tokens among them, may overlap by 0 to 509, not by 510"),
        ({"length": 2}, "chunks of 2 tokens, 2 special tokens among them, have no room for a text"),
    ),
    ids=str,
)
def test_bad_windows_are_refused(given, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Cutter(tokenizer_of_words(), *Windows(**given).tokens(512))
