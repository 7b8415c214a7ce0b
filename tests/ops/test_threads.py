"""Whole models on the CPU kernels: the same bits for any number of threads and cores, and for two threads at once."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import warm
from full import halved, left_to_full
from isas import packs
from torch import nn

import fastbert
from fastbert import ops
from fastbert.layers.encoder import EncoderLayer
from fastbert.layers.leaves import weights_of
from fastbert.layers.operands import layer_operands
from fastbert.layers.quantized import QuantizedLinear
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)

# Enough tokens for several blocks of rows, sequences of 1 to 130 tokens, sizes that fill no panel.
PROGRAM = """
import hashlib, os, sys, torch, fastbert
torch.set_num_threads(int(sys.argv[1]))
if cores := sys.argv[2:]:
    os.sched_setaffinity(0, map(int, cores))
torch.manual_seed(0)
shape = {"hidden_size": 72, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 200}
config = fastbert.EncoderConfig.of_family("bert", vocab_size=99, max_position_embeddings=130, **shape)
weights = fastbert.BertModel(config).eval().state_dict()
lengths = torch.tensor([130, 1, 7, 64, 65, 100, 6, 129])
mask = (torch.arange(130) < lengths[:, None]).long()
ids = torch.randint(1, 99, mask.shape)
for kind in ("float32", "bfloat16", "int8"):
    model = fastbert.BertModel(config).eval()
    model.load_state_dict(weights)
    model = fastbert.quantize(model, "int8") if kind == "int8" else model.to(getattr(torch, kind))
    with torch.no_grad():
        inferred = model(ids, mask).last_hidden_state
    parts = [inferred]
    if kind != "int8":
        model(ids, mask).last_hidden_state.float().square().sum().backward()
        parts += [p.grad for p in model.parameters() if p.grad is not None]
    print(kind, hashlib.sha256(b"".join(p.float().numpy().tobytes() for p in parts)).hexdigest())
"""


def run(threads: int, *cores: int) -> str:
    done = warm.run([sys.executable, "-c", PROGRAM, threads, *cores])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full  # test_contract.py has every op with one, two and three threads in one process
def test_bits_are_the_same_for_any_number_of_threads_and_on_one_core():
    expected = run(1)
    assert [line.split()[0] for line in expected.splitlines()] == ["float32", "bfloat16", "int8"]
    assert run(3) == expected, "three threads"  # test_contract.py has 2 and 3 threads in one process
    assert run(2, min(os.sched_getaffinity(0))) == expected, "on one core"


# On both sides of what makes threads share a product's rows instead of its columns: 8 rows for each thread in int8, 32
# in floats, and 192 that a thread takes at most.
@left_to_full(lambda p: p["rows"] in ((63, 64, 65, 96) if p["kind"] == "int8" else (15, 16, 24)))  # the others' sides
@left_to_full(lambda p: p["kind"] == ("float32" if p["rows"] in (64, 96, 640) else "bfloat16"))  # in one dtype of two
@pytest.mark.parametrize("rows", (15, 16, 24, 63, 64, 65, 96, 385, 640))
@pytest.mark.parametrize("kind", ("float32", "bfloat16", "int8"))
def test_who_takes_which_rows_changes_no_bit(kind, rows):
    torch.manual_seed(0)
    leaves = [nn.Linear(72, 200), nn.Linear(72, 200), nn.Linear(200, 72)]
    x = torch.randn(rows, 72).to(torch.float32 if kind == "float32" else torch.bfloat16)
    leaves = [leaf.to(x.dtype) for leaf in leaves]
    gate, up, down = map(
        weights_of, [QuantizedLinear.from_linear(leaf).eval() for leaf in leaves] if kind == "int8" else leaves
    )
    scales = [gate.weight_scale, up.weight_scale, down.weight_scale]

    def run() -> list[torch.Tensor]:
        made = ops.linears(
            x, [up.weight, gate.weight], [up.bias, gate.bias], weight_scales=scales[:2], activation="gelu"
        )
        plain = ops.feed_forward(x, up.weight, up.bias, down.weight, weight_scales=scales[1:])
        gated = {"gate_weight": gate.weight, "gate_bias": gate.bias, "activation": "silu", "gated": True}
        made += [plain, ops.feed_forward(x, up.weight, up.bias, down.weight, **gated, weight_scales=scales)]
        if kind != "int8":
            leaf = x.clone().requires_grad_()
            torch.manual_seed(1)
            trained = ops.feed_forward(leaf, up.weight, up.bias, down.weight, **gated, dropout_p=0.1)
            made += [trained, *torch.autograd.grad(trained.float().square().sum(), (leaf, up.weight, down.weight))]
        return made

    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run())
            found.append(run())  # by packed copies
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


@pytest.fixture(params=(1, 2), ids=("one each", "a team each"))
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@halved
@pytest.mark.parametrize("kind", ("float32", "bfloat16", "int8"))
def test_two_threads_run_one_model_at_once(kind, threads):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = fastbert.EncoderConfig.of_family("bert", vocab_size=99, **shape)
    model = fastbert.BertModel(config).eval()
    model = fastbert.quantize(model, "int8") if kind == "int8" else model.to(getattr(torch, kind))
    batches = [torch.randint(1, 99, (4, length)) for length in (5, 33, 70)]

    def encode(i: int) -> torch.Tensor:
        with torch.no_grad():
            return model(batches[i % 3]).last_hidden_state

    # The first calls of both threads find no packed weight.
    with ThreadPoolExecutor(2) as pool:
        at_once = list(pool.map(encode, range(24)))
    for i, out in enumerate(at_once):
        assert torch.equal(out, encode(i))


def test_what_goes_wrong_in_a_team_is_said(threads):
    """An operator that fails between two loops of its team, and the calls after it."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = fastbert.EncoderConfig.of_family("bert", vocab_size=99, **shape)
    model = fastbert.BertModel(config).eval()
    ids = torch.tensor([5, 6, 7, 8])
    with torch.inference_mode():
        expected = model(ids[None]).last_hidden_state
        for offsets in ([0, 5], [0, 3, 2]):  # seen by attention, with the first product done
            with pytest.raises(RuntimeError, match=r"cu_seqlens\[-?[12]\] is"):
                given = layer_operands(model, config.layer_paths, config.layer_specs, None, EncoderLayer, trains=False)
                layers = ops.try_fused("encoder_layers", expected[0], lambda given=given: given)
                layers(torch.tensor(offsets, dtype=torch.int32))
            assert torch.equal(model(ids[None]).last_hidden_state, expected)


@packs
def test_the_second_forward_keeps_every_weight_of_the_layers_packed_and_others_nothing():
    """What it does more than any other, by memory: its time says more of the machine than of us."""
    program = (
        "import torch, fastbert\n"
        "from fastbert import _C\n"
        "shape = {'hidden_size': 384, 'num_hidden_layers': 6, 'num_attention_heads': 12, 'intermediate_size': 1536}\n"
        "model = fastbert.BertModel(fastbert.EncoderConfig.of_family('bert', vocab_size=99, **shape)).eval()\n"
        "ids = torch.randint(1, 99, (1, 16))\n"
        "weights = sum(p.nbytes for n, p in model.encoder.named_parameters() if p.dim() == 2)\n"
        "for _ in range(3):\n"
        "    with torch.inference_mode(), fastbert.use_backend('cpu'):\n"
        "        model.encode_packed(ids[0], torch.tensor([0, 16], dtype=torch.int32), 16)\n"
        "    print(_C.packed_bytes() / weights)"
    )
    first, second, third = map(float, warm.run([sys.executable, "-c", program]).stdout.split())
    assert first == 0 and 1.0 <= second < 1.05 and second == third


@pytest.mark.parametrize("kind", ("float32", "int8"))
def test_a_stack_of_layers_behind_another_one_whose_weights_are_gone(kind):
    """A thread fetches the panels ahead that the stack before had: it must not read what is there."""

    def made(layers, hidden_size):
        shape = {"hidden_size": hidden_size, "num_hidden_layers": layers, "num_attention_heads": 2}
        config = fastbert.EncoderConfig.of_family("bert", vocab_size=99, intermediate_size=200, **shape)
        model = fastbert.BertModel(config).eval()
        return fastbert.quantize(model, "int8") if kind == "int8" else model

    ids, small = torch.randint(1, 99, (1, 8)), made(2, 72)

    @torch.inference_mode()
    def run(model):
        return model(ids).last_hidden_state

    with ThreadPoolExecutor(1) as fresh:
        expected = fresh.submit(run, small).result()
    for _ in range(3):
        run(made(3, 136))
        assert torch.equal(run(small), expected)
