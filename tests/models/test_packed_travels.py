"""How a PackedInputs travels: worker, pinned memory, device, trainer; and the guide to it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import torch
import transformers
from batches import make_batch, make_labels
from family_configs import config_for
from seeds import manual_seed
from torch import nn
from torch.utils.data import DataLoader

import fastbert

GUIDE = (Path(__file__).parents[2] / "docs" / "packing.md").read_text(encoding="utf-8")


def make_model(head: str) -> nn.Module:
    return getattr(fastbert, f"BertFor{head}")(config_for("bert", head, 0, num_hidden_layers=1))


def collate(rows: list[int]) -> fastbert.PackedInputs:
    return fastbert.pack_inputs([[1] * (row + 1) for row in rows], labels=[row % 3 for row in rows])


def as_lists(packed: fastbert.PackedInputs) -> dict:
    fields = {name: v.tolist() for name, v in packed.items() if isinstance(v, torch.Tensor)}
    return {**fields, "offsets": packed["batch"].cu_seqlens.tolist(), "bounds": packed["batch"].bounds}


def test_workers_pickle_and_trainers_carry_it():
    packed = collate([0, 1, 2, 3])
    (loaded,) = DataLoader(range(4), batch_size=4, collate_fn=collate, num_workers=1)
    rebuilt = type(packed)({name: value for name, value in packed.items()})  # transformers' Trainer does
    for other in (loaded, rebuilt, pickle.loads(pickle.dumps(packed)), packed.to("cpu", non_blocking=True)):
        assert type(other) is fastbert.PackedInputs and as_lists(other) == as_lists(packed)
    moved = make_packed_everything().to("meta")
    batch = moved["batch"]
    tensors = [v for v in moved.values() if isinstance(v, torch.Tensor)] + [
        batch.cu_seqlens,
        batch.indices,
        batch.labelled,
    ]
    assert all(t.is_meta for t in tensors) and moved["batch"].bounds == make_packed_everything()["batch"].bounds


def make_packed_everything() -> fastbert.PackedInputs:
    config = config_for("bert", "PreTraining", 0)
    batch = make_batch(config, "holes")
    return fastbert.pack_inputs(**batch.inputs, **make_labels(config, "PreTraining", batch, seed=0))


def test_a_data_loader_pins_all_of_it(monkeypatch):
    """By torch's own function, which a DataLoader with pin_memory=True runs; no memory is pinned without a GPU."""
    from torch.utils.data._utils.pin_memory import pin_memory

    pinned: list[int] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t, *device: pinned.append(t.data_ptr()) or t)
    packed = make_packed_everything()
    batch, ways = packed["batch"], (pin_memory, lambda packed: packed.pin_memory())
    tensors = [v for v in packed.values() if isinstance(v, torch.Tensor)] + [
        batch.cu_seqlens,
        batch.indices,
        batch.labelled,
    ]
    for way in ways:
        pinned.clear()
        assert type(way(packed)) is fastbert.PackedInputs
        assert sorted(pinned) == sorted(t.data_ptr() for t in tensors)


def test_one_batch_runs_in_inference_mode_and_then_trains():
    """What a backend derives from it belongs to the call: tensors of inference mode cannot be kept for backward."""
    model, packed = make_model("SequenceClassification").eval(), collate([0, 1, 2])
    with torch.inference_mode():
        expected = model(packed).loss
    assert torch.equal(model(packed).loss, expected) and not packed["batch"].cache
    model(packed).loss.backward()


class Around(nn.Module):
    """A module of a user's own: the Trainer writes into the config of what it is given."""

    accepts_loss_kwargs = False

    def __init__(self):
        super().__init__()
        self.model = make_model("SequenceClassification")

    def forward(self, **inputs):
        return self.model(**inputs)


def test_the_trainer_carries_it(tmp_path):
    """From its DataLoader to the model's forward, and labels to the metrics."""
    options = {"label_names": ["labels"], "remove_unused_columns": False, "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_strategy="no", report_to=[], per_device_eval_batch_size=2, **options
    )
    seen: list = []
    trainer = transformers.Trainer(
        Around(), arguments, collate, list(range(5)), list(range(5)), compute_metrics=lambda p: seen.append(p) or {}
    )
    assert trainer.train().training_loss > 0
    trainer.evaluate()
    assert seen[0].label_ids.tolist() == [row % 3 for row in range(5)] and seen[0].predictions.shape == (5, 3)


def test_the_guides_example_trains():
    """As it stands; every step has a loss, and the parameters move."""
    manual_seed(0)
    block = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0]
    names: dict = {}
    exec(compile(block, "docs/packing.md", "exec"), names)
    assert torch.isfinite(names["loss"]) and names["optimizer"].state
