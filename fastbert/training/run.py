"""One run, from its options to the folder that it leaves: what `fastbert finetune` and `fastbert pretrain` do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastbert.data.batches import Steps
from fastbert.errors import ConfigError
from fastbert.importing import collector_spares_what_is_there
from fastbert.ops import multiplies_bf16
from fastbert.training import folder as run_folder
from fastbert.training.distributed import ProcessGroup, join, wrap
from fastbert.training.loop import Loop, LoopOptions, TrainState, sampler_of
from fastbert.training.memory import keep_freed_memory
from fastbert.training.optimizers import make_optimizer, parameter_groups, use_sparse_gradients
from fastbert.training.options import RunOptions
from fastbert.training.report import Progress, can_draw, draw_chart, write_reports
from fastbert.training.schedules import Schedule
from fastbert.training.task import Phase, Task

SHOWN = 4  # examples of a dry run


def execute(
    options: RunOptions,
    make_task: Callable[[Any], Task],
    phases_of: Callable[[Any, int], tuple[Phase, ...]] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run what the options say on every rank; returns the metrics that are in metrics.json, on all ranks alike.

    `phases_of(options, steps)` cuts the run into phases; without it all steps are alike. `say` gets a dry run's lines.

    Raises ConfigError or InputError before the first step: options or data that do not fit; TrainingError,
    CheckpointError or OSError: the run cannot go on.
    """
    folder = Path()
    if not options.dry_run:
        folder = run_folder.check(options)
    keep_freed_memory()
    with collector_spares_what_is_there(), join(options.device or None, options.timeout) as process_group:
        torch.manual_seed(options.seed)
        if options.resume and not options.dry_run:
            run_folder.check_data(folder, options, process_group)
        with _main_first(process_group):
            task = make_task(options)
        phases = _phases(options, task, phases_of)
        loop_options = _loop_options(options, task, phases, process_group)
        if options.dry_run:
            if process_group.is_main:
                _show(task, loop_options, process_group, say)
            return {}
        if process_group.is_main and not options.resume:
            run_folder.begin(folder, options)
        with run_folder.held(folder, process_group):
            return _train(options, task, loop_options, process_group, folder)


def _train(
    options: RunOptions, task: Task, loop_options: LoopOptions, process_group: ProcessGroup, folder: Path
) -> dict[str, Any]:
    is_sharded = process_group.size > 1 and options.wrapping == "fsdp"
    model = task.model.to(process_group.device)
    whole = copy.deepcopy(model) if is_sharded and process_group.is_main else model
    if options.activation_checkpointing:
        model.activation_checkpointing_enable()
    if process_group.size == 1 and process_group.device.type == "cpu" and options.optimizer == "adamw":
        use_sparse_gradients(model)
    wrapped = wrap(model, process_group, options.wrapping, bf16=loop_options.bf16)  # type: ignore[arg-type]
    steps, drawn = loop_options.steps, process_group.is_main and can_draw()
    optimizer, schedule = _optimizer_of(model, options, steps)

    def gather() -> None:
        if is_sharded:
            _gather(wrapped, whole, process_group)

    def evaluate() -> dict[str, float]:
        gather()
        metrics = None
        if process_group.is_main:
            whole.eval()
            with torch.no_grad():  # without autocast, as what is saved runs where no other format is asked for
                metrics = {f"eval_{name}": float(value) for name, value in task.evaluate(whole).items()}
        return _from_main(metrics, process_group)

    def save_model() -> None:
        gather()
        if process_group.is_main:
            task.save(whole, folder)

    loop = Loop(
        task,
        wrapped,
        task.hidden_size,
        optimizer,
        schedule,
        process_group,
        folder,
        loop_options,
        evaluate=evaluate if task.metric else None,
        keep_best=save_model,
        at_end=lambda: draw_chart(folder) if drawn else None,
    )
    if options.resume:
        loop.resume()
    progress = Progress(
        folder,
        steps,
        loop.state.step,
        tensorboard=options.tensorboard and process_group.is_main,
        shown=process_group.is_main,
    )
    loop.on_step, loop.on_log, loop.say = progress.on_step, progress.on_log, progress.say
    try:
        loop.run()
    finally:
        progress.close()
    if task.metric is None:
        save_model()
    reports = write_reports(folder, options, loop.state, task, process_group.size) if process_group.is_main else None
    return _from_main(reports, process_group)


def _from_main(value: Any, process_group: ProcessGroup) -> Any:
    """The first rank's value, on all ranks."""
    values = [value]
    if process_group.size > 1:
        dist.broadcast_object_list(values, src=0, group=process_group.host_group)
    return values[0]


def _gather(wrapped: Any, whole: Any, process_group: ProcessGroup) -> None:
    """Fill the whole model of the first rank, where each has a part of it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    full = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if process_group.is_main:
        whole.load_state_dict(full)


def _optimizer_of(model: Any, options: RunOptions, steps: int) -> tuple[Any, Schedule]:
    groups = parameter_groups(model, options.learning_rate, options.weight_decay, options.layer_decay)
    optimizer = make_optimizer(options.optimizer, groups, (options.beta1, options.beta2), options.eps)
    warmup = round(options.warmup * steps) if options.warmup < 1 else int(options.warmup)
    return optimizer, Schedule(optimizer, options.schedule, steps, warmup)


def _phases(
    options: RunOptions, task: Task, phases_of: Callable[[Any, int], tuple[Phase, ...]] | None
) -> tuple[Phase, ...]:
    whole = _whole(options, options.steps, task)
    steps = options.steps or _steps_of_epochs(task, whole, options)
    return phases_of(options, steps) if phases_of is not None else (_whole(options, steps, task),)


def _whole(options: RunOptions, steps: int, task: Task) -> Phase:
    """A run whose steps are all alike."""
    if not options.batch_size and not options.step_tokens:
        raise ConfigError("batch_size and step_tokens are both 0: say how large a step is")
    tokens = options.step_tokens or options.batch_size * options.max_length * task.texts
    return Phase(steps, tokens, options.batch_size or None, options.max_length)


def _steps_of_epochs(task: Task, phase: Phase, options: RunOptions) -> int:
    """How many steps so many epochs are; the number of ranks does not change it."""

    def of_epoch(epoch: int) -> int:
        lengths = task.examples(epoch, phase)[1]
        steps = Steps(lengths, phase.step_tokens, phase.max_examples, options.seed, options.group_by_length)
        return len(steps.of_epoch(epoch))

    whole, rest = divmod(options.epochs, 1.0)
    steps = sum(of_epoch(epoch) for epoch in range(int(whole)))
    return max(1, steps + math.ceil(rest * of_epoch(int(whole))) if rest else steps)


def _loop_options(
    options: RunOptions, task: Task, phases: tuple[Phase, ...], process_group: ProcessGroup
) -> LoopOptions:
    evaluate_every = options.eval_every
    if not evaluate_every and not options.steps:
        lengths = task.examples(0, phases[0])[1]
        first = Steps(lengths, phases[0].step_tokens, phases[0].max_examples, options.seed, options.group_by_length)
        evaluate_every = len(first.of_epoch(0))
    return LoopOptions(
        phases,
        parts=options.accumulation,
        max_norm=options.max_norm,
        bf16=options.precision == "bf16" or (options.precision == "auto" and multiplies_bf16(process_group.device)),
        seed=options.seed,
        save_every=options.save_every,
        log_every=options.log_every,
        evaluate_every=evaluate_every,
        patience=options.patience,
        keep=options.keep,
        workers=options.workers,
        group_by_length=options.group_by_length,
    )


def _show(task: Task, options: LoopOptions, process_group: ProcessGroup, say: Callable[[str], None]) -> None:
    phase = options.phases[0]
    sampler, examples = sampler_of(
        task, phase, options, task.hidden_size, ProcessGroup(0, 1, process_group.device), TrainState()
    )
    indices = next(iter(sampler))
    shown = [examples[i] for i in indices[:SHOWN]]
    for line in task.show(task.collate(phase)(shown)):
        say(line)
    tokens = sum(int(sampler.steps.lengths[i]) for i in indices)
    say(
        f"the first step has {len(indices)} examples with {tokens} tokens; the run has {options.steps} steps, products"
        f" in {'bfloat16' if options.bf16 else 'float32'}"
    )


@contextmanager
def _main_first(process_group: ProcessGroup) -> Iterator[None]:
    """Rank 0 does something before the others, which then find it in a cache."""
    if not process_group.is_main:
        process_group.barrier()
    yield
    if process_group.is_main:
        process_group.barrier()
