"""Runs of the trainer whose steps are captured: their buckets, their checkpoints, and what stops them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from seeds import numpy_generator
from tape import TapeGraphs
from training_runs import ALONE, OPTIONS, PHASE, losses_of, make_loop, make_model, until

from benchmarks.gpu.simulated.no_graphs import NoGraphs
from fastbert.backend import use_backend
from fastbert.cuda_graphs.blocks import stage
from fastbert.cuda_graphs.buckets import Buckets, Sizes
from fastbert.data.batches import Steps, StepSampler
from fastbert.errors import TrainingError
from fastbert.native.availability import triton_error
from fastbert.packed_inputs import pack_inputs
from fastbert.testing.numerics import assert_close_to_reference
from fastbert.training.distributed import ProcessGroup
from fastbert.training.finetuning.embedding import Embedding
from fastbert.training.graphed.plan import plan_buckets
from fastbert.training.pretraining import MaskedLM, ReplacedTokens
from fastbert.training.train_step import TrainStep

SHORT = replace(PHASE, until=6, step_tokens=100, max_length=16)
FEW = replace(OPTIONS, phases=(SHORT,), save_every=3, log_every=2)


def weights_of(loop) -> list[torch.Tensor]:
    return [p.detach().clone() for p in loop.model.parameters()]


def rows_of(folder) -> list[dict]:
    return [json.loads(row) for row in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def run(folder, options=FEW, graphs=None, objection=None, **changes):
    loop = make_loop(folder, options, graphs=graphs, **changes)
    loop.run()
    assert {row.get("op_by_op") for row in rows_of(folder)} == {objection}
    return loop


@pytest.mark.parametrize("parts", (pytest.param(1, marks=pytest.mark.full), 2))
def test_captured_runs_are_those_that_run_op_by_op(tmp_path, parts):
    """The same batches, rates and seeds: losses and weights by the error rule, float64 being the oracle."""
    options, said = replace(FEW, parts=parts), list[str]()
    plain = [run(tmp_path / "plain", options)]
    exact = make_loop(tmp_path / "exact", options, model=make_model().double())
    exact.run()
    graphed = run(tmp_path / "graphed", options, NoGraphs(), say=said.append)
    assert len(said) == 1 and "graphs of" in said[0]
    found = [torch.tensor(losses_of(tmp_path / name)) for name in ("graphed", "exact", "plain")]
    for actual, oracle, near in zip(
        [found[0], *weights_of(graphed)],
        [found[1].double(), *weights_of(exact)],
        [found[2], *weights_of(plain[0])],
        strict=True,
    ):
        assert_close_to_reference(actual, oracle, near, factor=3)


def test_a_run_that_stopped_goes_on_with_the_same_bits(tmp_path):
    whole = run(tmp_path / "whole", graphs=NoGraphs())
    run(tmp_path / "parts", until(3, FEW), NoGraphs())
    second = make_loop(tmp_path / "parts", FEW, graphs=NoGraphs())
    assert second.resume()
    second.run()
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    assert all(map(torch.equal, weights_of(second), weights_of(whole)))


def test_a_run_looks_again_where_somebody_has_had_the_model(tmp_path):
    """An evaluation that gives a weight other memory: steps behind it are captured anew, and go by it."""
    captures = []

    class Counting(NoGraphs):
        def capture(self, run):
            captures.append(loop.state.step)
            return super().capture(run)

    def evaluate():
        p = next(loop.model.parameters())
        p.data = p.data.clone()
        return {}

    options = replace(FEW, evaluate_every=3, log_every=100, save_every=100)
    loop = make_loop(tmp_path, options, graphs=Counting(), evaluate=evaluate)
    loop.run()
    assert min(step for step in captures if step) == 3  # all buckets were captured before the first
    run(tmp_path / "plain", options, NoGraphs())
    assert losses_of(tmp_path) == losses_of(tmp_path / "plain")


@pytest.mark.simulated
@pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
def test_replayed_runs_are_those_that_run_each_step(tmp_path):
    """With dropout, on Triton's kernels: log and weights bit for bit."""
    loops, options = [], replace(FEW, phases=(replace(SHORT, until=4, step_tokens=16),))
    for name, graphs in (("replayed", TapeGraphs()), ("run", NoGraphs())):
        with use_backend("triton"):
            loops.append(run(tmp_path / name, options, graphs, model=make_model(0.1, num_hidden_layers=1)))
    assert losses_of(tmp_path / "replayed") == losses_of(tmp_path / "run")
    assert all(map(torch.equal, *map(weights_of, loops)))


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_a_loss_that_is_no_number_stops_the_run_before_a_checkpoint(tmp_path, value):
    loop = make_loop(tmp_path, FEW, graphs=NoGraphs())
    spoil = loop.on_step

    def on_step(tokens: int) -> None:
        spoil(tokens)
        if loop.state.step == 4:
            with torch.no_grad():
                next(loop.model.parameters()).fill_(value)

    loop.on_step = on_step
    with pytest.raises(TrainingError, match=r"the loss of step 5 is not a number; the last good .*step-000000003"):
        loop.run()
    assert [row["step"] for row in rows_of(tmp_path)] == [2, 3, 4]


def test_what_cannot_be_captured_is_in_the_log(tmp_path):
    with pytest.warns(UserWarning, match="the optimizer is a Lamb"):
        objection = "the optimizer is a Lamb, and AdamW is the one whose steps can be captured"
        run(tmp_path, until(2, FEW), NoGraphs(), objection, optimizer="lamb")


@pytest.mark.parametrize(
    ("world", "reason"), ((ProcessGroup(0, 2, torch.device("cpu")), "other processes"), (ALONE, "cached"))
)
def test_steps_that_are_more_than_losses_and_their_backward_run_op_by_op(tmp_path, world, reason, monkeypatch):
    loop = make_loop(tmp_path)
    monkeypatch.setattr(MaskedLM, "uncapturable", Embedding.uncapturable)
    options = {"max_norm": 1.0, "bf16": False, "parts": 2, "graphs": NoGraphs()}
    with pytest.warns(UserWarning, match=f"run op by op: .*{reason}"):
        step = TrainStep(loop.task, loop.model, loop.optimizer, world, **options)
    batch = next(loop._epoch(SHORT))[0]
    step([batch], [1.0], 3)
    assert len(step.objections) == 1 and all(reason in objection for objection in step.objections)
    assert MaskedLM.uncapturable(loop.task, 1) is None and ReplacedTokens.uncapturable(loop.task, 1) is not None


def lengths_like(name: str) -> np.ndarray:
    draw = numpy_generator(0)
    if name == "sentences":  # a mean of 55 tokens, 128 at most
        return np.clip(draw.lognormal(3.8, 0.6, 20_000), 4, 128).astype(int)
    return draw.choice([128, 512], 4_000, p=[0.3, 0.7])


@pytest.mark.parametrize(
    "step", ({"step_tokens": 4096}, {"step_tokens": 16384}, {"step_tokens": 8192, "max_examples": 32})
)
@pytest.mark.parametrize("name", ("sentences", "chunks"))
def test_the_median_slack_of_a_run_is_at_most_a_20th(name, step):
    sampler = StepSampler(Steps(lengths_like(name), **step), 768)
    buckets, slack, outside = Buckets(), [], 0

    def collate(examples):
        ids = [[1] * len(example["input_ids"]) for example in examples]
        return pack_inputs(ids, labels=[[5 if i % 7 == 0 else -100 for i in range(len(row))] for row in ids])

    examples = [{"input_ids": range(length)} for length in sampler.steps.lengths]
    example = plan_buckets(buckets, collate, examples, sampler, 512, 1)
    for part in sampler.plan:
        tokens = int(sampler.steps.lengths[part].sum())
        labelled = int(sum(-(-length // 7) for length in sampler.steps.lengths[part]))
        found = buckets.find(Sizes(tokens, len(part), int(sampler.steps.lengths[part].max()), labelled))
        outside += found is None
        slack += [] if found is None else [1 - tokens / found.total_tokens]
    assert np.median(slack) <= 0.05 and len(buckets.sizes) <= 24 and outside <= 0.01 * len(sampler.plan)
    assert buckets.find(Sizes.of(example)) is not None


def test_a_block_holds_a_batch():
    packed = pack_inputs([[5, 6, 7], [8, 9]], token_type_ids=[[0, 0, 1], [0, 1]], labels=[[-100, 6, -100], [8, -100]])
    staged = stage(packed, Sizes(8, 4, 16, 4))
    read = staged.layout.read(staged.block, staged.bounds)
    assert read["input_ids"].tolist() == [5, 6, 7, 8, 9, 0, 0, 0] and read["token_type_ids"].tolist()[:5] == [
        0,
        0,
        1,
        0,
        1,
    ]
    assert read["labels"].tolist() == [-100, 6, -100, 8, -100, -100, -100, -100]
    assert read["batch"].cu_seqlens.tolist() == [0, 3, 5, 5, 5] and read["batch"].labelled.tolist() == [1, 3, 7, 7]
    assert staged.bounds == {"input_ids": (0, 9), "token_type_ids": (0, 1), "labels": (0, 8)}
    assert all(field.start % 16 == 0 for field in staged.layout.fields) and staged.layout.nbytes == staged.block.numel()
