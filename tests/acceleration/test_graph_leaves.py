"""What changes in a model behind fastbert.graphs, other than its weights, is seen before a graph is replayed."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from test_graphs import DEVICE, compare, graphs, make_model  # noqa: F401


def initialised_again(model):
    model.encoder.layer[0].output.dense.__init__(96, 64)
    model.to(DEVICE).eval()


def patched(model):
    model.encoder.layer[0].output.dense.forward = lambda x: x[:, :64]


def of_another_class(model):
    model.encoder.layer[0].output.dense.__class__ = type("Mine", (torch.nn.Linear,), {})


def with_another_eps(model):
    model.encoder.layer[0].output.LayerNorm.eps = 0.5


@pytest.mark.parametrize("change", (initialised_again, patched, of_another_class, with_another_eps))
def test_leaves_may_change(change, graphs):  # noqa: F811
    """Whatever calling one of them would do otherwise than when it was captured."""
    model = make_model()
    graphed, ids = graphs(model), torch.randint(1, 40, (2, 8), device=DEVICE)
    with torch.no_grad():
        graphed(ids)
        change(model)
        assert not graphed._captured_from.is_same()
        compare(graphed(ids), model, {"input_ids": ids})
        assert graphed._captured_from.is_same() and graphed.why_eager is None


def test_hooks_in_another_dict(graphs):  # noqa: F811
    model = make_model()
    graphed, ids, seen = graphs(model), torch.randint(1, 40, (2, 8), device=DEVICE), []
    leaf = model.encoder.layer[0].output.dense
    with torch.no_grad():
        graphed(ids)
        leaf._forward_hooks = OrderedDict()
        leaf.register_forward_hook(lambda *_: seen.append(1))
        graphed(ids)
    assert "inside the model has hooks" in graphed.why_eager and seen == [1]


def test_a_forward_of_the_models_own(graphs):  # noqa: F811
    model = make_model()
    graphed, ids = graphs(model), torch.randint(1, 40, (2, 8), device=DEVICE)
    with torch.no_grad():
        graphed(ids)
        model.forward = lambda *args, **kwargs: "mine"
        assert graphed(ids) == "mine" and "a forward of its own" in graphed.why_eager
