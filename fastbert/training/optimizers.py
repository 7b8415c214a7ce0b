"""Optimizers and what each weight gets of them: decay, and a learning rate by its layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.errors import ConfigError
from fastbert.models.base import PreTrainedModel, held_models

OPTIMIZERS = ("adamw", "lamb")

# What of a group's options fastbert.ops computes in one pass over all weights. With other values a step is torch's own.
_ONE_PASS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.01, layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for an optimizer: weight decay for matrices and tables only, as in BERT, and smaller steps further down.

    Args:
        model: before DDP wraps it; or a module that holds several, each with its own depth. What they share counts
            once, as the first one has it, and what is in none of them counts as a head.
        lr: of the head. The layer below gets lr * layer_decay, the next lr * layer_decay^2, and so on down to the
            embeddings (Howard & Ruder 2018, section 3.2, layer by layer as in ELECTRA).
        weight_decay: of weights with two dimensions or more; biases and norms get none.
    """
    if not 0.0 < layer_decay <= 1.0:
        raise ConfigError(f"layer_decay is {layer_decay}; it must be above 0, and 1 at most")
    below = dict[nn.Parameter, int]()  # layers that stand above it, the head included
    for held in held_models(model):
        top = len(held.config.layer_paths) + 1
        below = {parameter: top - depth for parameter, depth in _depths(held).items()} | below
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # A group is a launch or more of torch's optimizer: where layers do not differ they have two.
            level = -below.get(parameter, 0) if layer_decay < 1.0 else 0
            groups.setdefault((level, parameter.dim() > 1), []).append(parameter)
    return [
        {"params": parameters, "lr": lr * layer_decay**-level, "weight_decay": weight_decay if decays else 0.0}
        for (level, decays), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def _depths(model: PreTrainedModel) -> dict[nn.Parameter, int]:
    """0 for what stands before the first layer (embeddings), i + 1 for what is in layer i, and one more for what stands
    behind them (a pooler, a head). ALBERT's layers, which share their weights, count as the first.
    """
    depths, behind, has_layers = dict[nn.Parameter, int](), len(model.config.layer_paths) + 1, False
    for name, parameter in model.named_parameters():
        inside = (i + 1 for i, path in enumerate(model.config.layer_paths) if f".{path}." in f".{name}")
        depth = next(inside, behind if has_layers else 0)
        has_layers |= 0 < depth < behind
        depths[parameter] = depth
    return depths


def use_sparse_gradients(model: nn.Module) -> None:
    """Word tables that are only looked up get gradients of the rows of a step's tokens, for AdamW on one CPU: a step of
    few tokens otherwise clears, and reads twice, a table's worth of zeros. Tied tables stay as they are.
    """
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for held in held_models(model):
        table = held.get_input_embeddings()
        if type(table) is nn.Embedding:
            table.sparse = owners[id(table.weight)] == 1


def make_optimizer(name: str, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> Any:
    """AdamW (Loshchilov & Hutter 2017), or LAMB. Raises ConfigError for another name."""
    if name == "adamw":
        return AdamW(groups, betas=betas, eps=eps, fused=True)
    if name == "lamb":
        return Lamb(groups, betas=betas, eps=eps)
    raise ConfigError(f"unknown optimizer {name!r}; there are {', '.join(OPTIMIZERS)}")


def clip_and_step(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """A step with gradients that are together no longer than `max_norm`; 0: as they are.

    Returns their norm before, float32 (); NaN where max_norm is 0.
    """
    norm = optimizer.one_pass(max_norm) if isinstance(optimizer, AdamW) else None
    return _clip_then_step(optimizer, max_norm) if norm is None else norm


def _clip_then_step(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:  # which torch's optimizers do not take
            p.grad = p.grad.to_dense()
    norm = torch.full((), float("nan"))
    if max_norm:
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    optimizer.step()
    return norm


def catch_up(optimizer: torch.optim.Optimizer, rows: list[torch.Tensor] | None = None) -> None:
    """Before rows of a word table are read (None: all): do the steps of the optimizer that they lack, see AdamW."""
    if isinstance(optimizer, AdamW):
        optimizer.catch_up(None if rows is None else torch.cat([ids.flatten() for ids in rows]))


class _WithoutDynamo(torch.optim.Optimizer):
    """torch's optimizer without the decorator that keeps torch.compile out of these methods. At the first call that
    imports torch._dynamo, which takes half a second; no step is compiled here.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(_WithoutDynamo, torch.optim.AdamW):
    """torch's AdamW, whose state it has. In `clip_and_step` all weights take one pass, clipping included,
    on a CPU (fastbert.ops.adamw); on a GPU the step is torch's fused one.

    Rows of a table that has sparse gradients take a step only when they are looked up again. Call `catch_up` before you
    read such a table or write to it, before you load a state into the model for example (what PyTorch notices of that
    is an error). The optimizer does so itself before its state is read or loaded. Each step goes by the
    options of its group at that time, whenever a row takes it.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._deferred: dict[torch.Tensor, ops.DeferredRows] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._deferred = {}

    def __getstate__(self) -> dict[str, Any]:
        self.catch_up()
        return super().__getstate__()  # type: ignore[no-any-return, misc]

    def state_dict(self) -> dict[str, Any]:
        self.catch_up()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.catch_up()
        super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        self.catch_up()
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def catch_up(self, rows: torch.Tensor | None = None) -> None:
        """Do the steps that rows of the tables lack: of `rows`, int64, before they are looked up; None: of all."""
        for deferred in self._deferred.values():
            ops.adamw_deferred(deferred, rows=rows)

    def one_pass(self, max_norm: float) -> torch.Tensor | None:
        """A step over all weights at once; returns the norm of the gradients, float32 ().

        None where they need torch's own step, one tensor after the other: groups that differ in betas or eps, options
        that fastbert.ops does not compute (amsgrad, maximize), sharded weights. Nothing has changed then.
        """
        weights = [p for group in self.param_groups for p in group["params"]]
        if not is_on_cpu(weights) or not self._is_one_pass():
            return None
        self._opt_called = True  # torch's schedulers ask whether there was a step before theirs
        weights, gradients = list[torch.Tensor](), list[torch.Tensor]()
        rates, decays = list[float](), list[float]()
        for group in self.param_groups:
            taken = [p for p in group["params"] if p.grad is not None]
            weights += taken
            gradients += [p.grad for p in taken]
            rates += [float(group["lr"])] * len(taken)  # they may be tensors
            decays += [float(group["weight_decay"])] * len(taken)
        states = [self.state[p] for p in weights]
        for p, state in zip(weights, states, strict=True):
            if not state:
                state |= {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2, eps = map(float, (*self.param_groups[0]["betas"], self.param_groups[0]["eps"]))
        return ops.adamw(
            weights,
            gradients,
            means,
            squares,
            steps,
            deferred=self._deferred_of(weights, gradients, means, squares),
            rates=rates,
            decays=decays,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            max_norm=max_norm,
        )

    def _is_one_pass(self) -> bool:
        """Whether fastbert.ops computes the step of all groups, by their options."""
        first, *others = self.param_groups
        if any(group["betas"] != first["betas"] or group["eps"] != first["eps"] for group in others):
            return False
        return all(group[name] == value for group in self.param_groups for name, value in _ONE_PASS.items())

    def _deferred_of(
        self,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        means: list[torch.Tensor],
        squares: list[torch.Tensor],
    ) -> list[ops.DeferredRows | None] | None:
        tables = {
            p: (mean, square)
            for p, g, mean, square in zip(weights, gradients, means, squares, strict=True)
            if g.is_sparse and g.sparse_dim() == 1
        }
        # One's gradient is not sparse this time, or not there; or its state has been replaced.
        if not all(p in tables and deferred.is_of(p, *tables[p]) for p, deferred in self._deferred.items()):
            self.catch_up()
            self._deferred.clear()
        for p in tables.keys() - self._deferred.keys():
            self._deferred[p] = ops.DeferredRows(p, *tables[p])
        return [self._deferred.get(p) for p in weights] if tables else None


def is_on_cpu(parameters: list[torch.Tensor]) -> bool:
    return all(type(p) is nn.Parameter and p.device.type == "cpu" for p in parameters)


class Lamb(_WithoutDynamo):
    """LAMB (You et al. 2019, algorithm 2): Adam's step of each tensor, as long as the tensor, times the learning rate.

    It keeps batches of many thousands of sequences trainable. Tensors without weight decay (biases, norms) take Adam's
    step as it is, as in the authors' code.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters)
        return loss

    def _step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.state[p]["step"] += 1
        means = [self.state[p]["exp_avg"] for p in parameters]
        squares = [self.state[p]["exp_avg_sq"] for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        torch._foreach_lerp_(means, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
        steps = [self.state[p]["step"] for p in parameters]
        updates = torch._foreach_div(means, [1.0 - beta1**step for step in steps])
        scales = torch._foreach_div(squares, [1.0 - beta2**step for step in steps])
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_div_(updates, scales)
        if decay == 0.0:
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            return
        torch._foreach_add_(updates, parameters, alpha=decay)
        for p, update in zip(parameters, updates, strict=True):  # a norm of a sharded tensor is that of all shards
            length, long = torch.linalg.vector_norm(p), torch.linalg.vector_norm(update)
            ratio = torch.where((length > 0) & (long > 0), length / long, torch.ones_like(length))
            p.sub_(update * (ratio * group["lr"]))
