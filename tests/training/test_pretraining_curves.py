"""Loss curves of pre-training beside the same loop over transformers' model: same weights, same batches, no dropout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from full import left_to_full
from hf import hf_class
from precise import assert_close_to_theirs
from seeds import manual_seed, shifted
from torch.nn.utils.rnn import pad_sequence
from training_runs import ALONE, OPTIONS, PHASE, WORDS, losses_of, make_corpus, make_tokenizer

from fastbert.config import EncoderConfig
from fastbert.data.batches import Steps, StepSampler
from fastbert.data.loader import make_loader
from fastbert.models.classes import CLASSES
from fastbert.training.loop import Loop, LoopOptions
from fastbert.training.optimizers import make_optimizer, parameter_groups
from fastbert.training.pretraining import MaskedLM, PairedLM
from fastbert.training.schedules import Schedule, multiplier

LR, BETAS, EPS, WARMUP = 3e-3, (0.9, 0.98), 1e-6, 2
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
OTHERS = {
    "albert": {"embedding_size": 16, "num_hidden_layers": 3, "classifier_dropout": 0.0},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 8},
}
MODELS = [
    ("bert", "PreTraining"),
    ("roberta", "MaskedLM"),
    ("distilbert", "MaskedLM"),
    ("albert", "PreTraining"),
    ("electra", "MaskedLM"),
    ("modernbert", "MaskedLM"),
]


def make_task(model_type: str, head: str) -> MaskedLM:
    """Special tokens have the ids 0 to 2, [MASK] the last one."""
    # 2 pads RoBERTa's positions, and is [MASK]: not an id of any text, so that no position is missing.
    ids = {"pad_token_id": 3, "bos_token_id": 0, "eos_token_id": 1}
    fields = {**SHAPE, **ids, "vocab_size": WORDS, "max_position_embeddings": 64, **OTHERS.get(model_type, {})}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    manual_seed(0)
    model = CLASSES[model_type, head](EncoderConfig.of_family(model_type, **fields, **dropouts))
    if head == "PreTraining":
        pairs: Any = {"bert": "nsp", "albert": "sop"}[model_type]
        return PairedLM(model, make_corpus(), make_tokenizer(), unit="token", seed=shifted(0), pairs=pairs)
    return MaskedLM(model, make_corpus(), make_tokenizer(), unit="token", seed=shifted(0))


def our_losses(task: MaskedLM, options: LoopOptions, folder: Path) -> list[float]:
    optimizer = make_optimizer("adamw", parameter_groups(task.model, LR), BETAS, EPS)
    schedule = Schedule(optimizer, "linear", options.steps, WARMUP)
    folder.mkdir()
    Loop(task, task.model, 32, optimizer, schedule, ALONE, folder, options).run()
    return losses_of(folder)


def their_losses(task: MaskedLM, theirs: Any, options: LoopOptions) -> list[float]:
    """The same steps by hand: padded batches, torch's own optimizer and clipping."""
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer, (phase,) = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS), options.phases
    losses: list[float] = []
    for epoch in range(options.steps):
        examples, lengths = task.examples(epoch, phase)
        sampler = StepSampler(Steps(lengths, phase.step_tokens), 32, epoch=epoch)
        for packed in make_loader(examples, sampler, task.collate(phase)):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                loss = theirs(**padded(packed)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = LR * multiplier("linear", options.steps, WARMUP)(len(losses))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if len(losses) == options.steps:
                return losses
    raise AssertionError


def padded(packed: Any) -> dict[str, torch.Tensor]:
    sizes = packed["batch"].cu_seqlens.diff().tolist()
    fills = {"input_ids": 3, "token_type_ids": 0, "labels": -100}
    found = {n: pad_sequence(packed[n].split(sizes), True, fill) for n, fill in fills.items() if n in packed}
    found["attention_mask"] = pad_sequence([torch.ones(size, dtype=torch.long) for size in sizes], True)
    pairs = ("next_sentence_label", "sentence_order_label")
    return found | {name: packed[name] for name in pairs if name in packed}


# The others' path is BERT's, with layers that other tests compare; test_loop.py has float32's curve.
@left_to_full(lambda p: p["model_type"] != "bert" or not p["bf16"])
@pytest.mark.parametrize("bf16", (False, True))
@pytest.mark.parametrize("steps", [16, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize(("model_type", "head"), MODELS, ids=[model_type for model_type, _ in MODELS])
def test_losses_are_those_of_transformers(model_type, head, steps, bf16, tmp_path):
    """In float32, and under autocast, as near to float64's curve as transformers' own."""
    phases = (dataclasses.replace(PHASE, until=steps),)
    options = dataclasses.replace(OPTIONS, phases=phases, save_every=0, bf16=bf16)
    make_task(model_type, head).model.save_pretrained(tmp_path / "start")
    task, load = make_task(model_type, head), hf_class(model_type, head).from_pretrained
    near, oracle = (
        their_losses(task, load(tmp_path / "start").to(dtype).train(), each)
        for dtype, each in ((torch.float32, options), (torch.float64, dataclasses.replace(options, bf16=False)))
    )
    assert_close_to_theirs(our_losses(make_task(model_type, head), options, tmp_path / "ours"), near, oracle)
