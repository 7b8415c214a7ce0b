"""What the contract of maxsim adds to what every op promises."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from isas import CPU_BACKENDS, OF_FLOATS, backend_with_isa

from fastbert import ops
from fastbert.native.availability import extension_error
from fastbert.testing import reference
from fastbert.testing.numerics import assert_close_to_reference

DTYPES = (torch.float32, torch.bfloat16)
each_backend = pytest.mark.parametrize("backend", ("torch", *OF_FLOATS, "triton"))
each_of_int8 = pytest.mark.parametrize("backend", ("torch", *CPU_BACKENDS, "triton"))
needs_kernels = pytest.mark.skipif(extension_error() is not None, reason=f"{extension_error()}")


def packed(lengths, width, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.nn.functional.normalize(torch.randn(sum(lengths), width, generator=generator), dim=-1).to(dtype)
    return rows, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@each_backend
def test_a_document_without_tokens_scores_what_sentence_transformers_gives_it(backend):
    queries, of_q = packed((3, 0), 8)
    documents, of_d = packed((0, 2, 0), 8)
    with backend_with_isa(backend) as name:
        scores = ops.maxsim(queries, of_q, documents, of_d, backend=name)
        paired = ops.maxsim(queries, of_q, documents, of_d, pairs=torch.tensor([[0, 1, 1], [0, 1, 2]]), backend=name)
    assert scores[:, [0, 2]].eq(-1e9).all() and scores[1, 1] == 0 and scores[0, 1].abs() < 3
    assert paired.tolist() == [-1e9, 0, -1e9]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_backend
def test_the_first_of_equal_tokens_gets_the_gradient(backend, dtype):
    queries = torch.ones(2, 16, dtype=dtype, requires_grad=True)
    documents = torch.ones(150, 16, dtype=dtype)
    documents[:5] = 0.5
    documents.requires_grad_()
    offsets = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 150], dtype=torch.int32)
    with backend_with_isa(backend) as name:
        ops.maxsim(queries, offsets[0], documents, offsets[1], backend=name).sum().backward()
    assert documents.grad[5].eq(2).all() and documents.grad.count_nonzero() == 16
    assert queries.grad.eq(1).all()


@each_backend
def test_a_nan_stays_in_the_scores_of_its_own(backend):
    (queries, of_q), (documents, of_d) = packed((5, 40), 33), packed((70, 20, 100), 33, seed=1)
    with backend_with_isa(backend) as name:
        clean = ops.maxsim(queries, of_q, documents, of_d, backend=name)
        for row, value in ((75, torch.nan), (75, torch.inf), (0, torch.nan)):
            poisoned = documents.clone()
            poisoned[row, 3] = value
            scores = ops.maxsim(queries, of_q, poisoned, of_d, backend=name)
            touched = 1 if row == 75 else 0
            assert not torch.isfinite(scores[:, touched]).any()
            left = [i for i in range(3) if i != touched]
            assert torch.equal(scores[:, left], clean[:, left])


@each_of_int8
def test_int8_documents_and_the_queries_that_are_rounded_like_them(backend):
    """To the last digit: sums of whole numbers are exact. What the rounding costs of a score is below 1 %."""
    (queries, of_q), (documents, of_d) = packed((32, 20, 1), 128), packed((50, 200, 3), 128, seed=1)
    numbers, scales = ops.in_int8(documents)
    whole, steps = ops.in_int8(queries)
    rounded = [t.double() * s.double()[:, None] for t, s in ((whole, steps), (numbers, scales))]
    oracle = reference.maxsim(rounded[0], of_q, rounded[1], of_d)
    pairs = torch.tensor([[2, 0, 0], [1, 2, 0]])
    with backend_with_isa(backend) as name:
        f = partial(ops.maxsim, documents=numbers, cu_seqlens_q=of_q, cu_seqlens_d=of_d, scales=scales, backend=name)
        actual, halves = f(queries), f(queries.bfloat16())
        assert torch.equal(f(queries, pairs=pairs), actual[pairs[0], pairs[1]])
    torch.testing.assert_close(actual.double(), oracle, rtol=1e-6, atol=1e-6)
    exact = ops.maxsim(queries, of_q, documents, of_d, backend="torch")
    torch.testing.assert_close(actual, exact, rtol=0.01, atol=0.02)
    torch.testing.assert_close(halves, exact, rtol=0.02, atol=0.04)


@each_of_int8
def test_int8_numbers_as_large_as_there_are(backend):
    """Queries of plus and minus one, which become 127: two products of them have more than 16 bits."""
    (queries, of_q), (documents, of_d) = packed((40, 1, 30), 67), packed((100, 3, 8, 9), 67, seed=1)
    queries, numbers = queries.sign(), torch.where(documents > 0.5, 127, -128).to(torch.int8)
    scales = torch.full((len(numbers),), 1 / 127)
    oracle = reference.maxsim(queries.double(), of_q, numbers.double() / 127, of_d)
    with backend_with_isa(backend) as name:
        call = partial(ops.maxsim, queries, of_q, numbers, of_d, scales=scales, backend=name)
        actual, pairs = call(), torch.tensor([[2, 0], [0, 3]])
        assert torch.equal(call(pairs=pairs), actual[pairs[0], pairs[1]])
    torch.testing.assert_close(actual.double(), oracle, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("width", (48, 96, 128, 1024))
@pytest.mark.parametrize("backend", (*OF_FLOATS, "triton"))
def test_widths_and_lengths(backend, width):
    (queries, of_q), (documents, of_d) = (
        packed((32, 1), width),
        packed((1, 8192 if width == 48 and backend != "triton" else 300, 30), width),
    )
    with backend_with_isa(backend) as name:
        for dtype in DTYPES:
            q, d = queries.to(dtype), documents.to(dtype)
            oracle = reference.maxsim(q.double(), of_q, d.double(), of_d)
            baseline = reference.maxsim(q.float(), of_q, d.float(), of_d)
            assert_close_to_reference(ops.maxsim(q, of_q, d, of_d, backend=name), oracle, baseline)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_threads_or_on_the_other_documents(dtype):
    (queries, of_q), (documents, of_d) = packed((32,) * 9, 96, dtype), packed((20, 130, 7, 64) * 8, 96, dtype, 1)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            q, d = queries.clone().requires_grad_(), documents.clone().requires_grad_()
            scores = ops.maxsim(q, of_q, d, of_d)
            scores.square().sum().backward()
            results.append((scores.detach(), q.grad, d.grad))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    one = ops.maxsim(queries, of_q, documents[20:150], torch.tensor([0, 130], dtype=torch.int32))
    assert torch.equal(one[:, 0], results[0][0][:, 1])
    pair = ops.maxsim(queries, of_q, documents, of_d, pairs=torch.tensor([[4], [1]]))
    assert torch.equal(pair, results[0][0][4, 1:2])


def test_one_clear_error():
    (queries, of_q), (documents, of_d) = packed((3,), 8), packed((2, 2), 8)
    good = (queries, of_q, documents, of_d)

    def call(error, match, arguments=good, **options):
        with pytest.raises(error, match=match):
            ops.maxsim(*arguments, **options)

    call(ValueError, "queries have width 8, documents 7", (queries, of_q, documents[:, :7], of_d))
    call(ValueError, r"queries have shape \(3, 8, 1\)", (queries[..., None], of_q, documents, of_d))
    beyond = (queries, of_q, documents, torch.tensor([0, 9]))
    call((RuntimeError, ValueError), "is 9, above total_tokens, which is 4|ends at 9", beyond)
    call(ValueError, "ends at 9, but there are 4 tokens", beyond, backend="torch")
    call(ValueError, "scales go with int8 documents", scales=torch.ones(4))
    call(ValueError, "scales go with int8 documents", (queries, of_q, documents.to(torch.int8), of_d))
    in_bytes = (queries, of_q, documents.to(torch.int8), of_d)
    call(ValueError, r"scales are torch.float32 \(3,\)", in_bytes, scales=torch.ones(3))
    call(ValueError, r"pairs are torch.int64 \(1, 2\)", pairs=torch.tensor([[0, 1]]))
    for backend in (None, "torch"):
        call(IndexError, "pairs have document 2, there are 2", pairs=torch.tensor([[0], [2]]), backend=backend)
        call(IndexError, "pairs have query -1, there are 1", pairs=torch.tensor([[-1], [0]]), backend=backend)


@needs_kernels
def test_backward_holds_winners_and_nothing_of_tokens_times_tokens():
    """4,096 query tokens and 8,192 document tokens: their products would be 134 MB, the winners are 1 MB."""
    (queries, of_q), (documents, of_d) = packed((64,) * 64, 96), packed((128,) * 64, 96, seed=1)
    queries.requires_grad_(), documents.requires_grad_()
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        ops.maxsim(queries, of_q, documents, of_d)
    extra = {t.untyped_storage().data_ptr(): t.nbytes for t in held if t is not queries and t is not documents}
    own = {queries.untyped_storage().data_ptr(), documents.untyped_storage().data_ptr()}
    assert sum(size for place, size in extra.items() if place not in own) < 1.1 * 4 * 64 * 4096


@each_of_int8
def test_what_is_not_finite_has_no_int8(backend):
    """As in float32, its scores are NaN, and no others are."""
    (queries, of_q), (documents, of_d) = packed((5, 40), 33), packed((70, 20, 100), 33, seed=1)
    pairs = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
    for value in (torch.nan, torch.inf, -torch.inf):
        for side, row in ((0, 3), (1, 75)):
            rows = [queries.clone(), documents.clone()]
            rows[side][row, 7] = value
            numbers, scales = ops.in_int8(rows[1])
            with backend_with_isa(backend) as name:
                scores = ops.maxsim(rows[0], of_q, numbers, of_d, scales=scales, backend=name)
                paired = ops.maxsim(rows[0], of_q, numbers, of_d, pairs=pairs, scales=scales, backend=name)
            expected = torch.zeros(2, 3, dtype=torch.bool)
            expected.select(side, 0 if side == 0 else 1)[:] = True
            assert torch.equal(scores.isnan(), expected) and torch.equal(paired.isnan(), expected.flatten())
    rows = torch.tensor([[1.0, -2.0], [torch.nan, 1.0], [0.0, 0.0]])
    numbers, scales = ops.in_int8(rows)
    assert numbers.tolist() == [[64, -127], [0, 0], [0, 0]] and scales.isnan().tolist() == [False, True, False]


def test_int8_of_rows_whose_scale_is_hardly_a_number():
    """Below float32's normal numbers a scale loses its digits, and then is 0: no number wraps, or is none's."""
    smallest = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    rows = torch.tensor([[190.0, -190.0, 0.0], [60.0, -60.0, 0.0]]) * smallest
    numbers, scales = ops.in_int8(rows)
    assert numbers.tolist() == [[127, -127, 0], [0, 0, 0]] and scales.tolist() == [smallest, 1]


@pytest.mark.parametrize("paired", (False, True), ids=("all", "pairs"))
@each_backend
def test_no_gradient_meets_a_nan_of_rows_that_it_does_not_read(backend, paired):
    """0 times NaN is NaN: in a product's backward rows beyond the last text meet gradients of 0, and so does what fills
    up a shorter text."""
    (queries, of_q), (documents, of_d) = packed((5, 4), 33), packed((2, 7, 10), 33, seed=1)
    rest = torch.full((2, 33), torch.nan)
    pairs = torch.tensor([[0, 1], [1, 2]]) if paired else None

    def gradients(q, d, **options):
        q, d = q.clone().requires_grad_(), d.clone().requires_grad_()
        ops.maxsim(q, of_q, d, of_d, pairs=pairs, **options).square().sum().backward()
        return q.grad, d.grad

    with backend_with_isa(backend) as name:
        clean = gradients(queries, documents, backend=name)
        read = documents.clone()
        if paired:  # no pair has the first document
            read[0] = torch.nan
        poisoned = gradients(torch.cat([queries, rest]), torch.cat([read, rest]), backend=name)
    for one, other in zip(clean, poisoned, strict=True):
        assert torch.equal(one, other[:-2]) and other[-2:].eq(0).all()


@each_backend
def test_queries_without_tokens_beside_a_nan(backend):
    documents, of_d = packed((2, 3), 8)
    documents[0, 0] = torch.nan
    documents.requires_grad_()
    queries, of_q = torch.zeros(0, 8, requires_grad=True), torch.zeros(3, dtype=torch.int32)
    with backend_with_isa(backend) as name:
        scores = ops.maxsim(queries, of_q, documents, of_d, backend=name)
        paired = ops.maxsim(queries, of_q, documents, of_d, pairs=torch.tensor([[0, 1], [0, 1]]), backend=name)
    assert scores.eq(0).all() and scores.shape == (2, 2) and paired.tolist() == [0, 0]
    scores.sum().backward()
    assert documents.grad.eq(0).all() and queries.grad.shape == (0, 8)


@needs_kernels
@pytest.mark.parametrize("isa", [name.partition("-")[2] for name in CPU_BACKENDS])
def test_int8_that_is_too_wide_to_be_summed(isa):
    """132,103 products of 127 and -128 fit into int32, and no more are multiplied."""
    limit = 2**31 // (127 * 128) - 1
    queries, of_one = torch.ones(1, limit), torch.tensor([0, 1], dtype=torch.int32)
    documents, scales = torch.full((1, limit), -128, dtype=torch.int8), torch.ones(1)
    with backend_with_isa(f"cpu-{isa}"):
        score = ops.maxsim(queries, of_one, documents, of_one, scales=scales, backend="cpu")
        assert_close_to_reference(
            score, torch.full((1, 1), -128.0 * limit).double(), torch.full((1, 1), -128.0 * limit)
        )
        with pytest.raises(RuntimeError, match=f"int8 vectors have width {limit + 1}"):
            ops.maxsim(
                torch.ones(1, limit + 1), of_one, torch.ones(1, limit + 1).char(), of_one, scales=scales, backend="cpu"
            )
