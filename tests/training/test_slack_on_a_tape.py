"""The loss of every task, recorded once and replayed on another batch of the same bucket, waits for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from full import left_to_full
from host_syncs import HostSyncs, no_value_is_on_the_host
from pretraining_runs import write_text
from seeds import manual_seed
from slack_tasks import TASKS, make
from tape import Tape

from fastbert.backend import use_backend
from fastbert.native.availability import triton_error
from fastbert.packed_inputs import PackedInputs
from fastbert.training.task import Task

datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.skipif(triton_error() is not None, reason=str(triton_error())),
    pytest.mark.simulated,  # test_graphed_replays.py has one tape of a loss
]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    datasets.disable_progress_bars()
    return write_text(tmp_path_factory.mktemp("tape") / "text.txt")


def in_one_bucket(batches: list[PackedInputs]) -> list[PackedInputs]:
    """With a token of slack at least, and a sequence, or an example."""
    parts = [packed["batch"] for packed in batches]
    labelled = [0 if part.labelled is None else len(part.labelled) for part in parts]
    sizes = (
        max(part.total_tokens for part in parts) + 3,
        max(part.batch_size for part in parts) + batches[0].get("num_choices", 1),
        max(labelled) + 2,
        max(part.max_seqlen for part in parts) + 1,
    )
    return [packed.with_capacity(*sizes) for packed in batches]


def tensors_of(packed: PackedInputs) -> list[torch.Tensor]:
    batch = packed["batch"]
    fields = [value for value in packed.values() if isinstance(value, torch.Tensor)]
    return [*fields, batch.cu_seqlens, *([] if batch.labelled is None else [batch.labelled])]


def zeroed(task: Task) -> list[torch.Tensor]:
    """The gradients, which stay where they are."""
    for parameter in task.model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.zero_()
    return [parameter.grad for parameter in task.model.parameters()]


def run(task: Task, packed: PackedInputs, totals: list[torch.Tensor]) -> torch.Tensor:
    loss = task.loss(task.model, packed, totals)
    loss.backward()
    return loss.detach()


@left_to_full(lambda p: p["name"] in ("ranking", "order", "several labels"))  # as others, or a part of them
@pytest.mark.parametrize("name", TASKS)
def test_a_replayed_loss_is_that_of_the_batch_that_is_there(name, tmp_path, text, monkeypatch):
    """Its numbers of tokens, sequences, labels and lengths are others. Bit for bit, and so are gradients."""
    task, batch = make(name, tmp_path, text)
    task.model.train()
    plain = [batch(0), batch(1)]
    buffers, other = in_one_bucket(plain)
    assert plain[0]["batch"].batch_size != plain[1]["batch"].batch_size
    totals, others = ([torch.tensor(2.0 * n) for n in task.counts(packed)] for packed in (buffers, other))
    no_value_is_on_the_host(monkeypatch)
    tape = Tape()
    with use_backend("triton"):
        gradients = zeroed(task)
        with HostSyncs() as syncs, tape:
            loss = run(task, buffers, totals)
        assert syncs.found == []
        zeroed(task)
        manual_seed(1)
        expected = [run(task, other, others).clone(), *[gradient.clone() for gradient in gradients]]
        zeroed(task)
        for mine, theirs in zip([*tensors_of(buffers), *totals], [*tensors_of(other), *others], strict=True):
            mine.copy_(theirs)
        manual_seed(1)
        tape.replay()
    assert all(map(torch.equal, [loss, *gradients], expected)) and loss.isfinite() and any(g.any() for g in gradients)
