"""fastbert.repack(model), to be called after a write to weights that PyTorch does not record; and what serve and the
command line do with a model that they alone hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.layers.guard import forget_all
from fastbert.layers.leaves import get_leaf
from fastbert.layers.operands import layer_operands
from fastbert.models.base import HasModel
from fastbert.models.tree import base_models
from fastbert.native.memory import give_back


def repack(model: nn.Module | HasModel) -> None:
    """Forget the packed copies of a model's weights. The next call packs the weights as they are then.

    On CPUs the kernels multiply by packed copies of the weights, which are kept from the second call on. If one changes
    in a way that PyTorch records (an optimizer's step, load_state_dict, an operation in place on the parameter, a new
    parameter, another dtype), its copy is made again without this function. PyTorch does not record a write

    - through `.data`, `.detach().numpy()`, DLPack or a storage, or by `apply_` and `map_`;
    - by broadcast, all_reduce, reduce, scatter and recv of torch.distributed;
    - to a flat vector that the parameters are views of, or to another tensor with the parameter's memory (`x` after
      `p.data = x`);
    - by another process.

    An ordinary call, with gradients or under torch.no_grad, reads all of every weight and sees such a write. A call in
    torch.inference_mode does not: it finds the write only within `fastbert._C.packed_check_calls` calls. Where such
    calls come next, call this function first. It also frees the memory of the copies: call it after a weight's storage
    was resized to nothing (offloading). Weights without a packed copy are not changed.

    Args:
        model: any module, or a SentenceEncoder. All of its parameters and buffers are meant.

    Raises:
        TypeError: `model` is neither.
    """
    module = model.model if isinstance(model, HasModel) else model
    if not isinstance(module, nn.Module):
        raise TypeError(f"repack takes a module or a SentenceEncoder, not {type(model).__name__}")
    _forget(module)
    ops.repack((*module.parameters(), *module.buffers()))


def _forget(module: nn.Module) -> None:
    for each in module.modules():
        forget_all(each)


def keep_packed_only(model: nn.Module | HasModel) -> None:
    """Free the weights of a model's layers, of which the CPU's kernels read packed copies: half of what they take.

    For a model that is only run, in eval mode, and that its caller alone holds: `fastbert serve` and the commands that
    run a model. It is one way. What is left in a weight's place has its sizes and its dtype. To read, convert, copy,
    save, quantise or train it is a RuntimeError, which says to load the model anew.

    Only what runs by packed copies alone is freed: the Linears of layers that the CPU's kernels take as one op, on this
    machine and with the backend of this call. Where products are torch's, these are none. All else stays: embeddings
    and what is tied to them, heads, poolers, biases and norms; a weight that another leaf has, too; layers of other
    kinds, and every model on a GPU. Behind this the layers run by the CPU's backend, without autocast, and without
    hooks on their Linears, which read the weight.
    """
    module = model.model if isinstance(model, HasModel) else model
    freed = list(_only_multiplied(module))
    if not freed:
        return
    from fastbert.ops.linear.packed_only import pack_only

    _forget(module)  # of what was kept of the layers, the weights are a part
    while freed:
        leaf, parts = freed.pop()
        held: dict = leaf._buffers if "weight" in leaf._buffers else leaf._parameters
        held["weight"] = pack_only(held["weight"], parts)  # one after the other: the old one is gone now
    give_back()


def _only_multiplied(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The Linears of which the kernels read nothing but a packed copy, and in how many parts each."""
    if not ops.are_weights_packed():
        return
    held = [t for each in module.modules() for t in (*each._parameters.values(), *each._buffers.values())]
    if any(type(t) not in (torch.Tensor, nn.Parameter) for t in held if t is not None):
        return  # a distributed tensor, or what this function has left
    holders = Counter(t.untyped_storage().data_ptr() for t in held if t is not None)
    for _, root, config in base_models(module):
        if not _are_one_op(root, config):
            continue
        for path, spec in dict(zip(config.layer_paths, config.layer_specs, strict=True)).items():
            for name in spec.names.linears:
                leaf = get_leaf(root, f"{path}.{name}")
                weight = leaf.weight
                assert isinstance(weight, torch.Tensor)
                if holders[weight.untyped_storage().data_ptr()] == 1 and weight.is_contiguous() and weight.numel():
                    yield leaf, 2 if spec.merges_gate and name in spec.names.ups else 1


def _are_one_op(root: nn.Module, config: Any) -> bool:
    """Whether the kernels take the layers of a base model, whose config is an EncoderConfig, as one op."""
    layers = layer_operands(root, config.layer_paths, config.layer_specs, None, None, trains=False)
    word = get_leaf(root, config.embeddings.word).weight
    assert isinstance(word, torch.Tensor)
    x = word.new_empty(0, config.hidden_size)
    with torch.inference_mode():
        return not isinstance(ops.try_fused("encoder_layers", x, lambda: layers), str)
