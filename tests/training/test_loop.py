"""A run's losses: those of a loop over transformers' model; the same bits after a stop; the same on two ranks."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers
from full import left_to_full
from precise import assert_close_to_theirs
from torch.distributed.checkpoint.state_dict import get_state_dict
from training_runs import OPTIONS, PHASE, losses_of, make_loop, make_model, short, steps_in, until, whole

from fastbert.data.batches import Steps, StepSampler
from fastbert.data.loader import make_loader
from fastbert.training.checkpoints import state_of
from fastbert.training.distributed import ProcessGroup
from fastbert.training.schedules import multiplier
from fastbert.training.task import Phase

SUPPORT = Path(__file__).parents[1] / "support"


def by_hand(steps: int, folder: Path, dtype: torch.dtype = torch.float32, phase: Phase = PHASE) -> list[float]:
    """The same steps over transformers' model: padded batches, torch's own optimizer and clipping."""
    ours = make_model()
    loop = make_loop(folder, model=ours)
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**ours.config.to_dict())).train()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.to(dtype)
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.98), eps=1e-6)
    losses: list[float] = []
    for epoch in range(steps):
        examples, lengths = loop.task.examples(epoch, phase)
        sampler = StepSampler(Steps(lengths, phase.step_tokens, phase.max_examples), 32, epoch=epoch)
        for packed in make_loader(examples, sampler, loop.task.collate(phase)):
            batch = packed["batch"]
            padded = {
                n: torch.nn.utils.rnn.pad_sequence(packed[n].split(batch.cu_seqlens.diff().tolist()), True, v)
                for n, v in (("input_ids", 0), ("token_type_ids", 0), ("labels", -100))
            }
            ones = torch.ones_like(packed["input_ids"]).split(batch.cu_seqlens.diff().tolist())
            loss = theirs(**padded, attention_mask=torch.nn.utils.rnn.pad_sequence(ones, True)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * multiplier("linear", 12, 2)(len(losses))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                return losses
    raise AssertionError


def test_losses_are_those_of_transformers(tmp_path):
    loop = make_loop(tmp_path)
    loop.run()
    found = losses_of(tmp_path)
    assert len(found) == 12 and loop.state.epoch >= 1
    assert_close_to_theirs(found, *(by_hand(12, tmp_path / "other", dtype) for dtype in (torch.float32, torch.float64)))


@left_to_full(lambda p: p["options"] is whole)  # whose steps all have as many examples as parts
@pytest.mark.parametrize("options,parts", [(whole, 1), (whole, 3), (short, 4)], ids=("whole", "parts", "short"))
def test_parts_of_a_step_add_up(options, parts, tmp_path):
    make_loop(tmp_path / "whole", options(save_every=0)).run()
    make_loop(tmp_path / "parts", options(parts=parts, save_every=0)).run()
    exact = by_hand(12, tmp_path / "other", torch.float64, options().phases[0])
    assert_close_to_theirs(losses_of(tmp_path / "parts"), losses_of(tmp_path / "whole"), exact)


@left_to_full(lambda p: not p["bf16"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_that_stopped_goes_on_with_the_same_bits(bf16, tmp_path):
    """Dropout included; what was logged after the checkpoint is logged again, once."""
    options = dataclasses.replace(OPTIONS, bf16=bf16)
    make_loop(tmp_path / "whole", dataclasses.replace(options, save_every=0), model=make_model(0.1)).run()
    make_loop(tmp_path / "parts", until(6, log_every=1, bf16=bf16), model=make_model(0.1)).run()
    (tmp_path / "parts/checkpoints/step-000000006").rename(tmp_path / "gone")
    second = make_loop(tmp_path / "parts", options, model=make_model(0.1))
    assert second.resume() and second.state.step == 4
    second.run()
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")


def test_a_run_goes_on_at_the_end_of_a_phase(tmp_path):
    """With the next phase, as a run that did not stop: shorter sequences first."""
    phases = (dataclasses.replace(PHASE, until=4, max_length=12), PHASE)
    make_loop(tmp_path / "whole", dataclasses.replace(OPTIONS, phases=phases, log_every=1, save_every=0)).run()
    make_loop(tmp_path / "parts", dataclasses.replace(OPTIONS, phases=phases, log_every=1, keep=3)).run()
    for step in (8, 12):
        shutil.rmtree(tmp_path / f"parts/checkpoints/step-{step:09d}")
    second = make_loop(tmp_path / "parts", dataclasses.replace(OPTIONS, phases=phases, log_every=1))
    assert second.resume() and second.state.step == 4 and second.state.phase == 0
    second.run()
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")


def test_activation_checkpointing_keeps_less_and_has_the_same_bits(tmp_path):
    """What autograd keeps for backward, in bytes; dropout included."""
    kept = {}
    for name in ("plain", "checkpointed"):
        model = make_model(0.1, num_hidden_layers=2)
        if name == "checkpointed":
            model.activation_checkpointing_enable()
        loop, sizes = make_loop(tmp_path / name, until(4, save_every=0), model=model), list[int]()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=sizes: to.append(t.nbytes) or t, lambda t: t):
            loop.run()
        kept[name] = sum(sizes)
    assert losses_of(tmp_path / "checkpointed") == losses_of(tmp_path / "plain")
    assert kept["checkpointed"] < 0.7 * kept["plain"], kept


def test_the_end_of_a_run_does_not_wait_for_its_last_checkpoint(tmp_path, monkeypatch):
    """What is done meanwhile sees it unfinished; it is whole when `run` returns, and was not copied before."""
    copied, seen, save = [], [], dcp.async_save

    def note(state, **to):
        copied.append(state["extra"]["step"])
        return save(state, **to)

    monkeypatch.setattr(dcp, "async_save", note)
    loop = make_loop(tmp_path, model=make_model(0.1))
    loop.at_end = lambda: seen.append((steps_in(tmp_path), len(losses_of(tmp_path))))
    loop.run()
    assert seen == [([4, 8], 12)] and copied == [4, 8] and steps_in(tmp_path) == [8, 12]
    again = make_loop(tmp_path)
    assert again.resume() and again.state.step == 12
    found, made = again.model.state_dict(), loop.model.state_dict()
    assert all(torch.equal(found[name], made[name]) for name in made)
    for mine, other in zip(again.model.parameters(), loop.model.parameters(), strict=True):
        moments = loop.optimizer.state[other]
        assert moments and all(torch.equal(again.optimizer.state[mine][name], moments[name]) for name in moments)


def test_one_process_names_its_state_as_torch_does(tmp_path):
    """A tied table and a frozen layer included: what one process has written, several read by torch's names."""
    model = make_model()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.base_model.get_submodule(model.config.layer_paths[0]).requires_grad_(False)
    loop = make_loop(tmp_path, until(2), model=model)
    loop.run()
    (weights, moments), (their_weights, theirs) = state_of(model, loop.optimizer), get_state_dict(model, loop.optimizer)
    assert weights.keys() == their_weights.keys() and moments.keys() == theirs.keys()
    assert all(weights[name].data_ptr() == their_weights[name].data_ptr() for name in weights)
    assert moments["param_groups"] == theirs["param_groups"] and moments["state"].keys() == theirs["state"].keys()
    for name, state in moments["state"].items():
        assert all(state[key] is theirs["state"][name][key] for key in {*state, *theirs["state"][name]})


def test_only_the_last_checkpoints_are_kept(tmp_path):
    make_loop(tmp_path, dataclasses.replace(OPTIONS, save_every=2)).run()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000000010", "step-000000012"]
    assert not make_loop(tmp_path / "new").resume()


def run_rank(rank: int, size: int, folder: str, wrapping: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        groups = [dist.new_group(backend="gloo") for _ in range(2)]
        process_group = ProcessGroup(rank, size, torch.device("cpu"), *groups)
        loop = make_loop(Path(folder) / wrapping, short(parts=2), process_group, wrapping)
        loop.resume()
        loop.run()
    finally:
        dist.destroy_process_group()


def run_other_rank(number: int, size: int, folder: str, wrapping: str) -> None:
    torch.set_num_threads(1)
    run_rank(number + 1, size, folder, wrapping)


@pytest.mark.parametrize("wrapping", ("ddp", pytest.param("fsdp", marks=pytest.mark.full)))
def test_two_ranks_have_the_losses_of_one(tmp_path, wrapping):
    """And a run goes on with another number of ranks, in an epoch whose last step has too few examples for two ranks of
    two parts each. The other process is forked: what it would import takes longest.
    """
    make_loop(tmp_path / "one", short(save_every=0)).run()
    make_loop(tmp_path / wrapping, until(3, short())).run()
    importlib.import_module("torch._dynamo")  # by DDP, otherwise in both
    other = mp.start_processes(run_other_rank, (2, str(tmp_path), wrapping), nprocs=1, join=False, start_method="fork")
    run_rank(0, 2, str(tmp_path), wrapping)
    while not other.join():
        pass
    exact = by_hand(12, tmp_path / "other", torch.float64, short().phases[0])
    assert_close_to_theirs(losses_of(tmp_path / wrapping), losses_of(tmp_path / "one"), exact)
