"""torch.jit.trace, torch.export and ONNX of a padded batch: transformers' own code is recorded, over our weights.

Packing depends on the mask's values, which no recorded graph may hold. transformers' padded code computes the same for
every mask, so that is what a graph gets: exact at every real token, and at padding what transformers has there.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from fastbert.layers.leaves import get_leaf, in_use
from fastbert.packed_inputs import ModelInputs

_LEAVES = (nn.Linear, nn.Embedding, nn.LayerNorm)
_SAID = (
    "fastbert: torch.jit.trace, torch.export and ONNX record transformers' own code for padded batches, which is exact"
    " and slower; encode_packed records fastbert's"
)


def records_hf() -> bool:
    """Whether a graph is being recorded that gets transformers' code for padded batches."""
    # torch 2.11 says of torch.compile, too, that it exports.
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return (torch.jit.is_tracing() or exporting) and _has_transformers()


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def record(model: Any, inputs: ModelInputs, others: dict[str, Any]) -> dict[str, Any]:
    """The fields that transformers' model over the weights of `model` gives for these inputs and other arguments."""
    warnings.warn(_SAID, stacklevel=4)
    model.base_model.calls.left("torch.jit.trace, torch.export and ONNX record transformers' own code")
    theirs = hf_model_of(model)
    padded = inputs._replace(max_seqlen=None)._asdict()  # it is of packed inputs, which are not recorded so
    arguments = {name: value for name, value in (padded | others).items() if value is not None}
    output = theirs(**arguments, return_dict=True)
    return {name: output[name] for name in output}


def _new(name: str, model: Any) -> nn.Module:
    """With random weights, on the device of `model`."""
    import transformers

    config, hf_class, options = model.live_config, getattr(transformers, name), {}
    if model is model.base_model and "add_pooling_layer" in inspect.signature(hf_class.__init__).parameters:
        options["add_pooling_layer"] = model.has_pooler
    with torch.random.fork_rng(devices=[]):
        theirs_config = transformers.CONFIG_MAPPING[config.model_type].from_dict(config.to_dict())
        return hf_class(theirs_config, **options).to(model.device)


def hf_model_of(model: Any) -> nn.Module:
    """transformers' model of the same config around the leaves of ours, with their tensors, hooks and adapters."""
    name = next(cls.__name__ for cls in type(model).__mro__ if cls.__module__ == "fastbert.models.classes")
    # What records tensors does so in its own thread only: these are to be made, and not recorded.
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(_new, name, model).result().train(model.training)
    for path, module in list(theirs.named_modules()):
        if not module._parameters:
            continue
        try:
            ours = get_leaf(model, path)
        except KeyError:
            continue
        if type(module) in _LEAVES:
            theirs.set_submodule(path, ours)
        else:  # a class of theirs, or a container with a tensor of its own
            module.__dict__["_parameters"] = in_use(ours)._parameters
    own = {id(p) for p in model.parameters()}
    if foreign := [name for name, p in theirs.named_parameters() if id(p) not in own]:
        raise TypeError(f"cannot be recorded: transformers' {name} has {foreign[0]}, and this model has not")
    return theirs
