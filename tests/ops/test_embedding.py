"""embed_layer_norm: lookups, the fused LayerNorm and the sums of a table's gradient, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from full import halved, left_to_full, triton_left_to_full
from isas import backend_with_isa, device_of
from seeds import manual_seed, torch_generator
from shares import assert_share
from test_ops import check

from fastbert import ops
from fastbert.errors import BackendError
from fastbert.native.availability import extension_error
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

ROWS = 400  # of the word table


@pytest.fixture(params=("torch", "cpu", "triton"))
def backend(request):
    if request.param == "cpu" and extension_error() is not None:
        pytest.skip(extension_error())
    with backend_with_isa(request.param) as name:
        yield name


each_dtype = pytest.mark.parametrize(
    "dtype", (torch.float32, torch.bfloat16, torch.float16), ids=lambda d: str(d).removeprefix("torch.")
)
only_triton = pytest.mark.parametrize("backend", ("triton",), indirect=True)


def skip_unless_served(backend, dtype):
    if backend == "cpu" and dtype is torch.float16:
        pytest.skip("the cpu kernels have no float16")


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randint(0, rows, (tokens,)) for rows in (ROWS, 20, 2))


def tables(width: int, *names: str) -> dict[str, torch.Tensor]:
    rows = {"word": (ROWS,), "position": (20,), "token_type": (2,), "weight": (), "bias": ()}
    return {name: torch.randn(*rows[name], width) for name in ("word", "position", *names)}


def call(function, ids, device, **options):
    """function(**tables): of the oracle, or of the op with its options."""

    def with_ids(word, position=None, token_type=None, weight=None, bias=None):
        moved = (None if t is None else t.to(device) for t in ids)
        return function(*moved, word, position, token_type, weight, bias, **options)

    return with_ids


def check_embedding(backend, dtype, ids, tensors, **options):
    device = device_of(backend)
    ours = call(ops.embed_layer_norm, ids, device, backend=backend, **options)
    check(ours, call(reference.embed_layer_norm, ids, "cpu", **options), tensors, dtype, device=device)


@halved
@triton_left_to_full
@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] is not torch.float32 and p["tokens"] != 19)
@pytest.mark.parametrize("names", ((), ("token_type",), ("weight",), ("token_type", "weight", "bias")), ids=str)
@pytest.mark.parametrize("tokens,width", ((0, 64), (1, 33), (19, 80), (37, 384)), ids=str)
@each_dtype
def test_against_oracle(backend, dtype, tokens, width, names):
    skip_unless_served(backend, dtype)
    check_embedding(backend, dtype, inputs(tokens), tables(width, *names), eps=1e-7)


@triton_left_to_full
def test_without_token_type_ids_every_token_is_of_type_0(backend):
    ids, positions, _ = inputs(19)
    tensors = tables(24, "token_type", "weight")
    check_embedding(backend, torch.float32, (ids, positions, None), tensors)


@triton_left_to_full
@halved
@pytest.mark.parametrize(
    "names", ((), ("weight",), ("token_type", "weight"), ("token_type", "weight", "bias")), ids=str
)
@each_dtype
def test_without_a_position_table(backend, dtype, names):
    """As ModernBERT has it, or Nomic BERT, whose positions are rotations."""
    skip_unless_served(backend, dtype)
    (ids, positions, types), tensors = inputs(19), tables(72, *names)
    del tensors["position"]
    for given in ((ids, None, types), (ids, positions, None)):  # positions that no table has are not looked at
        check_embedding(backend, dtype, given, tensors, eps=1e-5)


@triton_left_to_full
@halved
@pytest.mark.parametrize("names", ((), ("weight",), ("token_type", "weight", "bias")), ids=str)
def test_own_rows_without_a_position_table(backend, names):
    ids, device, tensors = torch.randperm(ROWS)[:13], device_of(backend), tables(40, *names)
    del tensors["position"]
    leaves = {n: t.to(device).requires_grad_() for n, t in tensors.items()}
    rows = tensors["word"][ids].to(device).requires_grad_()
    looked_up = call(ops.embed_layer_norm, (ids, None, None), device, backend=backend)(**leaves)
    given = call(ops.embed_layer_norm, (None, None, None), device, backend=backend, inputs_embeds=rows)(**leaves)
    assert torch.equal(looked_up, given)
    dout = torch.randn_like(given)
    (dword,), (drows,) = (torch.autograd.grad(o, t, dout) for o, t in ((looked_up, leaves["word"]), (given, rows)))
    assert torch.equal(dword[ids.to(device)], drows)


def inference(backend, ids, tensors, **options):
    device = device_of(backend)
    with torch.no_grad():
        moved = {name: t.to(device) for name, t in tensors.items()}
        return call(ops.embed_layer_norm, ids, device, backend=backend, **options)(**moved)


@triton_left_to_full
@each_dtype
def test_the_fused_layer_norm_is_that_of_training(backend, dtype):
    skip_unless_served(backend, dtype)
    ids, tensors = inputs(21), {n: t.to(dtype) for n, t in tables(72, "token_type", "weight", "bias").items()}
    oracle = call(reference.embed_layer_norm, ids, "cpu")(**{n: t.double() for n, t in tensors.items()})
    baseline = call(reference.embed_layer_norm, ids, "cpu")(**tensors)
    out = inference(backend, ids, tensors)
    assert_close_to_reference(out, oracle, baseline, name="fused")
    ours = call(ops.embed_layer_norm, ids, device_of(backend), backend=backend)
    trained = ours(**{n: t.to(device_of(backend)).requires_grad_() for n, t in tensors.items()})
    assert torch.equal(out, trained)


@triton_left_to_full
def test_statistics_of_a_large_mean(backend):
    ids = inputs(9)
    tensors = tables(768, "token_type", "weight", "bias")
    tensors["word"] += 1e4
    oracle = call(reference.embed_layer_norm, ids, "cpu")(**{n: t.double() for n, t in tensors.items()})
    baseline = call(reference.embed_layer_norm, ids, "cpu")(**tensors)
    assert_close_to_reference(inference(backend, ids, tensors), oracle, baseline)


@triton_left_to_full
def test_own_rows_in_place_of_ids(backend):
    (ids, positions, types), tensors = inputs(13), tables(40, "token_type", "weight")
    device = device_of(backend)
    rows = tensors["word"][ids].to(device).requires_grad_()
    ids = (ids, positions, types)
    ours = call(ops.embed_layer_norm, ids, device, backend=backend, inputs_embeds=rows)
    out = ours(**{n: t.to(device) for n, t in tensors.items()})
    assert torch.equal(out, inference(backend, ids, tensors))
    dout = torch.randn(13, 40)
    out.backward(dout.to(device))
    word = tensors["word"].double()[ids[0]].requires_grad_()
    everyone = (torch.arange(13), positions, types)
    call(reference.embed_layer_norm, everyone, "cpu")(
        **{n: word if n == "word" else t.double() for n, t in tensors.items()}
    ).backward(dout.double())
    baseline = tensors["word"][ids[0]].requires_grad_()
    call(reference.embed_layer_norm, everyone, "cpu")(**tensors | {"word": baseline}).backward(dout)
    assert_close_to_reference(rows.grad, word.grad, baseline.grad, GRADIENT_FACTOR)


def runs(*lengths: int) -> torch.Tensor:
    """Sorted ids 0, 2, 4, ... in runs of these lengths."""
    return torch.repeat_interleave(2 * torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


# The Triton kernel walks over chunks of 32 sorted tokens; 32 partial sums are joined at once.
RUNS = {
    "none": runs(),
    "one-token": runs(1),
    "one-id": runs(200),
    "one-id-many-chunks": runs(1, 32 * 40 + 5, 3),
    "every-id-distinct": torch.arange(100),
    "whole-chunks": runs(32, 64, 32, 96),
    "ends-beside-borders": runs(31, 1, 33, 63, 1, 64, 30, 2, 66),
    "one-token-beyond": runs(33),
    "one-token-before": runs(31),
    "across-every-border": runs(16, 32, 32, 32, 32, 5),
    "random": torch.randint(0, 9, (300,), generator=torch_generator(0)),
}


def gradient(backend, dout, ids, table, padding_idx=-1):
    device = device_of(backend)
    op = getattr(torch.ops.fastbert, f"embed_bwd_{backend}")
    return op(dout.to(device), ids.to(device), table.to(device), padding_idx).cpu()


def literal(dout, ids, rows):
    total = dout.new_zeros(rows, dout.shape[1])
    for row, id in zip(dout, ids.tolist(), strict=True):
        total[id] += row
    return total


@triton_left_to_full
@halved
@pytest.mark.parametrize(
    "name,width", [*((name, 24) for name in RUNS), ("random", 1), ("random", 300), ("across-every-border", 300)]
)
@pytest.mark.parametrize("backend", ("cpu", "triton"), indirect=True)
def test_gradient_of_a_table(backend, name, width):
    ids = RUNS[name][torch.randperm(len(RUNS[name]))]
    dtypes = [torch.float32, torch.bfloat16, torch.float16][: 2 if backend == "cpu" else 3]
    for dtype in dtypes if backend == "cpu" or len(ids) == 300 else dtypes[:1]:  # a run is a run in any dtype
        dout, table = torch.randn(len(ids), width).to(dtype), torch.randn(ROWS, width).to(dtype)
        expected = literal(dout.double(), ids, ROWS)
        baseline = literal(dout.float(), ids, ROWS).to(dtype)  # sums are fp32's, rounded once
        found = gradient(backend, dout, ids, table)
        assert_close_to_reference(found, expected, baseline, GRADIENT_FACTOR, f"{name}, {dtype}")


@triton_left_to_full
@halved
@pytest.mark.parametrize("name", ("one-token", "one-id", "whole-chunks", "ends-beside-borders", "across-every-border"))
@pytest.mark.parametrize("backend", ("cpu", "triton"), indirect=True)
def test_padding_row_takes_no_gradient(backend, name):
    ids = RUNS[name]
    dout, table = torch.randn(len(ids), 24), torch.randn(ROWS, 24)
    everything = gradient(backend, dout, ids, table)
    for padding_idx in (0, 2):
        found = gradient(backend, dout, ids, table, padding_idx)
        assert not found[padding_idx].any()
        found[padding_idx] = everything[padding_idx]
        assert torch.equal(found, everything)


@triton_left_to_full
@pytest.mark.parametrize("backend", ("cpu", "triton"), indirect=True)
def test_no_row_sees_another(backend):
    ids = RUNS["ends-beside-borders"]
    dout, table = torch.randn(len(ids), 24), torch.randn(ROWS, 24)
    expected = gradient(backend, dout, ids, table)
    dout[ids == 6] = float("nan")
    found = gradient(backend, dout, ids, table)
    assert found[6].isnan().all()
    others = torch.arange(ROWS) != 6
    assert torch.equal(found[others], expected[others])


@triton_left_to_full
@only_triton
@each_dtype
def test_repeats_bit_for_bit(backend, dtype):
    ids = RUNS["random"]
    dout, table = torch.randn(len(ids), 80).to(dtype), torch.randn(ROWS, 80).to(dtype)
    first, again = (gradient(backend, dout, ids, table) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first, gradient(backend, dout.t().contiguous().t(), ids.int(), table))


@triton_left_to_full
def test_dropout_comes_last(backend):
    ids, tensors = inputs(40), tables(64, "token_type", "weight", "bias")
    manual_seed(3)
    dropped = inference(backend, ids, tensors, dropout_p=0.25)
    keep = dropped != 0
    assert_share(keep, 0.75)
    whole = inference(backend, ids, tensors)[keep]
    assert_close_to_reference(dropped[keep], whole.double() / 0.75, whole / 0.75)
    manual_seed(3)
    ours = call(ops.embed_layer_norm, ids, device_of(backend), backend=backend, dropout_p=0.25)
    leaves = {n: t.to(device_of(backend)).requires_grad_() for n, t in tensors.items()}
    assert torch.equal(ours(**leaves) != 0, keep)


def test_what_cannot_be_served_raises_with_the_reason():
    ids, tensors = inputs(5), tables(32, "weight")
    for change, message in (
        ({n: t.double() for n, t in tensors.items()}, r"float64|tensors are on cpu"),
        (tensors | {"weight": tensors["weight"].half()}, r"float16|tensors are on cpu"),
        ({n: t.repeat_interleave(300, -1) for n, t in tensors.items()}, "9600 is above 8192"),
    ):
        with pytest.raises(BackendError, match=message):
            call(ops.embed_layer_norm, ids, "cpu", backend="triton")(**change)
