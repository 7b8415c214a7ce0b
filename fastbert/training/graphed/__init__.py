"""fastbert.graphed_step: training whose steps a GPU repeats by itself, without Python between its kernels."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastbert.training.graphed.step import GraphedStep, Loss

__all__ = ["GraphedStep", "graphed_step"]


def graphed_step(
    model: nn.Module, optimizer: Any, loss: Loss, *, max_norm: float = 0.0, bf16: bool = True
) -> GraphedStep:
    """A training step as CUDA graphs: `step(batch)` is forward, backward and the optimizer, in a few launches.

    Steps on few tokens wait for Python, which launches kernels one by one. A graph launches them at once. Batches are
    rounded up to buckets; a bucket's graph is captured when its first batch comes. The gradients, the optimizer's state
    and the losses lie in buffers that stay where they are; the optimizer's `state_dict()` and `load_state_dict` are
    what they always are, and a schedule sets the rates of its groups before each step.

        step = fastbert.graphed_step(model, optimizer, lambda model, batch: model(**batch).loss, max_norm=1.0)
        for batch in loader:  # PackedInputs, of a PackingCollator(padded_outputs=False) or pack_inputs
            step(batch)
        print(step.losses())

    A step runs op by op, with one warning that names the reason, where something cannot be captured: a model on a CPU,
    hooks, another optimizer than AdamW, weights that are not float32, several processes, a batch that no bucket holds.
    If a weight, a group, an option or a mode has changed, graphs are captured anew.

    Args:
        model: in training mode, its weights float32, on the GPU.
        optimizer: torch.optim.AdamW over the model's weights. These have no gradients (`grad` is None) behind a step.
        loss: `loss(model, batch, *totals)` gives the loss () of a batch on the device, whose last tokens and sequences
            may be padding: fastbert's heads leave them out. It must launch the same for every batch of a bucket: what
            differs is in the batch, and in `totals`, tensors () of the numbers that `step(batch, totals)` gets.
        max_norm: gradients that are together longer are shortened (Pascanu et al. 2013, section 3.2); 0: not.
        bf16: products in bfloat16, by autocast; the weights stay float32.

    Returns:
        A callable, `step(batches, totals=(), *, seed=None)`: gradients of several batches are added up. `losses()`
        gives the losses of the last steps; `why_eager` says why the last step ran op by op.
    """
    return GraphedStep(model, optimizer, loss, max_norm=max_norm, bf16=bf16)
