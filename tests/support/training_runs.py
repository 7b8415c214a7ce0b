"""A tiny run of masked-LM pre-training: a corpus of invented words, a baby, and its loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from seeds import manual_seed, numpy_generator, shifted
from tokenizers import Tokenizer, models, processors

from fastbert.config import EncoderConfig
from fastbert.data.pretraining.chunks import CorpusChunks
from fastbert.data.pretraining.corpus import Corpus
from fastbert.models.classes import CLASSES
from fastbert.training.distributed import ProcessGroup, wrap
from fastbert.training.loop import Loop, LoopOptions
from fastbert.training.optimizers import make_optimizer, parameter_groups
from fastbert.training.pretraining import MaskedLM
from fastbert.training.schedules import Schedule
from fastbert.training.task import Phase

WORDS = 60
ALONE = ProcessGroup(0, 1, torch.device("cpu"))
PHASE = Phase(until=12, step_tokens=400, max_length=34)
OPTIONS = LoopOptions((PHASE,), save_every=4, log_every=3)


def whole(**changes: Any) -> LoopOptions:
    return replace(OPTIONS, **changes)


def short(**changes: Any) -> LoopOptions:
    """Four steps in the first epoch, whose last one has one to three examples."""
    examples = CorpusChunks(make_corpus(), make_tokenizer(), PHASE.max_length, seed=shifted(0), epoch=0)
    phase = replace(PHASE, step_tokens=10_000, max_examples=(len(examples) - 1) // 3)
    return replace(OPTIONS, phases=(phase,), **changes)


def until(step: int, options: LoopOptions = OPTIONS, **changes: Any) -> LoopOptions:
    return replace(options, phases=(replace(options.phases[0], until=step),), **changes)


def make_tokenizer() -> Tokenizer:
    vocab = {"[CLS]": 0, "[SEP]": 1, "[MASK]": 2, "a": 3} | {f"w{i}": i for i in range(4, WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="a"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    return tokenizer


def make_corpus(tokens: int = 2000) -> Corpus:
    """Each word is followed by the next one, so there is something to learn; documents of 5 to 60 words."""
    draw = numpy_generator(0)
    sizes = draw.integers(5, 61, tokens // 32)
    documents = np.concatenate([[0], np.cumsum(sizes)])
    ids = np.concatenate([(draw.integers(0, 56) + np.arange(size)) % 56 + 4 for size in sizes])
    return Corpus(ids.astype(np.int32), documents, documents)


def make_model(dropout: float = 0.0, **changes: Any) -> Any:
    shape = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    manual_seed(0)
    return CLASSES["bert", "MaskedLM"](
        EncoderConfig(intermediate_size=64, max_position_embeddings=64, **{**shape, **dropouts, **changes})
    )


def make_loop(
    folder: Path,
    options: LoopOptions = OPTIONS,
    process_group: ProcessGroup = ALONE,
    wrapping: Any = "ddp",
    model: Any = None,
    lr: float = 3e-3,
    optimizer: str = "adamw",
    layer_decay: float = 1.0,
    **others: Any,
) -> Loop:
    tokenizer, model = make_tokenizer(), make_model() if model is None else model
    task = MaskedLM(model, make_corpus(), tokenizer, unit="token", seed=shifted(0), with_types=True)
    wrapped = wrap(model, process_group, wrapping, bf16=options.bf16)
    groups = parameter_groups(model, lr, layer_decay=layer_decay)
    made = make_optimizer(optimizer, groups, (0.9, 0.98), 1e-6)
    folder.mkdir(parents=True, exist_ok=True)
    steps = max(12, options.steps)
    return Loop(task, wrapped, 32, made, Schedule(made, "linear", steps, 2), process_group, folder, options, **others)


def losses_of(folder: Path) -> list[float]:
    """Of every step."""
    rows = map(json.loads, (folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [loss for row in rows for loss in row["losses"]]


def steps_in(folder: Path) -> list[int]:
    """Of the checkpoints, from the oldest to the newest."""
    return [int(path.name.removeprefix("step-")) for path in sorted((folder / "checkpoints").glob("step-*"))]
