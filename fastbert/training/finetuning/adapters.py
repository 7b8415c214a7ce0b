"""LoRA by PEFT in a model of ours: adapters beside frozen Linears, which a saved folder has merged into them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from fastbert.checkpoint.saving import beside
from fastbert.errors import ConfigError
from fastbert.files import move
from fastbert.training.options import FinetuneOptions

FOLDER = "adapter"  # of the saved folder: what PEFT's from_pretrained reads


def add_adapters(model: Any, options: FinetuneOptions) -> Any:
    """Put adapters into a model, in place, and freeze what is neither theirs nor new (Hu et al. 2021).

    Returns PEFT's LoraConfig, None without --lora-rank. Raises ConfigError.
    """
    if not options.lora_rank:
        if options.lora_targets:
            raise ConfigError("lora_targets was given without lora_rank: give lora_rank, the rank of adapters")
        return None
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"lora_rank needs PEFT ({error}): pip install peft") from None
    new = new_modules(model)
    config = peft.LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        target_modules=list(options.lora_targets) or None,  # None: those that PEFT knows for this family
        modules_to_save=new,
        base_model_name_or_path=options.model,
    )
    held = peft.LoraConfig(**{**config.to_dict(), "modules_to_save": None})  # PEFT would keep a second copy of them
    try:
        peft.inject_adapter_in_model(held, model)
    except ValueError as error:
        linears = {name.rsplit(".", 1)[-1] for name, leaf in model.named_modules() if isinstance(leaf, nn.Linear)}
        raise ConfigError(
            f"PEFT: {str(error).splitlines()[0]} --lora-targets may name: {', '.join(sorted(linears))}"
        ) from None
    config.target_modules = sorted(held.target_modules or ())  # a set's order is another in each process, and is saved
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or any(_is_in(name, module) for module in new))
    return config


def new_modules(model: Any) -> list[str]:
    """The modules whose weights the checkpoint did not bring, and the head: an adapter alone cannot teach them."""
    head = [
        name
        for name, child in model.named_children()
        if name != model.family.prefix and any(True for _ in child.parameters())
    ]
    return sorted({*head, *(key.rsplit(".", 1)[0] for key in model.missing_keys if key.split(".")[0] not in head)})


def merged(model: Any) -> Any:
    """A copy of the model as it was without adapters, with what they say added to the weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    whole = copy.deepcopy(model)
    for path, module in list(whole.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, leaf = path.rpartition(".")
            whole.get_submodule(parent)._modules[leaf] = module.get_base_layer()
    return whole.requires_grad_(True)


def save_adapters(model: Any, config: Any, folder: Path) -> None:
    """Write what `peft.PeftModel.from_pretrained(base, folder)` reads. Raises OSError."""
    from safetensors.torch import save_file

    weights = {
        f"base_model.model.{name.replace('.default.', '.')}": value.detach().cpu().contiguous()
        for name, value in model.state_dict().items()
        if "lora_" in name or any(_is_in(name, module) for module in config.modules_to_save)
    }
    folder.mkdir(exist_ok=True)
    with beside(folder) as new:
        save_file(weights, new / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(new)
        for path in list(new.iterdir()):
            move(path, folder / path.name)


def _is_in(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")
