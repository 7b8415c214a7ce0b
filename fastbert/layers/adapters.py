"""Layers of PEFT and hooks of libraries that go by more than a token's own values: they cannot get packed tensors.

tests/ecosystem/test_peft_tuners.py has the list of PEFT's tuners that were looked through.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastbert.layers.leaves import home_of

# By where a layer's class is defined.
_LAYERS = {
    "peft.tuners.lily.": "PEFT's Lily chooses by the mean over all tokens of a batch, padding included",
    "peft.tuners.poly.": "PEFT's Poly chooses by the row of a padded batch (task_ids)",
}
# By where a hook is defined; the first that fits.
_HOOKS = {
    "peft.tuners.poly.": _LAYERS["peft.tuners.poly."],
    "peft.": "adapter_names and alora_offsets choose by the row of a padded batch",
    "transformers.integrations.neftune": "NEFTune draws noise for each column of a padded batch (neftune_noise_alpha)",
}


def layer_by_place(module: nn.Module) -> str | None:
    """What a layer goes by beside a token's own values: its row, its place or its neighbours in a batch."""
    home = type(module).__module__
    if not home.startswith("peft."):
        return None
    variants: dict[str, Any] = module.__dict__.get("lora_variant", {})
    if any(type(variant).__name__.startswith("Velora") for variant in variants.values()):
        return "PEFT's VeLoRA projects by the mean over all tokens of a batch, padding included"
    return next((reason for beginning, reason in _LAYERS.items() if home.startswith(beginning)), None)


def hook_by_place(hook: Any) -> str | None:
    """The same of a hook of a library's."""
    home = home_of(hook)
    return next((reason for beginning, reason in _HOOKS.items() if home.startswith(beginning)), None)
