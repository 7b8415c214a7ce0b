"""What fastbert.status says of a model in other libraries' wrappers: what its calls really did."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from family_configs import config_for
from full import halved, left_to_full, thinned
from hf import make_hf, make_ours
from test_accelerate import IDS, MASK
from torch import nn

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

HEAD = "SequenceClassification"


@pytest.fixture(autouse=True)
def new_state_of_accelerate() -> Iterator[None]:
    """A process has one number format in Accelerate, whichever test asked for it first."""
    state = pytest.importorskip("accelerate").state.AcceleratorState
    state._reset_state(True)
    yield
    state._reset_state(True)


class Mine(nn.Module):
    """A user's own."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


def prepared(model: nn.Module) -> nn.Module:
    """By Accelerate, whose mixed precision puts functions of its own in the place of `forward`."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


def unwrapped(model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.utils.extract_model_from_parallel(prepared(model), keep_fp32_wrapper=False)


def hooked(model: nn.Module) -> nn.Module:
    """As device_map does it."""
    hooks = pytest.importorskip("accelerate.hooks")
    return hooks.add_hook_to_module(model, hooks.ModelHook())


def lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in base_of(model).encoder.layer:
        fully_shard(layer)
    return fully_shard(model)


def lightning_module(model: nn.Module) -> nn.Module:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args, **kwargs):
            return self.model(*args, **kwargs)

    return Module()


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def patched(model: nn.Module) -> nn.Module:
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return model


def by_functional_call(model: nn.Module) -> Callable:
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return lambda *args, **kwargs: torch.func.functional_call(model, weights, args, kwargs)


WRAPPERS: dict[str, Callable] = {
    "none": lambda model: model,
    "own module": Mine,
    "own forward": patched,
    "DataParallel": nn.DataParallel,  # with several GPUs it is not supported
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "fully_shard": fully_sharded,
    "Accelerate, bf16": prepared,
    "Accelerate, bf16, unwrapped": unwrapped,
    "Accelerate, twice": lambda model: prepared(prepared(model)),
    "Accelerate's hooks": hooked,
    "PEFT": lora,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "Lightning": lightning_module,
    "compile in place": compiled_in_place,
    "functional_call": by_functional_call,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "copied in Accelerate": lambda model: copy.deepcopy(prepared(model)),
}
IN_GROUPS = ("DistributedDataParallel", "fully_shard")
IN_GRAPHS = ("torch.compile", "compile in place")
# What of a wrapper goes by the kind of the model shows in others of them.
LIKE_OTHERS = ("own module", "DataParallel", "Accelerate, twice", "Accelerate's hooks", "PEFT", "copied in Accelerate")


def small(head: str) -> nn.Module:
    """Of one layer: what is compiled or recorded here takes a time by layers, and calls are of whole models."""
    return make_hf(config_for("bert", head, 3, num_hidden_layers=1), head).eval()


def base_of(model: nn.Module) -> nn.Module:
    return model if type(model).__name__.endswith("BertModel") else model.bert


def make(kind: str, head: str) -> nn.Module:
    theirs = small(head)
    if kind == "own":
        return make_ours(config_for("bert", head, 3, num_hidden_layers=1), head, theirs).eval()
    return fastbert.accelerate(theirs)


def status_of(root: nn.Module) -> fastbert.acceleration.status.BaseModelStatus:
    (found,) = fastbert.status(root).models
    return found


def is_slow(p: dict) -> bool:
    """To compile, or to import."""
    return p["name"] in (*IN_GRAPHS, "Lightning")


@halved
@left_to_full(lambda p: is_slow(p) or (p["kind"] == "own" and p["name"] in LIKE_OTHERS))
@pytest.mark.parametrize("head", ("Model", HEAD))
@pytest.mark.parametrize("kind", ("accelerated", "own"))
@pytest.mark.parametrize("name", WRAPPERS)
def test_calls_are_counted(name, kind, head, request, packed_layers):
    if name in IN_GROUPS:
        request.getfixturevalue("one_rank")
    model = make(kind, head)
    wrapped = WRAPPERS[name](model)
    root = wrapped if isinstance(wrapped, nn.Module) else model
    found = status_of(root)
    assert (found.kind, found.packed, found.others) == (kind, 0, 0) and "not called yet" in str(found)
    for _ in range(2):
        wrapped(IDS, attention_mask=MASK)
    found = status_of(root)
    if name in IN_GRAPHS and kind == "own":  # a graph cannot count
        assert (found.packed, found.in_graphs) == (0, True) and "in a graph of torch.compile ran packed" in str(found)
        return
    assert (found.kind, found.packed, found.others) == (kind, 2, 0) and "2 of 2 calls ran packed" in str(found)
    assert len(packed_layers) >= 2 or kind == "own" or name in IN_GRAPHS
    if kind == "accelerated" and not isinstance(root, nn.parallel.DistributedDataParallel):
        with pytest.warns(UserWarning, match="padding on the left"):
            wrapped(IDS, attention_mask=MASK.flip(1))
        found = status_of(root)
        assert (found.packed, found.others) == (2, 1) and found.why_not.startswith("padding on the left")


# Accelerate unwraps a forward of transformers down to a function below that class's own.
ACCELERATE = {"Accelerate, bf16", "Accelerate, bf16, unwrapped", "Accelerate, twice", "copied in Accelerate"}
REPLACED = {"own forward", "Accelerate's hooks", *ACCELERATE}


@thinned(3)  # each wrapper has one of the heads
@left_to_full(is_slow)
@pytest.mark.parametrize("head", ("Model", HEAD, "TokenClassification"))
@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "functional_call"])
def test_accelerated_inside_of_a_wrapper(name, head, request, packed_layers):
    """It works, or one error says why not: where the forward that is to be replaced has been replaced already."""
    if name in IN_GROUPS:
        request.getfixturevalue("one_rank")
    plain = small(head)
    expected, near = copy.deepcopy(plain).double()(IDS, attention_mask=MASK)[0], plain(IDS, attention_mask=MASK)[0]
    wrapped = WRAPPERS[name](plain)
    if name in REPLACED and head != HEAD:  # whose own forward nothing has to stand in for
        with pytest.raises(ValueError, match=r"forward (of its BertForTokenClassification )?has been replaced already"):
            fastbert.accelerate(wrapped)
        assert status_of(wrapped).kind == "left alone"
        return
    if name in IN_GRAPHS:
        wrapped(IDS, attention_mask=MASK)  # which has been compiled already
    assert fastbert.accelerate(wrapped) is wrapped
    actual = wrapped(IDS, attention_mask=MASK)[0]
    assert status_of(wrapped).packed == 1 and packed_layers
    if name not in ACCELERATE:  # in float32
        real = MASK.bool() if actual.shape[:2] == MASK.shape else ...
        assert_close_to_reference(actual[real], expected[real], near[real], GRADIENT_FACTOR)


def test_a_prepared_copy_runs_on_its_own_weights(packed_layers):
    """As averages of weights are kept; under Accelerate the forward is a function around the one that was there."""
    for head in ("Model", "TokenClassification"):
        model = prepared(make("accelerated", head))
        before = model(IDS)[0]
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(0.5)
        assert torch.equal(model(IDS)[0], before) and not torch.equal(other(IDS)[0], before)
        assert (status_of(model).packed, status_of(other).packed) == (2, 1)


def test_restore_says_what_is_around():
    model = prepared(make("accelerated", "Model"))
    assert "its forward has been replaced since" in str(status_of(model))
    for undo in (fastbert.restore, lambda model: fastbert.accelerate(model, spans_over_real_tokens=True)):
        with pytest.raises(ValueError, match=r"BertModel has been wrapped since by accelerate|is for .* answering"):
            undo(model)
    assert fastbert.accelerate(model) is model and status_of(model).wrapped
    accelerate = pytest.importorskip("accelerate")
    inner = accelerate.utils.extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert not status_of(inner).wrapped and status_of(fastbert.restore(inner)).kind == "left alone"
    assert "forward" not in inner.__dict__


def test_spans_need_the_heads_forward():
    """Else padding would be left out by the base model, and read by the head."""
    model = prepared(small("QuestionAnswering"))
    with pytest.raises(ValueError, match="the forward of its BertForQuestionAnswering has been replaced already"):
        fastbert.accelerate(model, spans_over_real_tokens=True)


@left_to_full(lambda p: p["head"] == "Model")  # which is in the other
@pytest.mark.parametrize("head", ("Model", HEAD))
def test_recorded_calls_of_own_classes(head):
    model = make("own", head)
    model(IDS)
    with pytest.warns(UserWarning, match="record transformers' own code"):
        torch.export.export(model, (IDS,))
    found = status_of(model)
    assert (found.packed, found.others) == (1, 1) and "torch.export and ONNX record transformers" in found.why_not
    packed = (IDS.flatten(), torch.tensor([0, 4, 8], dtype=torch.int32), 4)
    base_of(model).encode_packed(*packed)
    assert fastbert.status(model).packed == 2


def test_a_pickle_of_a_model_from_before_calls_were_counted():
    config = config_for("bert", "Model")
    model = make_ours(config, "Model", make_hf(config, "Model")).eval()
    expected = model(IDS, MASK).last_hidden_state
    del model.calls
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(IDS, MASK).last_hidden_state, expected) and again.calls.packed == 1
