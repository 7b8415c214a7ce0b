"""A family's module tree, ours or Hugging Face's: which layers, containers and base models are in it now."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fastbert.config import EncoderConfig
from fastbert.execution.calls import Calls
from fastbert.families.schema import Family
from fastbert.layers.leaves import get_leaf, in_use


def first_parameter(module: nn.Module) -> nn.Parameter:
    """next(module.parameters()), whose generators in generators take a short text longer than its embeddings."""
    pending = [module]
    while pending:
        at = pending.pop()
        for parameter in at._parameters.values():
            if parameter is not None:
                return parameter
        pending += reversed([child for child in at._modules.values() if child is not None])
    raise StopIteration


def layers_of(root: nn.Module, config: EncoderConfig) -> int | None:
    """How many layers are in `root`, ours or Hugging Face's, now: that many run, as in transformers, whatever the
    config says. None where the config counts: ALBERT's layers share weights, a model made without any has no list.
    """
    if config.num_hidden_groups or not config.num_hidden_layers:
        return None
    return len(get_leaf(root, config.layer_paths[0].rpartition(".")[0])._modules)


def groups_unsupported(root: nn.Module, config: EncoderConfig) -> str | None:
    """Why ALBERT's groups in `root` are not those of `config`, which says how often each of them runs."""
    if not config.num_hidden_groups:
        return None
    for path in dict.fromkeys(path.rpartition(".")[0] for path in config.layer_paths):
        parent, group, _ = path.rsplit(".", 2)
        count = len(get_leaf(root, path)._modules) if group in get_leaf(root, parent)._modules else 0
        if count != config.inner_group_num:
            return f"{path} holds {count} layers; its config says {config.inner_group_num}"
    return None


def linear_paths(config: EncoderConfig) -> list[str]:
    """The paths of the Linear leaves of all layers, below the base model; those of shared layers once."""
    specs = dict(zip(config.layer_paths, config.layer_specs, strict=True))
    return [f"{layer}.{path}" for layer, spec in specs.items() for path in spec.names.linears]


class RunsBaseModel:
    """What runs a family's base model on fastbert's layers: our own base model itself, or the forward that takes the
    place of another library's, on the instance (fastbert.accelerate).
    """

    calls: Calls

    def config_now(self) -> EncoderConfig:
        """As `PreTrainedModel.running_config`: with the layers that are there now."""
        raise NotImplementedError


def base_models(tree: nn.Module) -> Iterator[tuple[str, nn.Module, EncoderConfig]]:
    """(name, base model, its config) of every base model in a tree that runs on fastbert's layers."""
    for name, module in tree.named_modules():
        if (runner := runner_of(module)) is not None:
            yield name, module, runner.config_now()


PLACED = "_fastbert"  # the attribute under which a module keeps what accelerate has put in the place of its forward


def runner_of(module: nn.Module) -> RunsBaseModel | None:
    """What runs this very module on fastbert's layers. It is not looked for under `forward`: Accelerate's mixed
    precision, for one, wraps that in a function of its own.
    """
    runner = module if isinstance(module, RunsBaseModel) else module.__dict__.get(PLACED)
    return runner if isinstance(runner, RunsBaseModel) else None


def key_of_spec(i: int) -> str:
    """What the keys of `modules_of` begin with in layers of the i-th of the different specs."""
    return f"*{i}"


def modules_of(root: nn.Module, family: Family, config: EncoderConfig) -> Iterator:
    """(key, path, module, the module by whose `training` packed execution goes) of all modules below `root`.

    `key` is None for a leaf, which packed execution calls. The others (containers, dropouts, activations) it does not
    call; all layers of one spec have one key, "*" and its number, since they are alike. Where PEFT's modules_to_save
    stands in a module's place, that is yielded, and what is below the copy in use.
    """
    names = config.embeddings
    specs = dict(zip(config.layer_paths, config.layer_specs, strict=True))
    numbers = {spec: key_of_spec(i) for i, spec in enumerate(dict.fromkeys(config.layer_specs))}
    layers = {path: numbers[spec] for path, spec in specs.items()}
    leaves = {getattr(names, role) for role in names.order} | {family.final_norm, family.pooler}
    leaves |= {
        path.rpartition(".")[0] or path for path in family.unused_linears(config)
    }  # what is around them runs as little
    for spec, number in numbers.items():
        paths = [*spec.names.linears, *spec.names.relatives]
        leaves.update(spec.shared_leaves)
        paths += filter(None, spec.norm_paths)
        leaves |= {f"{number}.{path}" for path in paths}
    pending = [("", "", root, root)]
    for at, key_at, parent, owner in pending:  # which grows meanwhile
        for name, child in parent._modules.items():
            if child is None:
                continue
            used = in_use(child)
            key, goes_by = (layers[at + name], used) if at + name in layers else (key_at + name, owner)
            yield None if key in leaves else key, at + name, child, goes_by
            if used._modules and key not in leaves:
                pending.append((f"{at}{name}.", f"{key}.", used, goes_by))
