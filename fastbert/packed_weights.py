"""fastbert.repack(model), to be called after a write to weights that PyTorch does not record."""

from __future__ import annotations

from torch import nn

from fastbert import ops
from fastbert.layers.fingerprint import forget_all
from fastbert.models.base import HasModel


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
    for each in module.modules():
        forget_all(each)
    ops.repack((*module.parameters(), *module.buffers()))
