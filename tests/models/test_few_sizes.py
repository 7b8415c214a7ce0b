"""Batches in few sizes (pad_to) under torch.compile: one graph each, few of them, and little padding."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch
from built import ROOT
from family_configs import config_for
from functorch.compile import make_boxed_func
from hf import randomise
from seeds import numpy_generator
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import fastbert
from fastbert.models.classes import CLASSES
from fastbert.packed_inputs import PackedInputs
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

HEADS = [head for model_type, head in CLASSES if model_type == "bert"]
SIZES = [(24, 8, 8), (32, 8, 8), (40, 10, 8), (48, 12, 16)]


class Graphs:
    """A backend of torch.compile that keeps the graphs that it is given, forward and backward, and runs them."""

    def __init__(self) -> None:
        self.kept: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.kept.append(graph)
        return make_boxed_func(graph.forward)

    def ops(self) -> list[torch._ops.OpOverload]:
        nodes = [node for graph in self.kept for node in graph.graph.nodes if node.op == "call_function"]
        return [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]


def make_batch(head: str, draw: Any, pad_to: list | None) -> PackedInputs:
    """Of 20 to 47 tokens, with all labels that a head takes."""
    count = int(draw.integers(5, 8))
    rows = [draw.integers(5, 40, int(n)).tolist() for n in draw.integers(4, 7, count)]
    labels: dict[str, Any] = {}
    if head in ("MaskedLM", "PreTraining", "TokenClassification"):
        labels["labels"] = [[1, *[-100] * (len(row) - 1)] for row in rows]
    if head in ("NextSentencePrediction", "SequenceClassification"):
        labels["labels"] = [i % 2 for i in range(count)]
    if head == "PreTraining":
        labels["next_sentence_label"] = [i % 2 for i in range(count)]
    if head == "QuestionAnswering":
        labels |= {"start_positions": [1] * count, "end_positions": [2] * count}
    if head == "MultipleChoice":
        return fastbert.pack_inputs([rows[:2], rows[2:4]], labels=[0, 1], pad_to=pad_to)
    return fastbert.pack_inputs(rows, **labels, pad_to=pad_to)


def step(call: Any, model: torch.nn.Module, packed: PackedInputs) -> torch.Tensor:
    """All gradients in one row."""
    model.zero_grad()
    out = call(packed)
    (out.last_hidden_state.square().sum() if "last_hidden_state" in out else out.loss).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "head", [pytest.param(head, marks=[] if head in ("Model", "MaskedLM") else pytest.mark.full) for head in HEADS]
)
def test_ten_batches_are_few_graphs_forward_and_backward(head):
    """And no op in them changes what it is given, or asks for a value: CUDA graphs can repeat them."""
    model = randomise(CLASSES["bert", head](config_for("bert", head, num_hidden_layers=1))).train()
    torch._dynamo.reset()
    counters.clear()
    graphs, draw, sizes = Graphs(), numpy_generator(0), set()
    compiled = torch.compile(model, fullgraph=True, backend=graphs.backend)
    exact = type(model)(model.config).train().double()
    exact.load_state_dict(model.state_dict())
    for i in range(10):
        packed = make_batch(head, draw, SIZES)
        sizes.add(packed["batch"].total_tokens)
        found = step(compiled, model, packed)
        if i in (0, 9):  # the base model's includes what it gives for padding
            assert_close_to_reference(
                found, step(exact, exact, packed), step(model, model, packed), GRADIENT_FACTOR, head
            )
    assert len(sizes) == (1 if head == "MultipleChoice" else len(SIZES))
    assert counters["stats"]["unique_graphs"] <= len(SIZES) and not counters["graph_break"]
    assert len(graphs.kept) >= 2
    for op in graphs.ops():
        assert not op._schema.is_mutable and "_local_scalar_dense" not in op._schema.name, op


def test_no_kernel_of_a_gpu_changes_what_it_is_given():
    from torch._C import _dispatch_get_all_op_names

    import fastbert.ops  # noqa: F401  (which registers them)

    names = [name for name in _dispatch_get_all_op_names() if name.startswith("fastbert::")]
    of_gpus = [name.partition("::")[2] for name in names if name.endswith(("_triton", "_cuda"))]
    assert len(of_gpus) > 20
    assert [n for n in of_gpus if getattr(torch.ops.fastbert, n).default._schema.is_mutable] == []


def test_four_sizes_hold_batches_of_sts_b_with_little_padding():
    """32 sentences in their order, of mixed lengths; the sizes are for the first 50 batches, the share is of all."""
    path = ROOT.parent / "shared" / "data" / "stsb" / "train.tsv"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    texts = [row[name] for row in rows for name in ("sentence1", "sentence2")]
    lengths = [len(text.split()) + 3 for text in texts]  # [CLS], [SEP], and a full stop
    batches = [lengths[i : i + 32] for i in range(0, len(lengths) - 31, 32)]
    totals = sorted(map(sum, batches))
    sizes = [(total + 1, 32, 128) for total in [*(totals[len(totals) * i // 4] for i in (1, 2, 3)), totals[-1]]]
    padding = 0
    for batch in batches:
        packed = fastbert.pack_inputs([[5] * n for n in batch], pad_to=sizes)
        padding += packed["batch"].total_tokens - sum(batch)
    share = padding / (padding + sum(totals))
    assert share <= 0.15, share
