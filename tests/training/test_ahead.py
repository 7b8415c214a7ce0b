"""Batches on their way to the device: they come as they are, in every order that a GPU may run things in."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from full import halved, left_to_full, thinned
from host_syncs import HostSyncs
from late_device import BlocksComeBackEarly, CopiesDoNotWait, SimulatedLane, StepsDoNotWait
from new_processes import since_now
from tape import TapeGraphs
from training_runs import ALONE, OPTIONS, make_loop

from fastbert.backend import use_backend
from fastbert.config import EncoderConfig
from fastbert.data.loader import WorkerKilled, make_loader, read
from fastbert.errors import TrainingError
from fastbert.models.classes import CLASSES
from fastbert.native.availability import triton_error
from fastbert.packed_inputs import PackedInputs
from fastbert.training.graphed.ahead import SPARE, STEPS_AHEAD, Ahead
from fastbert.training.graphed.buckets import Buckets, Sizes, Staged, stage
from fastbert.training.graphed.lanes import lane_to
from fastbert.training.graphed.plan import plan_buckets
from fastbert.training.loop import Place, sampler_of
from fastbert.training.task import Phase
from fastbert.training.train_step import TrainStep

PHASE = Phase(until=12, step_tokens=80, max_length=16)


class Data:
    """An epoch of masked words in small steps, and their way to a lane."""

    def __init__(self, folder, parts: int = 1, start_step: int = 0, by_length: bool = False, tokens: int = 80):
        phase = replace(PHASE, step_tokens=tokens)
        options = replace(OPTIONS, phases=(phase,), parts=parts, group_by_length=by_length)
        task = make_loop(folder, options).task
        self.sampler, self.examples = sampler_of(task, phase, options, 32, ALONE, Place(epoch_step=start_step))
        self.collate, self.counts, self.parts = task.collate(phase), task.counts, parts
        self.buckets = Buckets()
        self.example = plan_buckets(self.buckets, self.collate, self.examples, self.sampler, 16, 1)

    @property
    def steps(self) -> int:
        return len(self.sampler) // self.parts

    def plain(self) -> Iterator[list[PackedInputs]]:
        batches = iter(make_loader(self.examples, self.sampler, self.collate))
        return (list(step) for step in zip(*[batches] * self.parts, strict=True))

    def ahead(self, lane: Any, workers: int = 0, device: Any = "cpu") -> Ahead:
        counts, parts = self.counts, self.parts
        return Ahead(self.buckets, counts, self.example, lane, device, parts=parts, workers=workers)

    def read(self, ahead: Ahead, workers: int = 0) -> Any:
        take = ahead.blocks.take
        return read(
            make_loader(self.examples, self.sampler, self.collate, workers=workers, finish=ahead.finish, take=take)
        )

    def expected(self, packed: PackedInputs) -> Staged | PackedInputs:
        bucket = self.buckets.find(Sizes.of(packed))
        return packed if bucket is None else stage(packed, bucket, self.counts(packed))


def fields_of(batch: PackedInputs | Staged) -> dict[str, Any]:
    packed = batch.form.read(batch.block, batch.bounds) if isinstance(batch, Staged) else batch
    fields = vars(packed["batch"]) | dict(packed)
    return {name: value for name, value in fields.items() if name not in ("batch", "cache")}


def differs(found: PackedInputs | Staged, packed: PackedInputs, expected: PackedInputs | Staged) -> str | None:
    if isinstance(found, PackedInputs):  # by itself, whichever bucket there is
        expected = packed
    elif (found.form, found.counts, found.tokens) != (expected.form, expected.counts, packed["batch"].total_tokens):
        return "what is said of the batch"
    ours, theirs = fields_of(found), fields_of(expected)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = torch.equal(value.cpu(), theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        if not same:
            return name
    return None


def run(data: Data, lane: SimulatedLane, workers: int = 0) -> int:
    """All steps of the epoch; what the device reads wrongly is in lane.wrong. How many batches came by themselves."""
    ahead, plainly = data.ahead(lane, workers), 0

    def look(number: int, found: Any, packed: PackedInputs, expected: Any) -> None:
        if (name := differs(found, packed, expected)) is not None:
            lane.wrong.append(f"{name} of step {number}")

    with closing(ahead), closing(data.read(ahead, workers)) as made:
        steps = ahead.steps(made, data.steps)
        for number, (found, plain) in enumerate(zip(steps, data.plain(), strict=True)):
            looks = [partial(look, number, f, p, data.expected(p)) for f, p in zip(found, plain, strict=True)]
            plainly += sum(isinstance(batch, PackedInputs) for batch in found)
            lane.launch(lambda looks=looks: [each() for each in looks])
    lane.finish()
    if not lane.wrong:
        assert lane.locked is None and ahead.blocks.num_free == len(ahead.blocks.memory)
        assert lane.copies_done + plainly == len(data.sampler)
    return plainly


@pytest.fixture(autouse=True)
def hangs_are_seen():
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


KINDS = ({}, {"parts": 2}, {"start_step": 5}, {"by_length": True}, {"parts": 2, "start_step": 3, "by_length": True})


@thinned(5)
@pytest.mark.parametrize("workers", (0, 1, 2))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
def test_batches_come_as_they_are(kind, workers, tmp_path):
    """Bit for bit, in the order of the plain way, an epoch that goes on and parts of steps included."""
    data, lane = Data(tmp_path, **kind), SimulatedLane("at once")
    assert data.steps > SPARE + STEPS_AHEAD + 1
    assert run(data, lane, workers) == 0 and lane.wrong == [] and lane.was_locked
    assert lane.pauses == 0


ORDERS = ("at once", "late", "copies first", "steps first", "1 behind", "2 behind", "5 behind", 1, 2, 3)


@thinned(4)
@pytest.mark.parametrize("parts", (1, 2))
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_that_a_device_may_have(order, parts, tmp_path):
    lane = SimulatedLane(order)
    assert run(Data(tmp_path, parts), lane) == 0 and lane.wrong == []


@left_to_full(lambda p: p["order"] == "late")  # both are late: what comes first then is another test's
@pytest.mark.parametrize("order", ("late", "copies first"))
def test_a_late_device_and_workers(order, tmp_path):
    """The blocks are all that lets the host wait."""
    lane = SimulatedLane(order)
    assert run(Data(tmp_path, tokens=30), lane, workers=2) == 0 and lane.wrong == [] and lane.pauses > 0


@pytest.mark.parametrize(
    ("fault", "order"),
    [
        (StepsDoNotWait, "steps first"), (StepsDoNotWait, "late"), (CopiesDoNotWait, "copies first"),
        (BlocksComeBackEarly, "late"), (BlocksComeBackEarly, "copies first"),
    ],
)  # fmt: skip
def test_what_is_not_waited_for_is_seen(fault, order, tmp_path):
    lane = fault(order)
    run(Data(tmp_path), lane)
    assert any("of step" in wrong for wrong in lane.wrong)


@halved
@pytest.mark.parametrize("workers", (0, 2))
@pytest.mark.parametrize("parts", (1, 3))
def test_a_device_two_steps_behind_is_not_waited_for(parts, workers, tmp_path):
    """So far the host may be ahead at least; the copies for the next two steps wait behind."""
    lane = SimulatedLane("2 behind")
    ahead = (data := Data(tmp_path, parts)).ahead(lane, workers)
    with closing(ahead), closing(data.read(ahead, workers)) as made:
        for _ in ahead.steps(made, data.steps):
            lane.launch(lambda: None)
            assert lane.pauses == 0


@pytest.mark.parametrize("workers", (0, 1))
def test_batches_that_no_bucket_or_no_block_holds(workers, tmp_path):
    """They come by themselves; some are small enough, and these do not."""
    data = Data(tmp_path)
    sizes = [Sizes.of(packed) for packed in chain(*data.plain())]
    data.buckets = Buckets(most=1)
    data.buckets.sizes.append(Sizes(min(sizes).total_tokens + 1, 80, 16, 80))
    held = sum(size.total_tokens == min(sizes).total_tokens for size in sizes)
    assert run(data, lane := SimulatedLane("late"), workers) == len(sizes) - held > 0 and lane.wrong == []
    data = Data(tmp_path)
    data.example = PackedInputs({name: data.example[name] for name in data.example if name != "token_type_ids"})
    assert run(data, lane := SimulatedLane("late"), workers) > 0 and lane.wrong == []


def test_memory_that_cannot_be_locked(tmp_path):
    lane = SimulatedLane("at once", "out of memory")
    with pytest.warns(UserWarning, match="not page-locked, so copies wait: out of memory") as warned:
        run(Data(tmp_path), lane)
    assert lane.wrong == [] and not lane.was_locked and len(warned) == 1


def test_no_room_for_the_blocks(tmp_path, monkeypatch):
    def share(memory: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", share)
    with pytest.raises(TrainingError, match=r"19 blocks .* unable to allocate .* Fewer workers"):
        Data(tmp_path).ahead(SimulatedLane("at once"), workers=2)


@pytest.mark.full  # the blocks, shared by those that are forked in the tests above
def test_processes_that_are_spawned(tmp_path):
    before, lane = multiprocessing.get_start_method(), SimulatedLane("late")
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert run(Data(tmp_path), lane, workers=1) == 0 and lane.wrong == []
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("steps", (0, 1, 7))
def test_closed_early(steps, tmp_path):
    """The processes end by themselves, and copies before their memory goes."""
    data, lane, others = Data(tmp_path), SimulatedLane("late"), since_now()
    ahead = data.ahead(lane, workers=2)
    with closing(ahead), closing(data.read(ahead, 2)) as made, closing(ahead.steps(made, data.steps)) as batches:
        for _ in range(steps):
            next(batches)
            lane.launch(lambda: None)
        workers = others()
        assert bool(workers) == bool(steps)
    assert all(worker.exitcode == 0 for worker in workers) and not others()
    assert lane.locked is None and lane.wrong == [] and lane.was_locked == bool(steps)


class Failing:
    """Collates, but for the batch that holds the n-th example."""

    def __init__(self, collate: Any, fail: Any):
        self.collate, self.masking, self.fail, self.left = collate, collate.masking, fail, 6

    def __call__(self, examples: list[Any]) -> PackedInputs:
        self.left -= 1
        if self.left == 0:
            self.fail()
        return self.collate(examples)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise ConnectionError("the data's server has gone")


@pytest.mark.parametrize(
    ("fail", "workers", "error"), [(refuse, 0, ConnectionError), (refuse, 2, ConnectionError), (die, 2, WorkerKilled)]
)
def test_what_fails_where_batches_are_made(fail, workers, error, tmp_path):
    data, lane, others = Data(tmp_path), SimulatedLane("late"), since_now()
    ahead, data.collate = data.ahead(lane, workers), Failing(data.collate, fail)
    with pytest.raises(error), closing(ahead), closing(data.read(ahead, workers)) as made:
        for _ in ahead.steps(made, data.steps):
            lane.launch(lambda: None)
    lane.finish()
    assert not others() and lane.locked is None and lane.wrong == []


SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.simulated
@pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
def test_no_step_of_a_loop_waits(tmp_path):
    """Two steps ahead of a device, which is never asked anything: not for a value, and not to be done."""
    model = CLASSES["bert", "MaskedLM"](EncoderConfig(vocab_size=60, max_position_embeddings=64, **SHAPE))
    options = replace(OPTIONS, phases=(replace(PHASE, step_tokens=16),), workers=2)
    loop = make_loop(tmp_path, options, model=model)
    step = TrainStep(loop.task, model, loop.optimizer, ALONE, max_norm=1.0, bf16=False, graphs=TapeGraphs())
    step.lane, loop._step = (lane := SimulatedLane("at once")), step
    step._graphed.buckets.most = 1  # the largest: each takes a second to record
    loop.model.train()
    with use_backend("triton"), closing(loop._epoch(options.phases[0])) as epoch:
        for number in range(4):
            with HostSyncs() as syncs:
                loop.train_step(next(epoch))
            assert number == 0 or syncs.found == [], number
    assert lane.pauses == 0 and lane.copies_done >= 4 and not step.objections and lane.wrong == []


@pytest.mark.parametrize("workers", (0, 2))
@pytest.mark.parametrize("kind", ("cpu", pytest.param("cuda", marks=NO_GPU)))
def test_on_a_device(kind, workers, tmp_path):
    data, device = Data(tmp_path, parts=2), torch.device(kind, 0)
    with closing(data.ahead(lane_to(device), workers, device)) as ahead, closing(data.read(ahead, workers)) as made:
        for found, plain in zip(ahead.steps(made, data.steps), data.plain(), strict=True):
            assert [differs(f, p, data.expected(p)) for f, p in zip(found, plain, strict=True)] == [None] * 2
            assert all(f.block.device.type == kind for f in found)
            assert ahead.blocks.memory.is_pinned() == (kind == "cuda")
    assert not ahead.blocks.memory.is_pinned() and ahead.blocks.num_free == len(ahead.blocks.memory)
