"""fastbert.graphed_step: the same training as a plain loop, and a step op by op where something cannot be captured."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from graphed_steps import WORDS, batch, kept, make_step, mean_loss, run_step
from torch import nn

import fastbert
from benchmarks.gpu.simulated.no_graphs import NoGraphs
from fastbert.errors import InputError
from fastbert.testing.numerics import assert_close_to_reference
from fastbert.training.graphed import GraphedStep
from fastbert.training.graphed.losses import LossRing
from fastbert.training.optimizers import Lamb

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Counting(NoGraphs):
    """How often something was captured."""

    count = freed = 0

    def capture(self, run):
        self.count += 1
        return super().capture(run)

    def free(self):
        self.freed += 1


def still(**changes) -> GraphedStep:
    """Without dropout."""
    return make_step(Counting(), **{**NO_DROPOUT, **changes})


def plain_loop(step: GraphedStep, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a loop with torch's own optimizer gives for the model and groups of a step: losses and weights."""
    model = copy.deepcopy(step.model).to(dtype)
    of = dict(zip(step.model.parameters(), model.parameters(), strict=True))
    groups = [{**group, "params": [of[p] for p in group["params"]]} for group in step.optimizer.param_groups]
    optimizer, losses = torch.optim.AdamW(groups, fused=False), []
    for number in range(steps):
        batches = [batch(2 * number), batch(2 * number + 1, is_wide=True)]
        total = torch.tensor(float(sum(b["batch"].labelled.numel() for b in batches)), dtype=dtype)
        parts = [mean_loss(model, each, total) for each in batches]
        torch.stack(parts).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).sum().detach())
    return [torch.stack(losses), *[p.detach() for p in model.parameters()]]


def test_it_trains_as_a_plain_loop_does():
    step = still()
    oracle, near = plain_loop(step, 6, torch.float64), plain_loop(step, 6, torch.float32)
    for number in range(6):
        batches = [batch(2 * number), batch(2 * number + 1, is_wide=True)]
        step(batches, [float(sum(b["batch"].labelled.numel() for b in batches))])
    assert step.why_eager is None
    ours = [torch.tensor(step.losses()), *[p.detach() for p in step.model.parameters()]]
    for actual, exact, baseline in zip(ours, oracle, near, strict=True):
        # AdamW divides by a gradient's size: where that is nearly 0, a weight moves by what rounding has left.
        assert_close_to_reference(actual, exact, baseline, factor=6)


def hook(module, *arguments) -> None: ...


def in_bf16(step):
    step.model.bfloat16()


def with_lamb(step):
    step.optimizer = Lamb(step.optimizer.param_groups)


def without_a_group(step):
    step.optimizer = torch.optim.AdamW(list(step.model.parameters())[1:])


def with_a_frozen_weight(step):
    next(step.model.parameters()).requires_grad_(False)


UNSUPPORTED = {
    "cls has hooks": lambda s: s.model.cls.register_forward_hook(hook),
    "the gradient of .* has a hook": lambda s: next(s.model.parameters()).register_hook(lambda gradient: None),
    "gradient of .*weight has a hook": lambda s: next(s.model.parameters()).register_post_accumulate_grad_hook(hook),
    "the optimizer is a Lamb": with_lamb,
    "of torch.bfloat16": in_bf16,
    "evaluation mode": lambda s: s.model.eval(),
    "no group of the optimizer has it": without_a_group,
    "takes no gradient": with_a_frozen_weight,
    "the optimizer has hooks": lambda s: s.optimizer.register_step_post_hook(hook),
    "maximize=True": lambda s: s.optimizer.param_groups[0].update(maximize=True),
    "differ in betas": lambda s: s.optimizer.param_groups[0].update(betas=(0.5, 0.9)),
    "gradients of .* are sparse": lambda s: setattr(s.model.bert.embeddings.position_embeddings, "sparse", True),
}


# Weights that have taken a step in float32 are nothing that torch's own AdamW goes on with in bfloat16.
WHENS = [(reason, when) for reason in UNSUPPORTED for when in ("at first", "later")]
WHENS.remove(("of torch.bfloat16", "later"))


@pytest.mark.parametrize(("reason", "when"), WHENS)
def test_what_cannot_be_captured_runs_op_by_op_and_says_why(reason, when):
    """And gives what the same step gives that never was captured."""
    steps = [still(), make_step(None, **NO_DROPOUT)]
    for step in steps:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if when == "later":
                run_step(step, 0, [batch(0)])
        UNSUPPORTED[reason](step)
    for number in (1, 2):
        if number == 1:
            with pytest.warns(UserWarning, match=reason):
                run_step(steps[0], number, [batch(number)])
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "the training step runs op by op")
                run_step(steps[0], number, [batch(number)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_step(steps[1], number, [batch(number)])
    assert steps[0].why_eager is not None and steps[1].why_eager is not None
    assert steps[0]._graphs.count == (2 if when == "later" else 0)
    if when == "at first":
        assert steps[0].losses() == steps[1].losses()
        assert all(map(torch.equal, steps[0].model.parameters(), steps[1].model.parameters()))


def test_on_a_cpu_it_says_so():
    step = fastbert.graphed_step(nn.Linear(2, 2), None, mean_loss)
    with pytest.raises(AttributeError):  # there is no optimizer
        step(batch(0))
    step = make_step(None)
    with pytest.warns(UserWarning, match="the model is on cpu"):
        run_step(step, 0, [batch(0)])
    assert step.why_eager == "the model is on cpu"


def new_memory(step):
    for p in step.model.parameters():
        p.data = p.data.clone()


def new_leaf(step):
    head = step.model.cls.predictions.transform
    head.dense = copy.deepcopy(head.dense)
    step.optimizer = torch.optim.AdamW(step.model.parameters())


CHANGES = {
    "a weight's memory": new_memory,
    "a leaf": new_leaf,
    "an option": lambda s: [group.update(betas=(0.8, 0.9)) for group in s.optimizer.param_groups],
    "max_norm": lambda s: setattr(s, "max_norm", 0.1),
    "the groups": lambda s: s.optimizer.load_state_dict(s.optimizer.state_dict()),
    "a layer's mode": lambda s: s.model.bert.encoder.layer[0].eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_captured_again(change):
    step = still()
    run_step(step, 0, [batch(0)])
    run_step(step, 1, [batch(2)])
    assert step._graphs.count == 2
    CHANGES[change](step)
    run_step(step, 2, [batch(4)])
    assert step.why_eager is None and step._graphs.count == 4
    assert step._graphs.freed == 2  # at the first look, too


def test_a_mode_that_comes_back_is_captured_again():
    step = still()
    run_step(step, 0, [batch(0)])
    step.model.eval()
    with pytest.warns(UserWarning, match="evaluation mode"):
        run_step(step, 1, [batch(1)])
    step.model.train()
    run_step(step, 2, [batch(2)])
    assert step.why_eager is None and step._graphs.count == 4
    assert {float(state["step"]) for state in step.optimizer.state.values()} == {3.0}


def test_a_batch_that_no_bucket_holds_runs_op_by_op():
    step = still()
    large = fastbert.pack_inputs([list(range(1, 11))] * 3, labels=[[7, *[-100] * 9]] * 3)
    run_step(step, 0, [batch(0)])
    with torch.no_grad():
        expected = mean_loss(step.model, large, torch.tensor(3.0)).item()
    with pytest.warns(UserWarning, match=r"no bucket holds .*total_tokens=30"):
        run_step(step, 1, [large])
    assert step._graphs.count == 2 and step.losses()[1:] == [expected]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said, whatever the next one's sizes
        run_step(step, 1, [fastbert.pack_inputs([list(range(1, 12))] * 3, labels=[[7, *[-100] * 10]] * 3)])
    step.buckets.most += 1
    run_step(step, 2, [large])
    assert step._graphs.count == 3 and step.why_eager is None


def test_sequences_as_long_as_the_position_table():
    """Which has 20 rows, and no bucket has longer sequences."""
    step = still()
    step.buckets.most += 1
    step(fastbert.pack_inputs([list(range(1, 19))], labels=[[5] * 18]), [18.0])
    assert step.why_eager is None and step.buckets.sizes[-1].max_seqlen == 20


def test_a_step_that_is_refused_leaves_nothing():
    """The second batch has an id that the model has not: neither gradients nor the step's number stay."""
    steps = [still(), still()]
    bad = fastbert.pack_inputs([[1, WORDS + 7]], labels=[[1, -100]])
    for number in range(3):
        for step in steps:
            if number == 1 and step is steps[0]:
                with pytest.raises(InputError, match="input_ids"):
                    run_step(step, 7, [batch(0), bad])
            run_step(step, number, [batch(number)])
    assert steps[0].losses() == steps[1].losses()
    assert all(map(torch.equal, kept(steps[0]), kept(steps[1])))


def test_a_model_that_has_moved_is_refused():
    step = still()
    run_step(step, 0, [batch(0)])
    step.model.to("meta")
    with pytest.raises(InputError, match="the model is on meta now, and was on cpu"):
        run_step(step, 1, [batch(1)])


def test_state_that_is_loaded_is_what_goes_on():
    """In another model and optimizer, whose graphs are there already; and torch's own optimizer goes on from it."""
    first, second = still(), still()
    for number in range(3):
        run_step(first, number, [batch(number)])
        run_step(second, 5, [batch(number + 9)])
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for step in (first, second):
        step.losses()
        run_step(step, 3, [batch(3)])
    assert second.losses() == first.losses() and all(map(torch.equal, kept(second), kept(first)))
    assert set(first.optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_gradients_that_are_there_already_count():
    steps = [still(), still()]
    given = [torch.ones_like(p) for p in steps[0].model.parameters()]
    for p, gradient in zip(steps[0].model.parameters(), given, strict=True):
        p.grad = gradient.clone()
    run_step(steps[1], 0, [batch(0)])
    steps[0].max_norm = steps[1].max_norm = 0.0
    run_step(steps[0], 0, [batch(0)])
    moved = [float((steps[0].optimizer.state[p]["exp_avg"] > 0.05).float().mean()) for p in steps[0].model.parameters()]
    assert min(moved) > 0.5  # 0.1 of a gradient of 1 and what the loss gives


@pytest.mark.parametrize("steps", (2, 5, 9))
def test_losses_wait_until_they_are_read(steps):
    ring = LossRing("cpu", capacity=4)
    for number in range(steps):
        ring.add(torch.tensor(float(number)))
        ring.add(torch.tensor(0.5))
        ring.end_step()
        ring.count_step()
    assert ring.read().tolist() == [number + 0.5 for number in range(max(0, steps - 4), steps)]
    assert ring.read().tolist() == []
    ring.end_step()
    ring.count_step()
    assert ring.read().tolist() == [0.0] and not ring.is_full


def test_a_loss_of_its_own_takes_any_packed_inputs():
    """As the README has it: no totals, the model's own mean."""
    step = make_step(Counting(), loss=lambda model, given: model(**given).loss, **NO_DROPOUT)
    step(batch(0))
    step(batch(1))
    model = make_step(None, **NO_DROPOUT).model
    near, exact = (model.to(dtype)(**batch(0)).loss.detach() for dtype in (torch.float32, torch.float64))
    assert_close_to_reference(torch.tensor(step.losses()[0]), exact, near, factor=3)
