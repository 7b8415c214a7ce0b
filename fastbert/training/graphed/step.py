"""A step of training as CUDA graphs: one for each bucket of batches, forward and backward, and one for the optimizer.

What differs from step to step lies in memory: the batch, in its bucket's buffers; seeds of dropout; what losses are
divided by; rates and corrections of AdamW; where the loss is written. The graphs read it from there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fastbert import ops
from fastbert.backend import _choice
from fastbert.cuda_graphs.blocks import BlockLayout, Staged, stage
from fastbert.cuda_graphs.buckets import Buckets, Sizes
from fastbert.cuda_graphs.capture import CudaGraphs, Graphs, Replay
from fastbert.errors import InputError
from fastbert.layers.guard import ModuleGuard
from fastbert.layers.leaves import HOOKS, has_global_hooks
from fastbert.models.base import held_models
from fastbert.packed_inputs import PackedInputs
from fastbert.training.flat import ONE_PASS, FlatOptimizer, optimizer_unsupported
from fastbert.training.graphed.losses import LossRing
from fastbert.training.optimizers import clip_and_step

Loss = Callable[..., torch.Tensor]  # (model, batch, *totals) -> ()
_BAKED = ("betas", "eps", *ONE_PASS)  # options of a group that are numbers in a graph
_REQUIRES_GRAD, _HOOKS = attrgetter("requires_grad"), attrgetter("_backward_hooks")
_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


class Bounds:
    """Of ids and labels, by name, the smallest and the largest that a model has compared with its tables."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[int, int]] = {}

    def hold(self, batch: Mapping[str, tuple[int, int]]) -> bool:
        seen = self.of
        return all(n in seen and seen[n][0] <= low and high <= seen[n][1] for n, (low, high) in batch.items())

    def widen(self, batch: Mapping[str, tuple[int, int]]) -> None:
        for name, (low, high) in batch.items():
            first = self.of.get(name, (low, high))
            self.of[name] = min(first[0], low), max(first[1], high)


class _Captured(NamedTuple):
    """A bucket's graph. rows: the seeds' memory that it reads."""

    block: torch.Tensor
    replay: Replay
    rows: torch.Tensor


class GraphedStep:
    """Made by `graphed_step`, which says what it does. `why_eager`: why the last step ran op by op; None: it did not.

    `buckets`: what batches are rounded up to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loss: Loss,
        *,
        max_norm: float = 0.0,
        bf16: bool = True,
        graphs: Graphs | None = None,
    ):
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.max_norm, self.bf16 = max_norm, bf16
        self.device = next(model.parameters()).device
        self.why_eager: str | None = None
        self.buckets, self.losses_kept = Buckets(_position_limit(model)), LossRing(self.device)
        self._bounds = Bounds()
        self._graphs: Graphs = CudaGraphs(self.device) if graphs is None else graphs
        self._seeds, self._said = ops.StepSeeds(self.device), set[str]()
        self._flat: FlatOptimizer | None = None
        self._captured: dict[BlockLayout, _Captured] = {}
        self._optimize: Replay | None = None
        self._guarded_settings: tuple | None = None
        self._guard: ModuleGuard | None = None
        self._unsupported: str | None = None
        self._parameters = list[nn.Parameter]()
        self._seen: tuple = ()

    # ----------------------------------------------------------------------------------------------------------------
    # Steps

    def __call__(
        self,
        batches: PackedInputs | Sequence[PackedInputs],
        totals: Sequence[float] = (),
        *,
        seed: int | None = None,
        looks: bool = True,
    ) -> None:
        """One step of the optimizer over these batches, whose gradients are added up.

        totals: given to `loss` behind the batch, as float32 tensors (). seed: of dropout; None: the next one of those
        that follow from torch's. looks: whether somebody may have changed the model or the optimizer since the last
        step; a loop that knows better saves half of the host's time. Raises InputError before anything of the batch is
        launched, and leaves no gradient: an id that the model does not have, a model that has moved.
        """
        parts = [batches] if isinstance(batches, PackedInputs) else list(batches)
        if looks or self._guard is None:
            self._check_guard(len(totals))
        self.why_eager = self._unsupported
        if self.why_eager is not None:
            self._say(self.why_eager)
            self._run_op_by_op(parts, totals, seed)
            return
        assert self._flat is not None
        if looks:
            self._flat.take_gradients()
        self._flat.begin(list(totals))
        seed = hash((torch.initial_seed(), self._flat.step_number)) if seed is None else seed
        try:  # the first batch's seeds are those of a step op by op
            for i, batch in enumerate(parts):
                self._run_part(batch, (seed + i) % 2**63)
        except BaseException:
            self._flat.step_number -= 1
            self._forget_gradients(self._flat)
            raise
        self._run_optimizer(self._flat)

    def losses(self) -> list[float]:
        """Those of the steps since the last call, the oldest first: the last 1024. This waits for the device."""
        return self.losses_kept.read().tolist()

    def prepare(self, examples: Sequence[PackedInputs], totals: int = 0) -> str:
        """Capture all of `buckets` now, the largest first, and say how many there are and what they take.

        examples: a batch of each kind that will come, on the host. totals: how many `loss` gets.
        """
        if (reason := self._check_guard(totals)) is not None:
            return reason
        assert self._flat is not None
        self._flat.totals.fill_(1.0)
        for bucket in reversed(self.buckets.sizes):
            for packed in examples:
                if (Sizes.of(packed).labelled is None) == (bucket.labelled is None):
                    staged = stage(packed.without_sequences(), bucket)
                    if staged.layout not in self._captured:
                        self._capture(staged, 0)
        self._forget_gradients(self._flat)
        graphs, megabytes = len(self._captured), self._graphs.nbytes() / 2**20
        sizes = ", ".join(str(bucket.total_tokens) for bucket in self.buckets.sizes)
        return f"{graphs} graphs of {sizes} tokens, {megabytes:.0f} MB"

    def _run_part(self, batch: PackedInputs, seed: int) -> None:
        """Forward and backward of one batch."""
        staged = self._staged(batch)
        if staged is None:
            self.why_eager = f"no bucket holds {Sizes.of(batch)}, and there are {len(self.buckets.sizes)} already"
            self._say(self.why_eager, "no bucket")
            self._seeds.begin(seed)
            self._accumulate(batch.to(self.device, non_blocking=True))
            return
        captured = self._captured.get(staged.layout)
        if captured is None or captured.rows is not self._seeds.rows:
            self._capture(staged, seed)
            return
        self._seeds.begin(seed)
        captured.block.copy_(staged.block, non_blocking=True)
        if self._bounds.hold(staged.bounds):
            captured.replay()
        else:  # op by op: the model compares larger ids than it has seen with its tables
            self._accumulate(staged.layout.read(captured.block, staged.bounds))
            self._bounds.widen(staged.bounds)

    def _staged(self, packed: PackedInputs) -> Staged | None:
        bucket = (
            None
            if packed["batch"].seqlen is not None
            else self.buckets.find(Sizes.of(packed), packed.get("num_choices", 1))
        )
        if bucket is None:
            return None
        return stage(packed, bucket, pinned=self.device.type == "cuda")

    def _accumulate(self, inputs: PackedInputs) -> None:
        """Add a batch's gradients and its loss to those of the step. This is what is captured."""
        assert self._flat is not None
        with ops.seeds_from(self._seeds):
            with self._autocast():
                loss = self.loss(self.model, inputs, *self._flat.totals.unbind())
            # Not backward(), which would add to each weight's gradient by a launch of its own.
            self._flat.add(torch.autograd.grad(loss, self._flat.weights, allow_unused=True))
        self.losses_kept.add(loss)

    def _autocast(self) -> AbstractContextManager:
        # Its cache would keep copies of weights that a graph outlives.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def _capture(self, staged: Staged, seed: int) -> None:
        """Capture a bucket's graph, on this batch, and leave what running it once leaves."""
        flat, layout = self._flat, staged.layout
        assert flat is not None
        block = staged.block.to(self.device, copy=True)

        def run() -> None:
            self._accumulate(layout.read(block, staged.bounds))

        written = (flat.state.gradients, self.losses_kept.sum)
        before = [t.clone() for t in written]
        self._seeds.begin(seed)
        self._graphs.warm(run)  # and now there are as many seeds as a step takes
        for t, kept in zip(written, before, strict=True):
            t.copy_(kept)
        self._seeds.begin(seed)
        self._captured[layout] = _Captured(block, self._graphs.capture(run), self._seeds.rows)
        self._bounds.widen(staged.bounds)

    def _run_optimizer(self, flat: FlatOptimizer) -> None:
        if self._optimize is not None:
            self._optimize()
            torch.autograd.graph.increment_version(flat.weights)  # for those that keep something made of the weights
        else:
            self._optimize = self._capture_optimizer(flat)
        flat.count_step()
        self.losses_kept.count_step()

    def _capture_optimizer(self, flat: FlatOptimizer) -> Replay:
        def run() -> None:
            flat.step(self.max_norm)
            self.losses_kept.end_step()

        def run_others() -> None:  # these must take one step
            flat.step_other(self.max_norm)
            LossRing(self.device, 2).end_step()

        self._graphs.warm(run_others)
        return self._graphs.capture(run)

    def _forget_gradients(self, flat: FlatOptimizer) -> None:
        flat.state.gradients.zero_()
        self.losses_kept.sum.zero_()

    # ----------------------------------------------------------------------------------------------------------------
    # Op by op

    def _run_op_by_op(self, batches: Sequence[PackedInputs], totals: Sequence[float], seed: int | None) -> None:
        if seed is not None:
            self._seeds.begin(seed)
        numbers = torch.tensor(list(totals), device=self.device).unbind()
        for batch in batches:
            inputs = batch.to(self.device, non_blocking=True)
            with ops.seeds_from(None if seed is None else self._seeds):
                with self._autocast():
                    loss = self.loss(self.model, inputs, *numbers)
                loss.backward()
            self.losses_kept.add(loss)
        clip_and_step(self.optimizer, self.max_norm)
        self.optimizer.zero_grad()
        self.losses_kept.end_step()
        self.losses_kept.count_step()

    def _say(self, reason: str, about: str = "") -> None:
        """Once for each reason; once for all reasons that are about one thing."""
        if (about or reason) not in self._said:
            self._said.add(about or reason)
            warnings.warn(f"the training step runs op by op: {reason}", stacklevel=4)

    # ----------------------------------------------------------------------------------------------------------------
    # What was captured, and what is there now

    def _check_guard(self, num_totals: int) -> str | None:
        """Why the step runs op by op. Graphs of a model, or an optimizer, that is another now are forgotten."""
        settings = (num_totals, self._settings())
        if settings == self._guarded_settings and self._is_same():
            return self._unsupported
        self._guarded_settings = settings
        self._captured.clear()
        self._graphs.free()
        self._optimize, self._bounds = None, Bounds()
        self._guard = ModuleGuard.of_all(self.model, HOOKS, HOOKS, "training", "sparse")
        self._parameters = list(self.model.parameters())
        self._seen = self._hook_state(self._guard)
        self._unsupported = self._find_unsupported()
        if self._unsupported is not None:
            self._flat = None
        else:
            if self._flat is None or not self._flat.is_of(self.optimizer) or len(self._flat.totals) != num_totals:
                self._flat = FlatOptimizer(self.optimizer, num_totals)
            else:
                self._flat.adopt()
        return self._unsupported

    def _settings(self) -> tuple:
        """Python's numbers that a graph has written down."""
        groups = self.optimizer.param_groups
        of_groups = [[len(group["params"]), *[group.get(name) for name in _BAKED]] for group in groups]
        return (
            self.optimizer,
            of_groups,
            self.max_norm,
            self.bf16,
            _choice.forced,
            torch.are_deterministic_algorithms_enabled(),
        )

    def _is_same(self) -> bool:
        """Whether the model and the optimizer are what was looked at last."""
        guard, flat = self._guard, self._flat
        if guard is None or not guard.is_same() or self._hook_state(guard) != self._seen:
            return False
        return self._unsupported is not None or (flat is not None and flat.is_current())

    def _hook_state(self, guard: ModuleGuard) -> tuple:
        """Whether anything calls Python in a step beside the model's own, and which weights take a gradient."""
        weights, optimizer = self._parameters, self.optimizer
        of_gradients = any(map(_HOOKS, weights)), any(map(_LATE_HOOKS, weights))
        of_optimizer = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        return guard.has_hooks(), of_gradients, of_optimizer, list(map(_REQUIRES_GRAD, weights))

    def _find_unsupported(self) -> str | None:
        now = next(self.model.parameters()).device
        if now != self.device:
            raise InputError(
                f"the model is on {now} now, and was on {self.device}: make the step after the model moved"
            )
        if (reason := self._graphs.unsupported(self.device)) is not None:
            return reason
        if dist.is_initialized() and dist.get_world_size() > 1:
            return "other processes add up gradients"
        if not self.model.training:
            return "the model is in evaluation mode"
        for name, module in self.model.named_modules():
            if has_global_hooks() or any(getattr(module, hooks) for hooks in HOOKS):
                return f"{name or 'the model'} has hooks"
            if isinstance(module, nn.Embedding) and module.sparse:
                return f"the gradients of {name} are sparse"
        names = {p: name for name, p in self.model.named_parameters()}
        known = {p for group in self.optimizer.param_groups for p in group["params"]}
        for p, name in names.items():
            if p.requires_grad and p not in known:
                return f"{name} takes a gradient, and no group of the optimizer has it"
            if p._backward_hooks or p._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
                return f"the gradient of {name} has a hook"
        return optimizer_unsupported(self.optimizer, names)


def _position_limit(model: nn.Module) -> int | None:
    """Of the sequences of all of fastbert's models in this one."""
    limits = [held.base_model.table_sizes().longest(held.config) for held in held_models(model)]
    return min((limit for limit in limits if limit is not None), default=None)
