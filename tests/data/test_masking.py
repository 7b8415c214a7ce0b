"""What is masked: how much of it, whole units, never special tokens; and always the same for the same keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
from seeds import numpy_generator
from tokenizers import Tokenizer, models

from fastbert.data.masking import SPAN_WORDS, UNITS, Masking, example_keys, word_starts
from fastbert.errors import InputError

VOCAB = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3} | {f"w{i}": i for i in range(4, 60)}
VOCAB |= {f"##s{i}": i for i in range(60, 100)}


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(VOCAB, unk_token="[PAD]"))
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    return tokenizer


def make_batch(sequences: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[CLS] A [SEP] B [SEP] of 1 to 60 tokens each, (ids, lengths, keys)."""
    draw, rows = numpy_generator(seed), []
    for _ in range(sequences):
        a, b = (draw.integers(4, 100, draw.integers(1, 61)) for _ in range(2))
        rows.append(np.concatenate([[1], a, [2], b, [2]]))
    return np.concatenate(rows), np.array([len(row) for row in rows]), example_keys(7, 0, range(sequences))


def words_of(ids: np.ndarray) -> np.ndarray:
    """The number of the word that each token belongs to, -1 for special ones; written out, as the oracle."""
    found, word, previous = [], -1, 0
    for token in ids.tolist():
        if token < 4:
            found.append(-1)
        else:
            word += token < 60 or previous < 4
            found.append(word)
        previous = token
    return np.array(found)


@pytest.mark.parametrize("unit", UNITS)
def test_how_much_and_what(unit):
    """15 % of what is not special; of it 80 % the mask, 10 % other tokens, 10 % left; labels are the true ids."""
    ids, lengths, keys = make_batch(4000)
    shown, labels = Masking.of(make_tokenizer(), unit=unit)(ids, lengths, keys)
    chosen = labels != -100
    assert not chosen[ids < 4].any() and (labels[chosen] == ids[chosen]).all()
    assert (shown[~chosen] == ids[~chosen]).all() and not np.isin(shown[chosen], (0, 1, 2)).any()
    # At least one token of any sequence, and whole units: 0.1535 of units of several tokens, deviating by 0.0003.
    assert 0.149 < chosen.sum() / (ids >= 4).sum() < (0.151 if unit == "token" else 0.156)
    # What a unit becomes is drawn once for it; tokens that are chosen side by side may be several units, or one.
    drawn = chosen.sum() if unit == "token" else (np.diff(chosen.astype(int)) == 1).sum()
    others = (shown != 3) & (shown != ids)
    for found, share in ((shown[chosen] == 3, 0.8), (others[chosen], 0.1 * 95 / 96)):
        assert abs(found.mean() - share) < 6 * math.sqrt(share * (1 - share) / drawn)
    ends = np.cumsum(lengths)[:-1]
    for row, real in zip(np.split(chosen, ends), np.split(ids >= 4, ends), strict=True):
        assert row.any()
        if unit == "token":
            assert row.sum() == max(1, np.rint(0.15 * real.sum()))
    random_words = np.bincount(shown[others], minlength=100)[4:]
    chi_squared = ((random_words - random_words.mean()) ** 2).sum() / random_words.mean()
    assert abs(chi_squared - 95) < 6 * math.sqrt(2 * 95)  # its mean and deviation where all 96 are as likely


@pytest.mark.parametrize("unit", ["word", "span"])
def test_words_are_masked_whole(unit):
    ids, lengths, keys = make_batch(500)
    chosen = Masking.of(make_tokenizer(), unit=unit)(ids, lengths, keys)[1] != -100
    word = words_of(ids)
    _, first = np.unique(word, return_index=True)
    assert first[0] == 0 and word[0] == -1  # of special tokens, then of each word in turn
    assert (chosen == chosen[first[word + 1]])[word >= 0].all()


def test_spans_have_the_lengths_of_spanbert():
    """Of words that are masked one after the other: 3.8 on average as drawn, ten at most."""
    ids = np.concatenate([[1], np.full(4000, 5), [2]])
    masking = Masking(3, np.arange(100) < 4, np.arange(100) >= 4, unit="span", share=0.02)
    runs = []
    for key in example_keys(0, 0, range(200)):
        chosen = masking(ids, np.array([len(ids)]), np.array([key]))[1] != -100
        edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(int), [0]])))
        runs += (edges[1::2] - edges[::2]).tolist()
    lengths = np.array(runs)
    assert lengths.mean() == pytest.approx(3.8, abs=0.2) and (lengths > SPAN_WORDS).mean() < 0.05


@pytest.mark.parametrize("unit", UNITS)
def test_a_sequence_is_masked_alike_in_any_batch_and_otherwise_in_another_epoch(unit):
    ids, lengths, keys = make_batch(50)
    masking, ends = Masking.of(make_tokenizer(), unit=unit), np.cumsum(lengths)[:-1]
    together = [np.split(t, ends) for t in masking(ids, lengths, keys)]
    rows = np.split(ids, ends)
    for i in numpy_generator(1).permutation(50):
        alone = masking(rows[i], lengths[i : i + 1], keys[i : i + 1])
        assert all(np.array_equal(t[i], one) for t, one in zip(together, alone, strict=True))
    later = masking(ids, lengths, example_keys(7, 1, range(50)))
    assert not np.array_equal(later[1], np.concatenate(together[1]))
    assert not set(example_keys(7, 1, range(10**4)).tolist()) & set(example_keys(8, 1, range(10**4)).tolist())


def test_nothing_to_mask():
    masking = Masking.of(make_tokenizer())
    ids = np.array([1, 2, 1, 9, 2])
    shown, labels = masking(ids, np.array([2, 3]), example_keys(0, 0, range(2)))
    assert labels.tolist() == [-100, -100, -100, 9, -100] and shown[:3].tolist() == [1, 2, 1]


def test_word_starts_of_other_tokenizers():
    bpe = Tokenizer(models.BPE({"a": 0, "Ġb": 1, "c": 2}, []))
    unigram = Tokenizer(models.Unigram([("a", 0.0), ("▁b", 0.0)]))
    assert word_starts(bpe).tolist() == [False, True, False] and word_starts(unigram).tolist() == [False, True]
    with pytest.raises(InputError, match="does not mark where words begin"):
        word_starts(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


@pytest.mark.parametrize(
    "options,said",
    [
        ({"share": 0.0}, "share is 0.0"),
        ({"masked": 0.9, "random": 0.2}, "masked=0.9 and random=0.2"),
        ({"unit": "letter"}, "'letter'; it must be one of token, word, span"),
        ({"mask_id": 100}, "mask_id is 100; the vocabulary has 100 tokens"),
        ({"unit": "word", "starts_word": None}, "needs starts_word"),
    ],
)
def test_options_out_of_range(options, said):
    of = Masking.of(make_tokenizer(), unit="word")
    given = {"mask_id": of.mask_id, "is_special": of.is_special, "starts_word": of.starts_word}
    with pytest.raises(InputError, match=said):
        Masking(**given | options)


def test_ids_and_tokenizers_that_do_not_fit():
    with pytest.raises(InputError, match="input_ids holds 100; the tokenizer has ids from 0 to 99"):
        Masking.of(make_tokenizer())(np.array([5, 100]), np.array([2]), example_keys(0, 0, [0]))
    with pytest.raises(InputError, match="no mask token"):
        Masking.of(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
