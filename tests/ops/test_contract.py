"""What every op promises (docs/design.md, "Ops"), over the table in tests/support/op_cases.py.

An op's own file keeps what is special to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from draw import Draw
from full import halved, left_to_full, triton_left_to_full
from isas import backend_with_isa
from op_case import LAYOUTS, isolation, products_mix_rows
from op_cases import OPS
from seeds import python_random, shifted
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fastbert.errors import BackendError
from fastbert.testing.cases import DTYPES

DRAWS = 3  # shapes and options of an op, in each test; `make fuzz` has thousands
WITH_KERNELS = [(op, backend) for op, entry in OPS.items() for backend in entry.backends]
ANY_BACKEND = [*WITH_KERNELS, *((op, "torch") for op in OPS)]
# One instruction set stands for what goes by Python and by the operator's schema.
ONCE = [(op, backend) for op, backend in WITH_KERNELS if backend in ("cpu-avx2", "triton")]
# Triton's interpreter is not traced, and these cases seed torch's generator themselves.
TRACED = [(op, backend) for op, backend in ONCE if backend != "triton" and "dropout" not in op]

# Ops whose products are torch's where none of ours are written for the processor.
MULTIPLY = ("feed_forward", "linears", "cross_entropy")

# Products of bfloat16 with instructions of their own.
OF_BFLOAT16 = ("cpu-avx512_bf16", "cpu-amx")


def is_met_in_the_other_dtype(p) -> bool:
    """An op meets both dtypes, and so does an instruction set; together they meet in one of them."""
    place = ANY_BACKEND.index((p["op"], p["backend"])) + list(OPS).index(p["op"]) + DTYPES.index(p["dtype"])
    return place % 2 != 0 and not (p["backend"] in OF_BFLOAT16 and p["dtype"] is torch.bfloat16)


def is_met_by_other_ops(p) -> bool:
    """One instruction set stands for others, and half of the ops for a layout."""
    place = list(OPS).index(p["op"]) + list(LAYOUTS).index(p["layout"])
    return p["backend"] not in ("cpu-avx2", "triton") or (place + (p["backend"] == "triton")) % 2 != 0


def has_tests_of_its_own(p) -> bool:
    """The interpreter takes seconds for a case of this op: test_relative_triton*.py ask the same of smaller ones."""
    return (p["op"], p["backend"]) == ("relative_attention", "triton")


any_backend = pytest.mark.parametrize(("op", "backend"), ANY_BACKEND)
with_kernels = pytest.mark.parametrize(("op", "backend"), WITH_KERNELS)
once = pytest.mark.parametrize(("op", "backend"), ONCE)


class Drawn:
    """The cases of an op for one backend and dtype: `make(case)` of the same shapes and numbers each time."""

    def __init__(self, op: str, backend: str, dtype: torch.dtype, number: int):
        self.draw = Draw(python_random(1000 * number + list(OPS).index(op)).randint)
        kind = backend.partition("-")[0]
        self.case, self.out_groups, self.in_groups = OPS[op].make(self.draw, kind, dtype)
        self.case.gradients = tuple(self.case.shapes)
        self.case.reads_gaps = kind != "cpu" and dtype is torch.bfloat16 and products_mix_rows()
        self.seed = shifted(number)

    def results(self, op: Callable[..., torch.Tensor] | None = None, **layouts: str) -> dict[str, torch.Tensor]:
        """The output and the gradients."""
        case = self.case
        return case.run(op or case.op, case.make(self.seed), self.seed, case.dtype, layouts, case.reads_gaps)


@functools.cache
def _served(op: str, backend: str, dtype: torch.dtype, _: int) -> list[int]:
    """The first numbers whose cases the backend serves, of which there is at least one; by the seed that all draw by.
    It runs them to find out.
    """
    found = []
    for number in range(8 * DRAWS):
        try:
            Drawn(op, backend, dtype, number).results()
        except BackendError:
            continue
        found.append(number)
        if len(found) == DRAWS:
            break
    assert found, f"{backend} serves no case of {op}"
    return found


@contextmanager
def drawn(op: str, backend: str, dtype: torch.dtype) -> Iterator[list[Drawn]]:
    """Cases that the backend serves."""
    with backend_with_isa(backend):
        yield [Drawn(op, backend, dtype, number) for number in _served(op, backend, dtype, shifted(0))]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, t in found.items():
        assert t.dtype is expected[name].dtype and torch.equal(t, expected[name]), name


class Recorded(TorchDispatchMode):
    """Which registered operators run, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[tuple, dict]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fastbert":
            given = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))
            if function not in self.calls or _has_empty(self.calls[function]):  # which torch cannot copy as they lie
                self.calls[function] = given
        return function(*args, **(kwargs or {}))


def _has_empty(given: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and not t.numel() for t in tree_leaves(given))


@triton_left_to_full
@left_to_full(has_tests_of_its_own)
@left_to_full(is_met_in_the_other_dtype)
@any_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_formula(op, backend, dtype):
    """In float64, outputs and gradients."""
    with drawn(op, backend, dtype) as cases:
        for one in cases:
            one.case.compare(one.seed)


@left_to_full(has_tests_of_its_own)
@left_to_full(is_met_in_the_other_dtype)
@pytest.mark.parametrize(("op", "backend"), [case for case in WITH_KERNELS if case[1] == "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_case_against_the_formula(op, backend, dtype):
    """Of each kernel that is interpreted, the first that it serves."""
    with backend_with_isa(backend):
        for number in range(8 * DRAWS):
            one = Drawn(op, backend, dtype, number)
            with suppress(BackendError):
                one.case.compare(one.seed)
                return
    pytest.fail(f"{backend} serves no case of {op}")


@halved
@triton_left_to_full
@left_to_full(has_tests_of_its_own)
@left_to_full(is_met_in_the_other_dtype)
@with_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_in_every_run_and_for_any_number_of_threads(op, backend, dtype):
    """Not where whole products are torch's, as with Triton and where none of ours are written for the processor."""
    threads, is_torchs = torch.get_num_threads(), backend == "cpu-generic" and op in MULTIPLY
    with drawn(op, backend, dtype) as cases:
        for one in cases:
            expected = one.results()
            for count in {threads, 1, 2, 3} if backend.startswith("cpu") and not is_torchs else (threads,):
                torch.set_num_threads(count)
                found = one.results()
                torch.set_num_threads(threads)
                assert_same(found, expected)


@triton_left_to_full
@left_to_full(has_tests_of_its_own)
@left_to_full(is_met_by_other_ops)
@with_kernels
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_any_layout_of_its_operands(op, backend, layout):
    """And of the output's gradient. Between the elements is NaN."""
    with drawn(op, backend, torch.float32) as cases:
        for one in cases:
            one.case.layouts = dict.fromkeys((*one.case.shapes, "out"), layout)
            one.case.compare(one.seed)


@triton_left_to_full
@left_to_full(has_tests_of_its_own)
@left_to_full(is_met_in_the_other_dtype)
@with_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row(op, backend, dtype):
    with drawn(op, backend, dtype) as cases:
        for one in cases:
            if one.in_groups is not None and one.in_groups.numel() and not one.case.reads_gaps:
                isolation(one.draw, one.case, one.seed, one.out_groups, one.in_groups)


@triton_left_to_full
@left_to_full(has_tests_of_its_own)
@with_kernels
def test_the_backend_that_is_asked_for_runs(op, backend):
    with drawn(op, backend, torch.float32) as cases:
        with Recorded() as recorded:
            for one in cases:
                one.results()
        names = [function.name().partition(".")[0] for function in recorded.calls]
        assert names and all(name.endswith(backend.partition("-")[0]) for name in names), names


@pytest.mark.parametrize("op", OPS)
def test_torch_runs_torch_alone(op):
    with drawn(op, "torch", torch.float32) as cases, Recorded() as recorded:
        for one in cases:
            one.results()
    assert not recorded.calls


@halved
@triton_left_to_full
@left_to_full(has_tests_of_its_own)
@once
def test_opcheck(op, backend):
    """Of each operator that runs, forward and backward: its schema, its fake, and that it is traced."""
    with drawn(op, backend, torch.float32) as cases:
        with Recorded() as recorded:
            for one in cases:
                one.results()
        assert recorded.calls
        for function, (args, kwargs) in recorded.calls.items():
            torch.library.opcheck(function, args, kwargs)


@halved
@pytest.mark.parametrize(("op", "backend"), TRACED)
def test_compiles_into_one_graph_with_the_same_bits(op, backend):
    with drawn(op, backend, torch.float32) as cases:
        one = cases[0]
        expected = one.results()
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            assert_same(one.results(torch.compile(one.case.op, fullgraph=True, backend="aot_eager")), expected)


@once
def test_float64_is_refused_with_its_name(op, backend):
    """Kernels compute in float32 at most."""
    with backend_with_isa(backend), pytest.raises(BackendError, match="float64"):
        Drawn(op, backend, torch.float64, 0).results()
