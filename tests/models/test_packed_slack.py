"""PackedInputs.with_capacity and pad_to: a batch in one of few sizes."""

from __future__ import annotations

import pytest
import torch

import fastbert
from fastbert.errors import InputError
from fastbert.packed_inputs import PackedInputs
from fastbert.packing import PackedBatch

ROWS = [[5, 6, 7], [8, 9]]
NEW = dict(total_tokens=8, batch_size=4, max_seqlen=6)


def padded(packed: PackedInputs, **changes: int) -> PackedInputs:
    return packed.with_capacity(**{**NEW, **changes})


def test_labels_of_tokens():
    ids = {name: ROWS for name in ("token_type_ids", "position_ids", "task_type_ids")}
    packed = fastbert.pack_inputs(ROWS, **ids, labels=[[-100, 3, 4], [2, -100]], next_sentence_label=[1, 0])
    made = padded(packed)
    for name in ("input_ids", *ids):
        assert made[name].tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert made["labels"].tolist() == [-100, 3, 4, 2, -100, -100, -100, -100]
    assert made["next_sentence_label"].tolist() == [1, 0, -100, -100]
    batch = made["batch"]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 5, 5] and batch.cu_seqlens.dtype == torch.int32
    assert (batch.total_tokens, batch.batch_size, batch.max_seqlen, batch.seqlen) == (8, 4, 6, None)
    assert batch.labelled.tolist() == [1, 2, 3, 7]
    assert batch.bounds == dict.fromkeys(("input_ids", *ids), (0, 9)) | {
        "labels": (0, 4),
        "next_sentence_label": (0, 1),
    }
    assert list(made) == list(packed) and packed["batch"].total_tokens == 5


@pytest.mark.parametrize(
    ("labels", "expected"),
    (
        ([1, 0], [1, 0, -100, -100]),
        ([1.5, -100.0], [1.5, -100.0, 0.0, 0.0]),
        ([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
    ),
)
def test_labels_of_sequences(labels, expected):
    made = padded(fastbert.pack_inputs(ROWS, labels=labels))
    assert made["labels"].tolist() == expected and made["batch"].labelled is None


def test_ends_of_answers():
    made = padded(fastbert.pack_inputs(ROWS, start_positions=[0, 1], end_positions=[2, 1]))
    assert made["start_positions"].tolist() == [0, 1, -100, -100]
    assert made["end_positions"].tolist() == [2, 1, -100, -100]


def test_choices_are_as_many_in_an_example_of_slack():
    packed = fastbert.pack_inputs([ROWS], labels=[1])
    assert padded(packed)["labels"].tolist() == [1, -100] and padded(packed)["num_choices"] == 2
    with pytest.raises(InputError, match="batch_size is 5; it must be a multiple of num_choices 2"):
        padded(packed, batch_size=5)


def test_a_batch_of_no_sequence_is_all_slack():
    """What a rank has that has no part in a step."""
    made = padded(fastbert.pack_inputs(ROWS, labels=ROWS).without_sequences())
    assert made["batch"].cu_seqlens.tolist() == [0] * 5 and made["batch"].labelled.tolist() == [7] * 2
    assert made["labels"].tolist() == [-100] * 8 and not made["input_ids"].any()


def test_sizes_that_are_the_batchs_own_change_nothing():
    packed = fastbert.pack_inputs(ROWS, labels=ROWS)
    made = packed.with_capacity(5, 2, 3)
    for name in ("input_ids", "labels"):
        assert torch.equal(made[name], packed[name])
    assert torch.equal(made["batch"].cu_seqlens, packed["batch"].cu_seqlens)
    assert torch.equal(made["batch"].labelled, packed["batch"].labelled)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"total_tokens": 4}, "the batch does not fit: its total_tokens is 5, and it is to be padded to 4"),
        ({"batch_size": 1}, "its batch_size is 2, and it is to be padded to 1"),
        ({"max_seqlen": 2}, "its max_seqlen is 3, and it is to be padded to 2"),
    ),
)
def test_a_batch_that_does_not_fit_is_refused(changes, message):
    packed = fastbert.pack_inputs(ROWS, labels=[[-100, 3, 4], [2, -100]])
    with pytest.raises(InputError, match=message):
        padded(packed, **changes)


@pytest.mark.parametrize("mask", ([[1, 1], [1, 0]], [[1, 1], [1, 1]]))
def test_a_batch_with_padded_outputs_is_refused(mask):
    with pytest.raises(InputError, match="a batch with padded outputs takes no padding rows"):
        padded(fastbert.pack_inputs(torch.tensor([[1, 2], [3, 0]]), torch.tensor(mask)))


def test_bounds_hold_the_ids_of_slack():
    """And stay unknown where nothing has looked."""
    batch = PackedBatch(None, torch.tensor([0, 1]), 1, 1, None, 1, bounds={"input_ids": (5, 7)})
    assert batch.with_capacity(2, 2, 3).bounds == {"input_ids": (0, 7)}
    assert PackedBatch(None, torch.tensor([0, 1]), 1, 1, None, 1).with_capacity(2, 2, 3).bounds is None


@pytest.mark.parametrize(("tokens", "count"), ((1, 3), (3, 3), (4, 6), (9, 9), (11, 12)))
def test_labelled_tokens_come_in_quarters(tokens, count):
    """Where no row is padding, a token without a label is the one that stands for more."""
    row = list(range(5, 17))
    packed = fastbert.pack_inputs([row], labels=[[1] * tokens + [-100] * (12 - tokens)])
    batch = packed.with_capacity(12, 1, 12)["batch"]
    assert batch.labelled.tolist() == [*range(tokens), *[11] * (count - tokens)]


SIZES = [(16, 4, 8), (8, 4, 6), (6, 2, 3)]


@pytest.mark.parametrize(("rows", "size"), ((ROWS, (6, 2, 3)), ([[5, 6, 7, 8]], (8, 4, 6)), ([[5] * 7], (16, 4, 8))))
def test_a_batch_takes_the_smallest_size_that_holds_it(rows, size):
    examples = [{"input_ids": row} for row in rows]
    collated = fastbert.PackingCollator(padded_outputs=False, pad_to=SIZES)(examples)
    for packed in (fastbert.pack_inputs(rows, pad_to=SIZES), collated):
        batch = packed["batch"]
        assert (batch.total_tokens, batch.batch_size, batch.max_seqlen) == size
        expected = fastbert.pack_inputs(rows).with_capacity(*size)
        assert torch.equal(packed["input_ids"], expected["input_ids"])
        assert torch.equal(batch.cu_seqlens, expected["batch"].cu_seqlens)


def test_sizes_that_hold_no_batch_or_are_none_are_refused():
    with pytest.raises(
        InputError, match=r"no size of pad_to holds a batch of 9 tokens and 1 sequences, the longest of 9;"
    ):
        fastbert.pack_inputs([[5] * 9], pad_to=SIZES)
    for wrong in ((8, 4), 8, (8, 0, 4), (8.0, 4, 4)):
        with pytest.raises(InputError, match=r"its sizes are \(tokens, sequences, max_seqlen\), each above 0"):
            fastbert.pack_inputs(ROWS, pad_to=[wrong])
    with pytest.raises(InputError, match="pad_to is for batches without padded outputs: give padded_outputs=False"):
        fastbert.PackingCollator(pad_to=SIZES)
