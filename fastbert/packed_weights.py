"""fastbert.repack(model): for writes to weights that PyTorch keeps no record of."""

from __future__ import annotations

from torch import nn

from fastbert import ops
from fastbert.models.base import HasModel


def repack(model: nn.Module | HasModel) -> None:
    """Forget the packed copies of a model's weights: the next call packs what the weights hold by then.

    On CPUs the kernels multiply by packed copies of the weights, made at the first call. A copy is made anew by itself
    when its weight changes in a way that PyTorch records: an optimizer's step, load_state_dict, operations in place on
    the parameter, a new parameter, another dtype. A write around that record is found late, within
    `fastbert._C.packed_check_calls` calls: through `.data`, `.detach().numpy()`, DLPack or a storage, by `apply_` and
    `map_`, by torch.distributed's broadcast, all_reduce, reduce, scatter and recv, to the flat vector that parameters
    became views of, to any other tensor with the parameter's memory (`x` after `p.data = x`), or by another process.
    Call this function after such a write and before the next forward pass. It also gives back the memory of the copies:
    call it after a weight's storage was resized to nothing (offloading).

    Args:
        model: any module whose parameters and buffers are meant, wherever their copies came from; or a SentenceEncoder.

    Raises TypeError where `model` is neither. Nothing happens to weights that have no packed copy.
    """
    module = model.model if isinstance(model, HasModel) else model
    if not isinstance(module, nn.Module):
        raise TypeError(f"repack takes a module or a SentenceEncoder, not {type(model).__name__}")
    ops.repack((*module.parameters(), *module.buffers()))
