"""PackingCollator beside pack_inputs, with a DataLoader and with a real model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import make_batch
from family_configs import config_for
from seeds import manual_seed

from fastbert.data.collator import PackingCollator
from fastbert.data.masking import Masking, example_keys
from fastbert.errors import InputError
from fastbert.models.classes import CLASSES
from fastbert.packed_inputs import PackedInputs, pack_inputs

ROWS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def assert_same(a: PackedInputs, b: PackedInputs) -> None:
    assert set(a) == set(b)
    for name in set(a) - {"batch", "num_choices"}:
        assert torch.equal(a[name], b[name]), name
    assert torch.equal(a["batch"].cu_seqlens, b["batch"].cu_seqlens) and a["batch"].bounds == b["batch"].bounds


@pytest.mark.parametrize("name", ["labels", "label", "label_ids"])
@pytest.mark.parametrize("labels", [[0, 2, 1], [0.5, 1.0, 2.0], [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], ROWS])
def test_is_pack_inputs_of_the_columns(labels, name):
    examples = [
        {"input_ids": ids, "token_type_ids": [0] * len(ids), name: label}
        for ids, label in zip(ROWS, labels, strict=True)
    ]
    expected = pack_inputs(ROWS, token_type_ids=[[0] * len(ids) for ids in ROWS], labels=labels)
    assert_same(PackingCollator(padded_outputs=False)(examples), expected)


def test_padding_is_left_out():
    examples = [{"input_ids": [*ids, 0, 0], "attention_mask": [1] * len(ids) + [0, 0]} for ids in ROWS]
    assert_same(PackingCollator(padded_outputs=False)(examples), pack_inputs(ROWS))
    masking = Masking(1, np.arange(20) < 3)
    keyed = [
        {**example, "example_key": int(key)}
        for example, key in zip(examples, example_keys(0, 0, range(3)), strict=True)
    ]
    found = PackingCollator(masking, padded_outputs=False)(keyed)
    shown, labels = masking(np.concatenate(ROWS), np.array([3, 2, 4]), example_keys(0, 0, range(3)))
    assert found["input_ids"].tolist() == shown.tolist() and found["labels"].tolist() == labels.tolist()


def test_a_model_takes_it():
    """The loss is that of the padded batch with the same labels."""
    config = config_for("bert", "MaskedLM")
    model, batch = CLASSES["bert", "MaskedLM"](config).eval(), make_batch(config)
    rows = [ids[real].tolist() for ids, real in zip(batch.inputs["input_ids"], batch.real, strict=True) if real.any()]
    masking = Masking(1, np.arange(config.vocab_size) < 4)
    keys = example_keys(0, 0, range(len(rows))).tolist()
    packed = PackingCollator(masking, padded_outputs=False)(
        [{"input_ids": r, "example_key": k} for r, k in zip(rows, keys, strict=True)]
    )
    expected = model(packed["input_ids"], cu_seqlens=packed["batch"].cu_seqlens, labels=packed["labels"]).loss
    assert torch.equal(model(**packed).loss, expected) and expected > 0


def test_without_keys_torch_seeds_the_masks():
    collate = PackingCollator(Masking(1, np.arange(20) < 3), padded_outputs=False)
    examples = [{"input_ids": list(range(3, 20))}] * 4
    manual_seed(0)
    first, second = collate(examples), collate(examples)
    manual_seed(0)
    assert_same(collate(examples), first)
    assert not torch.equal(first["labels"], second["labels"])


@pytest.mark.parametrize(
    "examples,said",
    [
        ([], "an empty batch"),
        (
            [{"input_ids": [1]}, {"input_ids": [1], "labels": 0}],
            "examples 0 and 1 differ: one of them alone has labels",
        ),
        ([{"input_ids": [1], "text": "a"}], "no model takes 'text'"),
        ([{"labels": 0}], "have no input_ids"),
        ([{"input_ids": [1], "labels": 0, "label": 0}], "labels under two names"),
    ],
)
def test_bad_examples(examples, said):
    with pytest.raises(InputError, match=said):
        PackingCollator()(examples)


def test_masking_makes_the_labels():
    with pytest.raises(InputError, match="masking makes them"):
        PackingCollator(Masking(1, np.arange(20) < 3))([{"input_ids": [5], "labels": [5]}])
