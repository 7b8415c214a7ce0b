"""All layers as one op: when it may be used, and that nothing which changes in the tree goes unseen."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from seeds import manual_seed
from torch import nn

import fastbert
from fastbert import ops
from fastbert.backend import use_backend
from fastbert.native.availability import extension_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))

IDS = torch.tensor([[3, 9, 4, 1, 7], [5, 2, 8, 0, 0]])
MASK = (IDS > 0).long()


def make(**fields) -> fastbert.BertModel:
    manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    config = fastbert.EncoderConfig(vocab_size=50, initializer_range=0.2, **{**shape, **fields})
    model = fastbert.BertModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


@pytest.fixture
def calls(monkeypatch) -> list[bool]:
    """For each time that all layers were asked for as one op, with embeddings or without: was it served?"""
    made: list[bool] = []
    try_fused = ops.try_fused

    def counted(op, x, find_operands):
        found = try_fused(op, x, find_operands)
        made.extend([callable(found)] if op == "encoder_layers" or (op == "encoder" and callable(found)) else [])
        return found

    monkeypatch.setattr(ops, "try_fused", counted)
    return made


@torch.inference_mode()
def run(model: nn.Module) -> torch.Tensor:
    manual_seed(1)
    return model(IDS, MASK).last_hidden_state


def query(model: fastbert.BertModel) -> nn.Linear:
    return model.encoder.layer[1].attention.self.query


def double_by_hook(module, args, out):
    return out * 2


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def replace_parameter(model):
    query(model).weight = nn.Parameter(query(model).weight.detach() * 2)


def replace_data(model):
    query(model).weight.data = query(model).weight.data * 2


def change_in_place(model):
    with torch.no_grad():
        query(model).weight.mul_(2)


def replace_leaf(model):
    leaf = Doubled(32, 32)
    leaf.load_state_dict(query(model).state_dict())
    model.encoder.layer[1].attention.self.query = leaf


def change_class(model):
    query(model).__class__ = Doubled


def patch_forward(model):
    leaf = query(model)
    leaf.forward = lambda x: 2 * nn.functional.linear(x, leaf.weight, leaf.bias)


def parametrize(model):
    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2

    nn.utils.parametrize.register_parametrization(query(model), "weight", Double())


def swap_layers(model):
    layers = model.encoder.layer
    layers[0], layers[2] = layers[2], layers[0]


def drop_bias(model):
    query(model).bias = None


def change_eps(model):
    model.encoder.layer[2].output.LayerNorm.eps = 0.5


def initialise_again(model):
    model.encoder.layer[0].output.dense.__init__(64, 32)


def initialise_a_norm_again(model):
    model.encoder.layer[0].output.LayerNorm.__init__(32, eps=1e-12)


def other_parameters(model):
    query(model)._parameters = {name: nn.Parameter(p.detach() * 2) for name, p in query(model)._parameters.items()}


def other_hooks(model):
    query(model)._forward_hooks = OrderedDict()  # found in many an answer on how to remove all hooks
    query(model).register_forward_hook(double_by_hook)


def other_hooks_of_a_container(model):
    model.encoder.layer[1].attention._forward_pre_hooks = OrderedDict()
    model.encoder.layer[1].attention.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))


def other_children(model):
    layers = model.encoder.layer
    layers._modules = dict(zip("012", (layers[2], layers[1], layers[0]), strict=True))


def train_one_layer(model):
    model.encoder.layer[1].train()


CHANGES = {
    "hook on a leaf": lambda model: query(model).register_forward_hook(double_by_hook),
    "hook before a leaf": lambda model: query(model).register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "hook on a layer": lambda model: model.encoder.layer[1].register_forward_hook(double_by_hook),
    **{
        change.__name__: change
        for change in (
            replace_parameter,
            replace_data,
            change_in_place,
            replace_leaf,
            change_class,
            patch_forward,
            parametrize,
            swap_layers,
            drop_bias,
            change_eps,
            train_one_layer,
            initialise_again,
            initialise_a_norm_again,
            other_parameters,
            other_hooks,
            other_hooks_of_a_container,
            other_children,
        )
    },
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen(change, calls):
    """What the model gives after a change that comes between two calls is what a model that always was so gives."""
    model, fresh = make(), make()
    before = run(model)
    assert calls == [True]
    for each in (model, fresh):
        manual_seed(2)
        change(each)
    after, expected = run(model), run(fresh)
    assert torch.equal(after, expected) and not torch.equal(after, before)


def test_hooks_run_and_go(calls):
    model = make()
    before, seen = run(model), []
    handle = model.encoder.layer[0].output.dense.register_forward_hook(lambda *_: seen.append(1))
    assert_close_to_reference(run(model), run(make().double()), run(make()), name="hooked")
    assert seen == [1]
    handle.remove()
    assert torch.equal(run(model), before) and calls[0] and calls[-1]


SCALE_WRITES = {
    "fill_": lambda t: t.fill_(0.5),
    "data": lambda t: t.data.fill_(0.5),
    "numpy": lambda t: t.flatten().view(torch.uint8).numpy().fill(63),  # bytes of 0.75, or about
    "set_": lambda t: t.set_(torch.full_like(t, 0.5)),
}


@pytest.mark.parametrize("name", ("input_scale", "weight_scale", "bias"))
@pytest.mark.parametrize("write", SCALE_WRITES)
def test_what_belongs_to_int8_weights_is_read_at_each_call(calls, write, name):
    """By the fused layers, and by the leaf itself, however it was written."""
    model = fastbert.quantize(make(), "int8")
    x = torch.randn(3, query(model).in_features)
    before, alone = run(model), query(model)(x)
    SCALE_WRITES[write](getattr(query(model), name))
    after = run(model)
    assert not torch.equal(after, before) and not torch.equal(query(model)(x), alone) and calls == [True, True]
    loaded = fastbert.quantize(make(), "int8")
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(run(loaded), after)


@pytest.mark.parametrize("scale", (-1.0, float("nan"), float("inf")))
def test_an_int8_scale_that_cannot_be_is_refused(scale):
    model = fastbert.quantize(make(), "int8")
    query(model).input_scale.fill_(scale)
    with pytest.raises(RuntimeError, match=r"input_scale is -?(nan|inf|1); it must be 0 or positive"):
        run(model)


def test_a_copy_has_its_own(calls):
    model = make()
    before = run(model)
    twin = copy.deepcopy(model)
    change_in_place(twin)
    assert not torch.equal(run(twin), before) and torch.equal(run(model), before)


def test_a_dropped_model_is_freed():
    model = make()
    with torch.inference_mode():
        run(model)
    weight = weakref.ref(query(model).weight)
    del model
    gc.collect()
    assert weight() is None


def test_a_dropped_model_is_freed_though_its_forward_leads_back_to_it():
    def around(forward):
        return lambda *args, **options: forward(*args, **options)

    model = make()
    model.forward = around(model.forward)
    with torch.inference_mode():
        run(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_one_op_is_what_the_layers_are(calls):
    model = make()
    whole = run(model)
    with torch.inference_mode():
        states = model(IDS, MASK, output_hidden_states=True).hidden_states
    assert calls == [True] and torch.equal(states[-1][MASK.bool()], whole[MASK.bool()])


@pytest.mark.parametrize("head_dim", (1, 320))
def test_heads_that_the_kernels_do_not_have(head_dim):
    model = make(hidden_size=head_dim, num_attention_heads=1, num_hidden_layers=1)
    ours = run(model)
    with use_backend("torch"):
        assert_close_to_reference(ours, run(copy.deepcopy(model).double()), run(model))


def test_gradients_in_eval_with_the_backend_forced():
    """The op for inference is a fused one: where gradients are wanted, a forced backend runs its ops one by one."""

    def gradient(model: nn.Module) -> torch.Tensor:
        (model(IDS, MASK).last_hidden_state ** 3).sum().backward()
        return query(model).weight.grad

    with use_backend("cpu"):
        ours = gradient(make())
    with use_backend("torch"):
        oracle, baseline = gradient(make().double()), gradient(make())
    assert_close_to_reference(ours, oracle, baseline, GRADIENT_FACTOR)


def test_memory_between_calls():
    """What one call leaves in its buffers reaches no other: of other sizes, in between, from several threads."""
    from concurrent.futures import ThreadPoolExecutor

    model = make(hidden_size=128, intermediate_size=512)
    batches = [torch.randint(1, 50, (b, 20)) for b in (40, 3, 41, 12, 40)]
    with torch.inference_mode():
        alone = [copy.deepcopy(model)(ids).last_hidden_state for ids in batches]

        def run_all(_):
            with torch.inference_mode():
                return [model(ids).last_hidden_state for ids in batches]

        for found in (run_all(None), *ThreadPoolExecutor(3).map(run_all, range(3))):
            for mine, expected in zip(found, alone, strict=True):
                assert torch.equal(mine, expected)
