"""Operands of ops, too many to make by hand, and the comparison of an op with its formula in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from draw import Draw
from judging import Results, Tensors, judge

from fastbert.testing.cases import Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

REPETITIONS = (64, 1024)  # of a case that fails, with other values: one may have a single number

# Every kind is finite, and so are all results.
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda t: t,
    "times 30": lambda t: t * 30,
    "zeros": lambda t: t * 0,
    "large mean": lambda t: t + 1000,
    "constant rows": lambda t: t[..., :1] + 0 * t,
    "one dominant row": lambda t: torch.cat([t[:1] * 100, t[1:]]),
    "tiny": lambda t: t * 1e-20,
    "denormal": lambda t: t * 1e-41,
    "few values": lambda t: t.round(),
}
POISONS = (float("nan"), float("inf"), float("-inf"), 1e30, -3e38)

# Of a tensor, and of the number between its elements.
LAYOUTS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "contiguous": lambda t, gap: t.clone(),
    "at an odd offset": lambda t, gap: torch.cat([t.new_full((3,), gap), t.flatten()])[3:].view(t.shape),
    "every second column": lambda t, gap: torch.stack([t, t.new_full(t.shape, gap)], -1).flatten(-2)[..., ::2],
    "every second row": lambda t, gap: torch.stack([t, t.new_full(t.shape, gap)], 1).flatten(0, 1)[::2],
    "wide rows": lambda t, gap: torch.cat([t, t.new_full((*t.shape[:-1], 5), gap)], -1)[..., : t.shape[-1]],
    "columns first": lambda t, gap: t.transpose(0, -1).contiguous().transpose(0, -1),
}


def draw_lengths(draw: Draw, longest: int = 70, padding_rows: bool = True) -> Lengths:
    """Of the sequences of a packed batch, tile edges and empty ones among them."""
    edges = (1, 0, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65)
    lengths = []
    for _ in range(draw.integer(1, 5)):
        length = draw.choice(edges) if draw.flag() else draw.integer(0, longest)
        lengths.append(min(length, longest))
    return Lengths("drawn", tuple(lengths), draw.integer(0, 4) if padding_rows and draw.flag(3) else 0)


@dataclass
class Case:
    """An op and its formula over the same float operands, by name, with rows of tokens where `token_rows` says so.

    `layouts`: of operands, and of the output's gradient as "out".
    `joint`: gradients are compared as one tensor, since they are differences that cancel (attention's dq and dk).
    `has_means`: whether operands may have a mean far above their deviation.
    `gradients`: the operands that may have one.
    `reads_gaps`: torch's own products may read what is between the rows, times 0. It is finite then, as it always is
    for the formula, which would make no number to compare with.
    `addends`: of how many numbers the output is the sum. Where they are equal (the losses of logits that are all 0),
    each draw rounds alike, and it is the order that decides how far: torch's loss adds up one after another, the
    formula pairs. Each of n additions of equal numbers rounds by at most eps / 2 of what is there, n eps / 4 in all.
    `differs`: of the operands in float64, numbers of which the output is a difference. It errs by what these are
    rounded by, however small it is itself.
    """

    op: Callable[..., torch.Tensor]
    formula: Callable[..., torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    scales: dict[str, float] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    joint: bool = False
    has_means: bool = True
    reads_gaps: bool = False
    addends: int = 1
    differs: Callable[..., torch.Tensor] | None = None

    def make(self, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, shape in self.shapes.items():
            t = torch.randn(shape, generator=generator) * self.scales.get(name, 1.0)
            made[name] = VALUES[self.values.get(name, "normal")](t).to(self.dtype)
        return made

    def run(
        self,
        function: Callable,
        tensors: Tensors,
        seed: int,
        dtype: torch.dtype,
        layouts: dict[str, str],
        reads_gaps: bool,
    ) -> Tensors:
        """The output and the gradients of one function; `seed` draws what the output's gradient is."""
        leaves, gap = {}, torch.finfo(dtype).max if reads_gaps else torch.nan
        for name, t in tensors.items():
            leaf = LAYOUTS[layouts.get(name, "contiguous")](t.to(dtype), gap).detach()
            leaves[name] = leaf.requires_grad_(name in self.gradients)
        out = function(**leaves)
        results = {"out": out.detach()}
        if self.gradients:
            wanted = [leaves[name] for name in self.gradients]
            found: list = [None] * len(wanted)
            if out.requires_grad:  # the formula of nothing at all has no graph
                generator = torch.Generator().manual_seed(seed + 10**6)  # no draw has the numbers of another's operands
                dout = torch.randn(out.shape, generator=generator).to(self.dtype).to(out.dtype)
                dout = LAYOUTS[layouts.get("out", "contiguous") if out.dim() > 1 else "contiguous"](dout, gap)
                found = list(torch.autograd.grad(out, wanted, dout, allow_unused=True))
            made = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(wanted, found, strict=True)]
            if self.joint:
                results["joint gradient"] = torch.cat([g.flatten() for g in made])
            else:
                results |= {f"d{name}": g for name, g in zip(self.gradients, made, strict=True)}
        return results

    def compare(self, seed: int) -> None:
        """The error rule; a case that breaks it is judged once more over many draws of its values."""
        factor = max(OUTPUT_FACTOR, 1 + self.addends / 4)
        judge(lambda draw: self._results(seed + draw), functools.partial(_assert_rule, out_factor=factor), REPETITIONS)

    def _results(self, seed: int) -> Results:
        tensors = self.make(seed)
        before = {name: t.clone() for name, t in tensors.items()}
        actual = self.run(self.op, tensors, seed, self.dtype, self.layouts, self.reads_gaps)
        for name, t in tensors.items():
            assert torch.equal(t, before[name]), f"the op wrote to its operand {name}"
        oracle = self.run(self.formula, tensors, seed, torch.float64, {}, True)
        # The layouts, too: a library has other sums for a transposed operand, which err otherwise.
        baseline = self.run(self.formula, tensors, seed, self.dtype, self.layouts, True)
        assert set(actual) == set(oracle)
        # A loss comes out in fp32 whatever went in; the baseline's has the inputs' dtype.
        actual = {name: t.to(baseline[name].dtype) for name, t in actual.items()}
        if self.differs is not None:  # their size beside the output's
            size = self.differs(**{name: t.double() for name, t in tensors.items()}).abs().amax()[None]
            for results in (actual, oracle, baseline):
                results["out"] = torch.cat([results["out"].reshape(1), size.to(results["out"].dtype)])
        return actual, oracle, baseline


def _assert_rule(results: Results, out_factor: float) -> None:
    """Where the formula itself overflows in its dtype, it cannot say how much an error may be. Nor can it where all of
    a result is denormal, which hardware and libraries may take for 0, or was made of such numbers, which have lost
    their digits: a norm makes them up to a million times as large."""
    for name, actual in results[0].items():
        if not torch.isfinite(results[2][name]).all():
            continue
        oracle = results[1][name].abs()
        tiny = torch.finfo(actual.dtype).tiny
        if oracle.numel() and 0 < oracle.max() < tiny * 2**23:
            assert actual.abs().max() < 2 * max(oracle.max(), tiny), f"{name}: {actual.abs().max()} for denormals"
            continue
        factor = out_factor if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(actual, results[1][name], results[2][name], factor, name)


def draw_case(draw: Draw, case: Case) -> Case:
    """Values, layouts and gradients of a case's operands."""
    kinds = [kind for kind in VALUES if case.has_means or kind != "large mean"]
    for name in case.shapes:
        if draw.flag(3):
            case.values[name] = draw.choice(kinds)
        if draw.flag(3):
            case.layouts[name] = draw.choice(LAYOUTS)
    if draw.flag(3):
        case.layouts["out"] = draw.choice(LAYOUTS)
    names = tuple(case.shapes)
    if not case.joint:  # whose gradients have one scale, that of all of them
        names = tuple(name for name in names if not draw.flag(4))
    case.gradients = names if draw.flag() else ()
    draw.note(f"{case.dtype}, {case.shapes}, values {case.values}, layouts {case.layouts}, gradients {case.gradients}")
    return case


def assert_same_elsewhere(name: str, clean: torch.Tensor, poisoned: torch.Tensor, touched: torch.Tensor) -> None:
    """`touched`, bool (rows,): all other rows must have the same bits."""
    left, right = clean[~touched], poisoned[~touched]
    same = left.view(torch.uint8) == right.view(torch.uint8) if left.numel() else torch.ones(1, dtype=torch.bool)
    assert same.all(), f"{name}: what is not finite reached {int((~same).flatten(1).any(1).sum())} other rows"


@functools.cache
def products_mix_rows() -> bool:
    """Whether torch's own products in bfloat16 do. On processors with AMX (torch 2.13) what is not finite behind a row,
    in the next one or between the two, goes into it with many inner dimensions, 17 and 80 among them.
    """
    x = torch.ones(17, 17, dtype=torch.bfloat16)
    x[1] = torch.nan
    return bool((x @ x.new_ones(17, 16))[0].isnan().any())


def isolation(draw: Draw, case: Case, seed: int, out_groups: torch.Tensor, in_groups: torch.Tensor) -> None:
    """What is not finite in one row or sequence leaves all others' bits as they are, in outputs and gradients."""
    names = [name for name, shape in case.shapes.items() if shape[:1] == in_groups.shape and len(shape) > 1]
    names = [name for name in names if name in ("x", "residual", "q", "k", "v", "hidden_states", "word")]
    row = draw.integer(0, len(in_groups) - 1)
    name, poison = draw.choice(names), draw.choice(POISONS)
    case.gradients = tuple(n for n in case.gradients if n in names)
    joint, case.joint = case.joint, False
    draw.note(f"isolation: {name}[{row}] is {poison}")
    clean = case.make(seed)
    spoiled = {n: t.clone() for n, t in clean.items()}
    spoiled[name][row] = torch.tensor(poison).to(case.dtype)
    results = [case.run(case.op, tensors, seed, case.dtype, case.layouts, False) for tensors in (clean, spoiled)]
    for key, t in results[0].items():
        groups = out_groups if key == "out" else in_groups
        assert_same_elsewhere(f"isolation of {key}", t, results[1][key], groups == in_groups[row])
    case.joint = joint
