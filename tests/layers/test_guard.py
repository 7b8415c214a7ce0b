"""Whether a tree is still what was looked at: what fused layers, CUDA graphs and `accelerate` all ask."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from fastbert.layers.guard import ModuleGuard, TreeCache, forget_all
from fastbert.layers.leaves import ATTRIBUTES, HOOKS, is_plain
from fastbert.layers.quantized import QuantizedLinear
from fastbert.native.dict_entries import PYTHON, dict_entries


def make() -> nn.Module:
    root = nn.Module()
    root.norm, root.linear, root.dropout = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.1)
    root.table = nn.Embedding(4, 4)
    root.norm.variance_epsilon = root.norm.eps  # as transformers' RMSNorms call it
    root.int8 = QuantizedLinear.from_linear(nn.Linear(4, 4))
    root.scale = nn.Parameter(torch.ones(4))
    return root


def guard_over(root: nn.Module, **options) -> ModuleGuard:
    guard = ModuleGuard(root, **options)
    guard.watch(root, HOOKS)
    guard.watch_children(root)
    for child in root.children():
        guard.watch(child, HOOKS)
    return guard


def register(hooks: str):
    def change(root):
        setattr(root.linear, hooks, OrderedDict({0: print}))

    return change


CHANGES = {
    **{f"{name} of a module": register(name) for name in HOOKS},
    "forward": lambda root: setattr(root.linear, "forward", print),
    "class": lambda root: setattr(root.linear, "__class__", nn.Bilinear),
    "parameter": lambda root: setattr(root.linear, "weight", nn.Parameter(root.linear.weight.detach())),
    "no parameter": lambda root: setattr(root.linear, "bias", None),
    "buffer": lambda root: setattr(root.int8, "weight_scale", root.int8.weight_scale.clone()),
    "child": lambda root: setattr(root, "linear", nn.Linear(4, 4)),
    "no child": lambda root: delattr(root, "linear"),
    "one more child": lambda root: root.add_module("other", nn.Linear(4, 4)),
    "eps": lambda root: setattr(root.norm, "eps", 0.5),
    "variance_epsilon": lambda root: setattr(root.norm, "variance_epsilon", 0.5),
    "p": lambda root: setattr(root.dropout, "p", 0.5),
    "max_norm": lambda root: setattr(root.table, "max_norm", 0.5),
    "hooks of the root": lambda root: root.register_forward_hook(print),
    "forward of the root": lambda root: setattr(root, "forward", print),
    "class of the root": lambda root: setattr(root, "__class__", nn.Sequential),
    "parameter of the root": lambda root: setattr(root, "scale", nn.Parameter(torch.ones(4))),
    "the root's dict of parameters": lambda root: root.__dict__.update(_parameters=dict(root._parameters)),
}


def test_every_attribute_of_the_list_is_tried():
    assert set(ATTRIBUTES) <= set(CHANGES)


@pytest.mark.parametrize("native", (True, False), ids=("native", "python"))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change, native, monkeypatch):
    if not native:  # as where there is no extension
        monkeypatch.setattr("fastbert.layers.guard.dict_entries", lambda: PYTHON)
    root = make()
    guard = guard_over(root)
    assert guard.is_current() and guard.is_same()
    change(root)
    assert not guard.is_current()


@pytest.mark.parametrize("name", (*HOOKS, "forward", "class"))
def test_what_makes_a_leaf_no_plain_one_is_watched(name):
    root = make()
    CHANGES[name if name in CHANGES else f"{name} of a module"](root)
    assert not is_plain(root.linear, nn.Linear)


def test_hooks_are_not_the_tree():
    root = make()
    guard = guard_over(root)
    handle = root.linear.register_forward_hook(lambda *_: None)
    assert guard.is_same() and not guard.is_current()
    handle.remove()
    assert guard.is_current()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert guard.is_same() and not guard.is_current()
    handle.remove()
    assert guard.is_current()


def test_hooks_that_were_there_are_held():
    root = make()
    handle = root.linear.register_forward_hook(lambda *_: None)
    guard = guard_over(root)
    assert guard.is_current()
    handle.remove()
    assert not guard.is_current()


def test_values_in_place_and_their_memory_are_not_the_tree():
    root = make()
    guard = guard_over(root)
    with torch.no_grad():
        root.linear.weight.mul_(2)
    root.linear.weight.data = root.linear.weight.data.clone()
    assert guard.is_current()


def test_a_dict_is_cache_by_what_it_held():
    root = make()
    guard = ModuleGuard(root)
    handle = root.linear.register_forward_hook(lambda *_: None)
    guard.hold(root.linear.__dict__, "_forward_hooks")
    assert guard.is_same()
    handle.remove()
    assert not guard.is_same()


def test_answers_go_with_the_tree_and_with_the_root():
    root, cache = make(), TreeCache("_answer")
    cache.put(root, "question", guard_over(root), "answer")
    assert cache.get(root, "question") == "answer" and cache.get(make(), "question") is None
    assert cache.get(root, "another") is None and cache.get(root, "question") is None  # it was let go
    cache.put(root, "question", guard_over(root), "answer")
    for duplicate in (copy.copy, copy.deepcopy):  # whose tensors, or dicts, are others
        assert cache.get(duplicate(root), "question") is None
    assert cache.get(root, "question") == "answer"
    weight = weakref.ref(root.linear.weight)
    del root
    assert weight() is None  # at once: nothing goes in a circle
    root = make()
    cache.put(root, "question", guard_over(root), "answer")
    forget_all(root)
    assert cache.get(root, "question") is None


def lead_back(where: str, root: nn.Module) -> None:
    if where == "a forward":
        forward = root.forward
        root.forward = lambda *args: forward(*args)
    elif where == "a hook for loading":
        root.register_load_state_dict_post_hook(lambda *_: root)
    elif where == "a weight":
        root.linear.weight.register_hook(lambda _: root)
    else:
        root.linear.register_full_backward_hook(lambda *_: root)


@pytest.mark.parametrize("where", ("a forward", "a hook for loading", "a weight", "a hook below"))
def test_a_root_is_freed_whatever_leads_back_to_it(where):
    root, cache = make(), TreeCache("_answer")
    lead_back(where, root)
    cache.put(root, "question", guard_over(root), root.linear.weight)
    gone = weakref.ref(root)
    del root
    gc.collect()
    assert gone() is None


ENTRIES = [{"a": 1.0, "b": None, "hooks": {}}, OrderedDict(a=1.0), {"a": float("nan")}, {}]


@pytest.mark.parametrize("entries", (PYTHON, dict_entries()), ids=("python", "native"))
def test_entries_of_dicts(entries):
    """What both say of many entries at once, by hand."""
    nan = ENTRIES[2]["a"]
    keys = ["a", "a", "a", "a"]
    assert entries.are_same(ENTRIES, keys, [ENTRIES[0]["a"], ENTRIES[1]["a"], nan, None])
    assert not entries.are_same(ENTRIES, keys, [ENTRIES[0]["a"], ENTRIES[1]["a"], float("nan"), None])
    assert entries.are_equal(ENTRIES, keys, [1, 1.0, nan, None])  # the same NaN is equal to itself, as in a list
    assert not entries.are_equal(ENTRIES, keys, [1, 1.0, nan, 0])
    assert entries.are_false([*ENTRIES, ENTRIES[0]], ["b", "c", "c", "c", "hooks"])
    assert not entries.are_false([ENTRIES[3], {"hooks": OrderedDict({0: print})}], ["hooks", "hooks"])
    assert entries.have_types([1, "a"], [int, str]) and not entries.have_types([1, True], [int, int])


def test_what_cannot_be_looked_at_is_refused():
    native = dict_entries()
    if native.are_same is PYTHON.are_same:
        pytest.skip("the extension is not there")
    with pytest.raises(ValueError, match="not a key for each dict"):
        native.are_false([{}], [])
    with pytest.raises(TypeError, match="an entry is of no dict"):
        native.are_equal([1], ["a"], [None])
