"""torch.compile(fullgraph=True) of the packed encoder, cold: the first thing that a process does with fastbert."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import copy

    import torch
    from fastbert.config import EncoderConfig
    from fastbert.models.auto import AutoModel
    from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

    torch.manual_seed(0)
    config = EncoderConfig.of_family(
        {model_type!r}, vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, initializer_range=0.1,
    )
    model = AutoModel.from_config(config).eval()
    compiled = torch.compile(model.encode_packed, fullgraph=True, backend={backend!r})


    def batch(lengths):
        ids = torch.randint(2, 100, (sum(lengths),))
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        return ids, cu_seqlens, max(lengths)


    def gradients(model, out):
        model.zero_grad()
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        out.backward(dout.to(out.dtype))  # not out.square().sum(): after a LayerNorm that is almost a constant
        grads = {{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}
        return {{"out": out.detach(), **grads}}


    for lengths in ((5, 0, 15), (12, 11), (1, 30), (9, 9, 9, 9)):
        inputs = batch(lengths)
        out = compiled(*inputs)  # the first round is the process's first call of anything
        found = gradients(model, out)
        oracle, baseline = (
            gradients(twin, twin.encode_packed(*inputs))
            for twin in (copy.deepcopy(model).double(), copy.deepcopy(model))
        )
        assert set(found) == set(oracle) and len(found) > 30
        for name in found:
            assert_close_to_reference(found[name], oracle[name], baseline[name], GRADIENT_FACTOR, name)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 3, f"{{graphs}} graphs for four batches: lengths must not recompile"
"""


@pytest.mark.full  # ten to thirty seconds each; test_compiled_models.py compiles in a process that has called before
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("model_type", ("bert", "roberta", "megatron-bert"))
def test_first_call_of_a_process_is_a_compiled_one(model_type, backend):
    program = textwrap.dedent(PROGRAM).format(model_type=model_type, backend=backend)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
