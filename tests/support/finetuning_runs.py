"""Tiny models and files for tests of fine-tuning, and transformers' model of the same weights beside ours."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from seeds import manual_seed, shifted
from tiny import write_model

from fastbert.testing.numerics import assert_close_to_reference
from fastbert.training.finetuning import make_task
from fastbert.training.options import FinetuneOptions

TEXTS = (
    "the cat sat on the mat",
    "a dog ran in",
    "who and we they",
    "old house , new cat !",
    "the dog",
    "we sat on a mat",
)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def base(folder: Path, **fields: Any) -> str:
    return str(write_model(folder / "base", **{**NO_DROPOUT, **fields}))


def task_of(model: str, train: str, held_out: str | None = None, **options: Any) -> Any:
    manual_seed(0)
    held = () if held_out is None else (held_out,)
    options = {"max_length": 32, "seed": shifted(42), **options}
    return make_task(FinetuneOptions(model=model, train=(train,), eval=held, **options))


def theirs(task: Any, folder: Path, auto: str) -> Any:
    """transformers' model of what a task saves, in float64 and in float32."""
    import transformers

    task.save(task.model, folder)
    model = getattr(transformers, auto).from_pretrained(folder, attn_implementation="eager").eval()
    return copy.deepcopy(model).double(), model


def check_loss(task: Any, found: Any, arguments: Any, *, indices: Sequence[int] | None = None) -> None:
    """The loss of a step that was cut into two batches and an empty one, and its gradients, against transformers' over
    all of it.
    """
    examples = [task.train[i] for i in (indices or range(len(task.train)))]
    batches = [task.collate(None)(part) for part in (examples[:1], examples[1:]) if part]
    batches.append(batches[0].without_sequences())
    totals = [float(sum(term)) for term in zip(*map(task.counts, batches), strict=True)]
    task.model.eval()
    loss = sum(task.loss(task.model, batch, totals) for batch in batches)
    loss.backward()
    wanted = [model(**arguments(model)).loss for model in found]
    for one in wanted:
        one.backward()
    assert_close_to_reference(loss, *wanted, 3)
    # All in one row: those of the keys' biases are 0, and what is left there of float32's rounding says nothing.
    names = [name for name, parameter in task.model.named_parameters() if parameter.grad is not None]
    parameters = [dict(model.named_parameters()) for model in (task.model, *found)]
    assert_close_to_reference(*(torch.cat([own[name].grad.flatten() for name in names]) for own in parameters), 3)


def padded(task: Any, model: Any, count: int | None = None) -> dict[str, torch.Tensor]:
    """The training inputs as transformers takes them."""
    rows = [task.train.sequences[i] for i in range(count or len(task.train))]
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    found = {"attention_mask": mask}
    for name in rows[0]:
        found[name] = torch.zeros_like(mask)
        found[name][mask == 1] = torch.cat([torch.from_numpy(row[name]) for row in rows])
    return found
