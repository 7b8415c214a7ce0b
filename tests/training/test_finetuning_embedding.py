"""fastbert finetune --task embedding: losses, gradients, steps, figures and folders are sentence-transformers'."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import contextlib
import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from embedding_tasks import PHASE, RANKING, SCORED, folder, rows, task_of, write  # noqa: F401
from full import halved
from hf import leaf_gradients
from precise import assert_close_to_theirs
from seeds import manual_seed

from fastbert.data.batches import Steps
from fastbert.errors import ConfigError, InputError
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference
from fastbert.training.distributed import ProcessGroup, wrap
from fastbert.training.finetuning import make_task
from fastbert.training.finetuning.embedding import Embedding
from fastbert.training.options import FinetuneOptions
from fastbert.training.run import execute

library = pytest.importorskip("sentence_transformers")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")


def collated(task: Embedding, part: range) -> PackedInputs:
    batch = task.collate(PHASE)([task.train[i] for i in part or range(1)])
    return batch if part else batch.without_sequences()


def gradients(task: Embedding, cut: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of a step with batches of so many examples each."""
    ends = pairwise(np.cumsum([0, *cut]))
    batches = [collated(task, range(*end)) for end in ends]
    model = task.model.train()
    model.zero_grad()
    counts = [float(sum(task.counts(batch)[0] for batch in batches))]
    loss = task.backward(model, batches, counts, contextlib.nullcontext())
    return loss, {name: p.grad.clone() for name, p in model.encoder.named_parameters()}


def theirs_of(folder: Path, data: list[dict[str, Any]], make_loss: Any, exact: bool) -> tuple[torch.Tensor, dict]:
    model = library.SentenceTransformer(str(folder), device="cpu").train().to(torch.float64 if exact else torch.float32)
    model.max_seq_length = 16
    features = [model.preprocess([row[c] for row in data]) for c in data[0] if c != "score"]
    labels = torch.tensor([row["score"] for row in data]) if "score" in data[0] else torch.zeros(len(data))
    loss = make_loss(model)(features, labels.double() if exact else labels)
    loss.backward()
    found = {name: p.grad for name, p in model[0].model.named_parameters() if p.grad is not None}
    return loss.detach(), found


LOSSES = {
    "pairs": (RANKING[:2], {}, losses.MultipleNegativesRankingLoss),
    "negatives": (RANKING, {"scale": 30.0}, lambda m: losses.MultipleNegativesRankingLoss(m, scale=30.0)),
    "symmetric": (RANKING, {"symmetric": True}, lambda m: losses.MultipleNegativesRankingLoss(
        m, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")),
    "cached": (RANKING, {}, lambda m: losses.CachedMultipleNegativesRankingLoss(m, mini_batch_size=4)),
    "cosent": (SCORED, {}, losses.CoSENTLoss),
    "cosine": (SCORED, {"loss": "cosine"}, losses.CosineSimilarityLoss),
    "matryoshka": (RANKING, {"dims": ("32", "16", "8")},
                   lambda m: losses.MatryoshkaLoss(m, losses.MultipleNegativesRankingLoss(m), [32, 16, 8])),
    "matryoshka-cosent": (SCORED, {"dims": ("8", "32")},
                          lambda m: losses.MatryoshkaLoss(m, losses.CoSENTLoss(m), [32, 8])),
}  # fmt: skip


@halved
@pytest.mark.parametrize("cut", ([9], [4, 3, 0, 2, 0]), ids=("whole", "parts"))
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients(name, cut, folder):
    """In one batch, and in parts, whose gradients go through the cached ones of the vectors."""
    columns, options, make_loss = LOSSES[name]
    data = rows(columns, 9)
    loss, found = gradients(task_of(folder, data, **options), cut)
    near, near_gradients = theirs_of(folder, data, make_loss, exact=False)
    oracle, exact_gradients = theirs_of(folder, data, make_loss, exact=True)
    assert_close_to_reference(loss, oracle.double(), near.float(), GRADIENT_FACTOR)
    actual, near_gradients, exact_gradients = map(leaf_gradients, (found, near_gradients, exact_gradients))
    assert set(actual) == set(near_gradients)
    for key, gradient in actual.items():
        assert_close_to_reference(gradient, exact_gradients[key], near_gradients[key], GRADIENT_FACTOR, key)


def run_rank(rank: int, size: int, folder: str, wrapping: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    torch.set_num_threads(1)
    _run_cuts(rank, size, folder, wrapping)  # whose DDP must be gone: the last to let go of the group has the GIL,
    dist.destroy_process_group()  # waits for the group's threads, and they may wait for the GIL


def _run_cuts(rank: int, size: int, folder: str, wrapping: Any) -> None:
    task = task_of(Path(folder) / "model", rows(RANKING, 9), name=f"train-{rank}.jsonl", dims=("32", "8"))
    model = wrap(task.model.train(), ProcessGroup(rank, size, torch.device("cpu")), wrapping, bf16=False)
    nothing = range(0)
    cuts = (
        ([range(5)], [range(2), range(2, 5)], [range(4), range(4, 9), nothing]),
        ([range(5, 9)], [range(5, 6), range(6, 9)], [nothing, nothing, nothing]),
    )
    for cut in cuts[rank]:
        model.zero_grad()
        batches = [collated(task, part) for part in cut]
        loss = task.backward(model, batches, [4.5], contextlib.nullcontext())
        grads = {name: p.grad for name, p in task.model.encoder.named_parameters()}
        found = {name: (g.full_tensor() if wrapping == "fsdp" else g).clone() for name, g in grads.items()}
        torch.save((loss, found), f"{folder}/rank-{rank}-{len(cut)}.pt")


@pytest.mark.full
@pytest.mark.parametrize("wrapping", ("ddp", "fsdp"))
def test_negatives_are_of_all_ranks(wrapping, folder):
    """Two ranks, of which one has more examples, or all, have the loss and gradients of one, in parts and without."""
    data = rows(RANKING, 9)
    loss, expected = gradients(task_of(folder, data, dims=("32", "8")), [9])

    def make_loss(model):
        return losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [32, 8])

    oracle, exact = theirs_of(folder, data, make_loss, exact=True)
    expected, exact = map(leaf_gradients, (expected, exact))
    mp.spawn(run_rank, (2, str(folder.parent), wrapping), nprocs=2)
    for rank in (0, 1):
        for parts in (1, 2, 3):
            their_loss, found = torch.load(folder.parent / f"rank-{rank}-{parts}.pt")
            assert_close_to_reference(their_loss, oracle.double(), loss, GRADIENT_FACTOR)
            for name, gradient in leaf_gradients(found).items():
                assert_close_to_reference(gradient, exact[name], expected[name], GRADIENT_FACTOR, name)


def test_parts_have_the_same_dropout_twice(tmp_path):
    task = task_of(tiny.write_model(tmp_path / "model"), rows(RANKING, 9))
    seen: list[torch.Tensor] = []
    task.model.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    manual_seed(0)
    gradients(task, [4, 3, 2])
    assert len(seen) == 6
    for first, again in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(first, again)
    gradients(task, [4, 3, 2])
    assert not torch.equal(seen[0], seen[6])


STEPS, BATCH = 20, 8


@pytest.mark.full
def test_a_run_has_the_losses_of_sentence_transformers_trainer(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    data = rows(RANKING[:3], 40)
    path = write(tmp_path / "train.jsonl", data)
    options = FinetuneOptions(
        task="embedding",
        model=str(folder),
        train=(path,),
        output=str(tmp_path / "run"),
        batch_size=BATCH,
        steps=STEPS,
        warmup=0.0,
        learning_rate=1e-3,
        precision="fp32",
        log_every=5,
        weight_decay=0.01,
    )
    execute(options, make_task)
    log = map(json.loads, (tmp_path / "run/log.jsonl").read_text(encoding="utf-8").splitlines())
    ours = [loss for row in log for loss in row["losses"]]

    lengths = make_task(options).examples(0, PHASE)[1]
    steps = Steps(lengths, 10**6, BATCH, options.seed)
    order = [i for epoch in range(STEPS * BATCH // len(data)) for step in steps.of_epoch(epoch) for i in step]
    sampler = torch.utils.data.BatchSampler
    arguments = library.SentenceTransformerTrainingArguments(
        str(tmp_path / "theirs"),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        weight_decay=0.01,
        warmup_steps=0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        optim="adamw_torch",
        batch_sampler=lambda given, batch_size, **rest: sampler(range(len(given)), batch_size, False),
    )
    theirs = []
    for dtype in (torch.float32, torch.float64):
        model = library.SentenceTransformer(str(folder), device="cpu").to(dtype)
        trainer = library.SentenceTransformerTrainer(
            model,
            arguments,
            datasets.Dataset.from_list([data[int(i)] for i in order]),
            loss=losses.MultipleNegativesRankingLoss(model),
        )
        trainer.train()
        theirs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(ours) == STEPS and ours[-1] < ours[0] - 0.1
    assert_close_to_theirs(ours, *theirs)

    saved = library.SentenceTransformer(str(tmp_path / "run"), device="cpu")
    texts = [row["anchor"] for row in data]
    near, oracle = (m.encode(texts, convert_to_tensor=True) for m in (saved, copy.deepcopy(saved).double()))
    actual = SentenceEncoder(tmp_path / "run").encode(texts, convert_to_tensor=True)
    assert_close_to_reference(actual, oracle, near, GRADIENT_FACTOR)


def test_plain_encoders_get_the_pooling_that_is_asked_for(folder):
    task = task_of(folder, rows(RANKING, 4), pooling="cls")
    out = folder.parent / "saved"
    task.save(task.model.eval(), out)
    assert library.SentenceTransformer(str(out), device="cpu")[1].pooling_mode == "cls"
    with pytest.raises(ConfigError, match=r"says itself how its tokens are pooled \(cls\)"):
        task_of(out, rows(RANKING, 4), pooling="mean")


def test_a_dry_run_shows_texts_and_scores(folder):
    task = task_of(folder, [{"sentence1": "the cat", "sentence2": "a dog ran", "score": s} for s in (0.25, 1.0)])
    examples, lengths = task.examples(0, PHASE)
    assert lengths.tolist() == [9, 9]
    assert task.show(task.collate(PHASE)([examples[0]])) == ["[CLS] the cat [SEP]  |  [CLS] a dog ran [SEP]  [0.25]"]


@pytest.mark.parametrize(
    "columns,options,message",
    [
        (("text", "label"), {}, "has neither columns anchor and positive nor sentence1 and sentence2"),
        (RANKING[:1], {"text_columns": ("anchor",)}, "from two columns of texts"),
        (RANKING[:2], {"loss": "cosent"}, "needs a column of scores"),
        (SCORED, {"loss": "ranking"}, "takes every pair as one that belongs together"),
        (RANKING[:2], {"dims": ("16", "8")}, "they go from 32, the model's own"),
        (RANKING[:2], {"dims": ("x",)}, "must be whole numbers"),
        (RANKING[:2], {"lora_rank": 4}, "lora_rank is for the tasks classification, tokens, qa"),
    ],
)
def test_what_does_not_fit_is_said_at_once(columns, options, message, folder):
    with pytest.raises((InputError, ConfigError), match=message):
        task_of(folder, rows(columns, 4), **options)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"score": None}, "row 3: score is None; it must be a number"),
        ({"score": 4.0}, "score goes from 0 to 4, and a cosine from -1 to 1"),
        ({"sentence2": " "}, "row 3: sentence2 is empty"),
        ({"sentence2": None}, "row 3: sentence2 is missing"),
    ],
)
def test_a_row_that_does_not_fit_is_named(change, message, folder):
    data = rows(SCORED, 4)
    data[2] |= change
    with pytest.raises(InputError, match=message):
        task_of(folder, data, loss="cosine")
