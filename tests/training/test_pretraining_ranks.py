"""Modules that hold several models, on two ranks: DDP and FSDP2 give the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from training_runs import ALONE, WORDS, losses_of, make_corpus, make_model, make_tokenizer, short, until

from fastbert.config import EncoderConfig
from fastbert.models.classes import CLASSES
from fastbert.models.joint_electra import ElectraForJointPreTraining
from fastbert.training.distributed import ProcessGroup, wrap
from fastbert.training.loop import Loop, LoopOptions
from fastbert.training.optimizers import make_optimizer, parameter_groups
from fastbert.training.pretraining import Distillation, ReplacedTokens, Student, student_of
from fastbert.training.pretraining.replaced import generator_config
from fastbert.training.schedules import Schedule


def make_task(objective: str) -> Any:
    arguments: tuple[Any, ...] = (make_corpus(), make_tokenizer())
    options = {"unit": "token", "seed": 0}
    teacher = make_model(num_hidden_layers=2)
    if objective == "distil":
        return Distillation(Student(student_of(teacher)), *arguments, teacher=teacher, **options)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    fields = {**shape, **dropouts, "vocab_size": WORDS, "max_position_embeddings": 64, "embedding_size": 16}
    config = EncoderConfig.of_family("electra", **fields)
    generator = CLASSES["electra", "MaskedLM"](generator_config(config))
    with torch.no_grad():  # it is sure of itself: what is drawn is the same on any rank
        generator.generator_lm_head.bias[7] = 100.0
        generator.generator_lm_head.bias.requires_grad_(False)
    return ReplacedTokens(
        ElectraForJointPreTraining(generator, CLASSES["electra", "PreTraining"](config)), *arguments, **options
    )


def run(
    folder: Path,
    objective: str,
    options: LoopOptions | None = None,
    process_group: ProcessGroup = ALONE,
    wrapping: Any = "ddp",
) -> None:
    task = make_task(objective)
    wrapped = wrap(task.model, process_group, wrapping, bf16=False)
    optimizer = make_optimizer("adamw", parameter_groups(task.model, 3e-3), (0.9, 0.98), 1e-6)
    folder.mkdir(parents=True, exist_ok=True)
    loop = Loop(
        task, wrapped, 32, optimizer, Schedule(optimizer, "linear", 12, 2), process_group, folder, options or short()
    )
    loop.resume()
    loop.run()


def run_rank(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    torch.set_num_threads(1)
    process_group = ProcessGroup(rank, size, torch.device("cpu"), *[dist.new_group(backend="gloo") for _ in range(2)])
    for objective in ("rtd", "distil"):
        for wrapping in ("ddp", "fsdp"):
            run(Path(folder) / objective / wrapping, objective, short(parts=2), process_group, wrapping)
    dist.destroy_process_group()


@pytest.mark.full
def test_two_ranks_have_the_losses_of_one(tmp_path):
    """And they go on from the checkpoint of one process, which had stopped after three steps. The fourth one has fewer
    examples than two ranks of two parts.
    """
    for objective in ("rtd", "distil"):
        run(tmp_path / objective / "one", objective)
        for wrapping in ("ddp", "fsdp"):
            run(tmp_path / objective / wrapping, objective, until(3, short()))
    mp.spawn(run_rank, (2, str(tmp_path)), nprocs=2)
    for objective in ("rtd", "distil"):
        expected = losses_of(tmp_path / objective / "one")
        assert len(set(expected)) == 12
        for wrapping in ("ddp", "fsdp"):
            assert losses_of(tmp_path / objective / wrapping) == pytest.approx(expected, rel=2e-5), wrapping
