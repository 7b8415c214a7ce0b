"""Texts on their way to a model: tokens in one row, batches of them by a budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from seeds import numpy_generator
from tiny import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fastbert.data.tokenized import CHUNK_INPUTS, CHUNK_TEXTS, Tokenized, pack, run_batches, tokenize
from fastbert.packed_inputs import PackedInputs

CPU = torch.device("cpu")


def tokenizer_of_words(length: int | None = None, stride: int = 0) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(("[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(WORDS.split())))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    if length:
        made.enable_truncation(length, stride=stride)
    return made


def ids_of(batch: PackedInputs) -> list[int]:
    return batch["input_ids"].tolist()


def test_tokens_are_those_of_the_tokenizer():
    """More texts than are tokenised at a time, pairs among them, some cut."""
    tokenizer, words = tokenizer_of_words(12), np.array(WORDS.split())
    draw = numpy_generator(0)
    texts = [" ".join(draw.choice(words, n)) for n in draw.integers(0, 20, CHUNK_TEXTS + 50)]
    inputs = [text if i % 3 else (text, "a pair") for i, text in enumerate(texts)]
    said = [tokenizer.encode(*(one if isinstance(one, tuple) else (one,))) for one in inputs]
    assert all("token_type_ids" not in one for one in tokenize(tokenizer, inputs[:9], with_types=False))
    made = tokenize(tokenizer, inputs, with_types=True)
    assert [one["input_ids"].tolist() for one in made] == [one.ids for one in said]
    assert [one["token_type_ids"].tolist() for one in made] == [one.type_ids for one in said]
    assert made.cut == [i for i, one in enumerate(said) if one.overflowing] and made.cut
    assert made.lengths.tolist() == [len(one) for one in said]
    assert made.source.tolist() == list(range(len(inputs)))


def test_a_file_has_the_batches_of_its_chunks():
    """An evaluation gives all of it at once, and `predict` so many rows at a time: the products have equal sizes."""
    draw = numpy_generator(0)
    windows = draw.integers(1, 3, 2 * CHUNK_INPUTS + 5)
    sources = np.repeat(np.arange(len(windows)), windows)
    lengths = draw.integers(3, 20, len(sources))
    ids, offsets = draw.integers(0, 100, lengths.sum(), np.int32), np.concatenate([[0], np.cumsum(lengths)])
    made = Tokenized(ids, None, offsets, sources)
    whole = [batch for _, batch in run_batches(ids_of, made, CPU, share=CHUNK_INPUTS)]
    parts = []
    for start in range(0, len(windows), CHUNK_INPUTS):
        inside = (start <= sources) & (sources < start + CHUNK_INPUTS)
        tokens, sizes = ids[np.repeat(inside, lengths)], np.concatenate([[0], np.cumsum(lengths[inside])])
        part = Tokenized(tokens, None, sizes, sources[inside] - start)
        parts += [batch for _, batch in run_batches(ids_of, part, CPU, share=CHUNK_INPUTS)]
    assert whole == parts


@pytest.mark.parametrize("budget, size", ((30, None), (1, None), (10_000, 4), (None, None)))
def test_batches_keep_to_their_budget(budget, size):
    draw, seen = numpy_generator(0), []
    lengths = draw.integers(0, 20, 100)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    made = Tokenized(draw.integers(0, 100, lengths.sum(), np.int32), None, offsets, np.arange(100))
    for places, ids in run_batches(ids_of, made, CPU, budget, size, on_batch=seen.append):
        assert ids == ids_of(made.pack(places)) == ids_of(pack([made[i] for i in places]))
        assert len(places) == 1 or len(ids) <= (budget or 10**6)
        assert size is None or len(places) <= size
    assert sum(seen) == 100


def test_nothing_has_no_batches():
    for share in (None, CHUNK_INPUTS):
        assert not list(run_batches(ids_of, tokenize(tokenizer_of_words(), [], with_types=True), CPU, share=share))
