"""Training steps that no graph could repeat, a fault each: what tests of captured steps have to see."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastbert.packed_inputs import PackedInputs
from fastbert.training.graphed import GraphedStep


def _with_labelled(inputs: PackedInputs, labelled: torch.Tensor) -> PackedInputs:
    """The same batch, whose tokens with a label are these."""
    return PackedInputs({**inputs, "batch": replace(inputs["batch"], labelled=labelled)})


class _KnowsCount(GraphedStep):
    """`count`: of this step's labels, a number of Python's."""

    def __call__(self, batches, totals=(), **options):
        self.count = totals[0]
        super().__call__(batches, totals, **options)


class CountOfTheHost(_KnowsCount):
    def __init__(self, model, optimizer, loss, **options):
        super().__init__(model, optimizer, lambda model, batch, _: loss(model, batch, self.count), **options)


class SizedByLabels(_KnowsCount):
    """As many rows as there are labels, which the host knows."""

    def _accumulate(self, inputs):
        batch = inputs["batch"]
        super()._accumulate(_with_labelled(inputs, batch.labelled[: int(self.count)]))


class _OtherOptimizer(GraphedStep):
    """`prepare_step` is captured with the optimizer's step, before it."""

    def _capture_optimizer(self, flat):
        step = flat.step

        def prepared_step(max_norm):
            self.prepare_step(flat)
            step(max_norm)

        flat.step = prepared_step
        return super()._capture_optimizer(flat)


class RateOfTheHost(_OtherOptimizer):
    def prepare_step(self, flat):
        for i, group in enumerate(self.optimizer.param_groups):
            flat.numbers[2 + i].fill_(group["lr"])


class NumbersMadeInTheStep(_OtherOptimizer):
    """The rates are a tensor, and the captured step makes it."""

    def prepare_step(self, flat):
        rates = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        flat.numbers[2 : 2 + len(rates)].copy_(rates)


class StateMadeLate(_OtherOptimizer):
    is_made = False

    def prepare_step(self, flat):
        if not self.is_made:
            flat.state.means, self.is_made = torch.zeros_like(flat.state.means), True
            for p, mean in zip(flat.weights, flat.state.views(flat.state.means), strict=True):
                self.optimizer.state[p]["exp_avg"] = mean


class GradientsDropped(GraphedStep):
    """Gradients of the step before are dropped, and new ones made, which the optimizer does not know."""

    def _accumulate(self, inputs):
        self._flat.gradients = [torch.zeros_like(gradient) for gradient in self._flat.gradients]
        super()._accumulate(inputs)


class DrawsForItself(GraphedStep):
    def _accumulate(self, inputs):
        taken, self._seeds.device = self._seeds.device, torch.device("meta")
        super()._accumulate(inputs)
        self._seeds.device = taken


class LoggedOutput(GraphedStep):
    """What is logged is the tensor that a step has made, which the next replay writes."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.logged = []

    def _accumulate(self, inputs):
        super()._accumulate(inputs)
        self.made = self.losses_kept.sum * 1.0

    def __call__(self, *arguments, **options):
        super().__call__(*arguments, **options)
        self.logged.append(self.made)

    def losses(self):
        return torch.stack(self.logged).tolist()


class BatchReplaced(GraphedStep):
    """A step reads the memory that its batch came in, and not its bucket's."""

    def _staged(self, packed):
        self.staged = super()._staged(packed)
        return self.staged

    def _accumulate(self, inputs):
        super()._accumulate(self.staged.layout.read(self.staged.block, self.staged.bounds))


class WeightMoved(GraphedStep):
    """It is not looked at where the weights are, and one is elsewhere from the third step on."""

    def __call__(self, *arguments, **options):
        if self._flat is not None and self._flat.step_number == 2:
            weight = next(self.model.parameters())
            weight.data = weight.data.clone()
        super().__call__(*arguments, **options)

    def _is_same(self):
        return self._flat is not None


class NothingZeroed(GraphedStep):
    def _run_optimizer(self, flat):
        gradients = flat.state.gradients.clone()
        super()._run_optimizer(flat)
        flat.state.gradients.copy_(gradients)


class SameSeeds(GraphedStep):
    """Seeds that are drawn once a run, and not once a step."""

    def _run_part(self, batch, seed):
        super()._run_part(batch, 0)


class LossAskedFor(GraphedStep):
    def _accumulate(self, inputs):
        super()._accumulate(inputs)
        self.last = self.losses_kept.sum.item()


class LabelsLookedFor(GraphedStep):
    def _accumulate(self, inputs):
        super()._accumulate(_with_labelled(inputs, (inputs["labels"] != -100).nonzero().flatten()))


class LossesReadInEachStep(GraphedStep):
    def __call__(self, *arguments, **options):
        super().__call__(*arguments, **options)
        self.read = self.losses()


class LossesKeptInEachStep(GraphedStep):
    kept = ()

    def __call__(self, *arguments, **options):
        super().__call__(*arguments, **options)
        self.kept += (self.losses_kept.read(),)
