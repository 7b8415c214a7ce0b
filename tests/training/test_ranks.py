"""Several ranks on gloo have the losses and the weights of one, whatever shares the work, and in whatever parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from training_runs import ALONE, OPTIONS, losses_of, make_loop, make_model, short, until

from fastbert.training.distributed import ProcessGroup

pytestmark = pytest.mark.full
STEPS = 24


def train(process_group: ProcessGroup, folder: Path, steps: int, wrapping: str, changes: dict[str, Any]) -> None:
    """Go on from what is in the folder to a step; rank 0 leaves the whole weights there."""
    changes, model = dict(changes), make_model()
    if changes.pop("activation_checkpointing", False):
        model.activation_checkpointing_enable()
    of_loop = {name: changes.pop(name) for name in ("optimizer", "layer_decay", "lr") if name in changes}
    options = until(steps, changes.pop("options", OPTIONS), log_every=1, **changes)
    loop = make_loop(folder, options, process_group, wrapping, model, **of_loop)
    loop.schedule.multiplier = lambda step: 1.0
    loop.resume()
    loop.run()
    whole = get_model_state_dict(loop.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if process_group.is_main:
        torch.save(whole, folder / "weights.pt")


def rank_of(rank: int, size: int, folder: str, steps: int, wrapping: str, changes: dict[str, Any]) -> None:
    store = dist.FileStore(f"{folder}/store-{size}-{steps}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.set_num_threads(1)
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    train(ProcessGroup(rank, size, torch.device("cpu"), *groups), Path(folder), steps, wrapping, changes)
    dist.destroy_process_group()


def run(folder: Path, size: int, wrapping: str = "ddp", steps: int = STEPS, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    if size == 1:
        train(ALONE, folder, steps, wrapping, changes)
    else:
        mp.spawn(rank_of, (size, str(folder), steps, wrapping, changes), nprocs=size)


def assert_alike(folder: Path, one: Path, losses: float = 1e-5, weights: float = 1e-4) -> None:
    """Rounding only. Adam divides by the gradients' size, so that weights with tiny gradients differ by more."""
    assert losses_of(folder) == pytest.approx(losses_of(one), rel=1e-6, abs=losses)
    expected, found = torch.load(one / "weights.pt"), torch.load(folder / "weights.pt")
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= weights, name


@pytest.mark.parametrize("size,parts", [(4, 1), (2, 2)])
@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
def test_ranks_and_parts_are_one_batch(wrapping, size, parts, tmp_path):
    """The mean over all labels of a step, and gradients clipped by their length together; tied tables."""
    run(tmp_path / "one", 1, max_norm=0.5)
    run(tmp_path / "many", size, wrapping, parts=parts, max_norm=0.5)
    assert_alike(tmp_path / "many", tmp_path / "one")
    assert len(set(losses_of(tmp_path / "one"))) == STEPS  # other batches, other weights


@pytest.mark.parametrize("size,parts", [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
def test_steps_of_fewer_examples_than_ranks_and_parts(wrapping, size, parts, tmp_path):
    """Ranks have nothing of them; before the first of them a run goes on with other ranks."""
    run(tmp_path / "one", 1, steps=9, options=short())
    run(tmp_path / "many", size, wrapping, steps=3, options=short(), parts=parts)
    run(tmp_path / "many", 3 - min(size, 2), wrapping, steps=9, options=short(), parts=parts)
    assert_alike(tmp_path / "many", tmp_path / "one")


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "lamb", "lr": 0.02},  # its norms are those of whole tensors, not of shards
        {"layer_decay": 0.5},
        {"activation_checkpointing": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_fsdp_with(changes, tmp_path):
    run(tmp_path / "one", 1, **changes)
    run(tmp_path / "two", 2, "fsdp", **changes)
    assert_alike(tmp_path / "two", tmp_path / "one")


def test_fsdp_in_bf16(tmp_path):
    """It gathers bfloat16 and adds up in float32. The curve is float32's within the noise of bf16, and so is DDP's."""
    run(tmp_path / "exact", 1)
    run(tmp_path / "ddp", 2, "ddp", bf16=True)
    run(tmp_path / "fsdp", 2, "fsdp", bf16=True)
    exact, ddp, fsdp = (torch.tensor(losses_of(tmp_path / name)) for name in ("exact", "ddp", "fsdp"))
    assert (ddp - exact).abs().max() < 0.02
    assert (fsdp - exact).abs().max() < 0.02
    weights = torch.load(tmp_path / "fsdp/weights.pt")
    assert all(weight.dtype is torch.float32 for weight in weights.values())


@pytest.mark.parametrize("chain", [[(1, "ddp"), (2, "fsdp"), (4, "ddp")], [(4, "fsdp"), (2, "ddp"), (1, "ddp")]])
def test_a_run_goes_on_with_other_ranks(chain, tmp_path):
    run(tmp_path / "one", 1)
    for (size, wrapping), steps in zip(chain, (8, 16, 24), strict=True):
        run(tmp_path / "many", size, wrapping, steps=steps)
    assert_alike(tmp_path / "many", tmp_path / "one")
