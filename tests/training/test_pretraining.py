"""The objectives of pre-training: what they learn, save and measure, beside transformers' models."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from precise import assert_as_theirs, assert_close_to_theirs, in_float64
from pretraining_runs import evaluated, options, train, write_text
from seeds import manual_seed
from shares import assert_share
from training_runs import make_model

import fastbert
from fastbert.cli import main
from fastbert.data.batches import KeyedDataset
from fastbert.errors import ConfigError
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference
from fastbert.training.pretraining import Student, make_task, student_of
from fastbert.training.pretraining.masked import EVALUATION_SEED
from fastbert.training.task import Phase

datasets = pytest.importorskip("datasets")
PHASE = Phase(1, 1000, max_length=24)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """With a cache of its own; a vocabulary is trained once."""
    folder = tmp_path_factory.mktemp("pretraining")
    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, folder / "cache"
    datasets.disable_progress_bars()
    yield write_text(folder / "text.txt")
    datasets.config.HF_DATASETS_CACHE = before


def batch_of(task, count=4):
    """The first examples, as a step has them."""
    examples, _ = task.examples(0, PHASE)
    return task.collate(PHASE)(KeyedDataset(examples, 0, 0).__getitems__(list(range(count))))


def padded(batch):
    sizes = batch["batch"].cu_seqlens.diff().tolist()
    names = [name for name in ("input_ids", "token_type_ids") if name in batch]
    found = {name: torch.nn.utils.rnn.pad_sequence(batch[name].split(sizes), True) for name in names}
    ones = [torch.ones(size, dtype=torch.long) for size in sizes]
    return {**found, "attention_mask": torch.nn.utils.rnn.pad_sequence(ones, True)}


def test_masked_tokens_are_learnt(text, tmp_path, capsys):
    """Well below the unigram entropy of 24 words; what is saved fills masks, in transformers too."""
    given = options(text, steps=60)
    manual_seed(0)
    task = make_task(given)
    before = evaluated(task)
    train(task, given, tmp_path / "run")
    after = evaluated(task)
    assert before["loss"] > math.log(24) and after["loss"] < math.log(24) - 0.6
    assert after["perplexity"] == pytest.approx(math.exp(after["loss"])) and after == evaluated(task)
    task.save(task.model, tmp_path / "saved")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([task.tokenizer.encode("ba be [MASK] bo").ids])
    with torch.no_grad():
        assert_as_theirs(task.model, theirs, lambda model: model(ids).logits)
    assert main(["fill-mask", "ba be [MASK] bo", "--model", str(tmp_path / "saved"), "--top", "3"]) == 0
    assert capsys.readouterr().out.count("%") == 3
    again = make_task(options(text, model=str(tmp_path / "saved")))
    assert evaluated(again) == pytest.approx(after)


def test_pairs_have_token_types_where_the_tokenizer_gives_them(text, tmp_path):
    """As transformers' tokenizer of what is saved will: not where model_input_names leaves them out."""
    given = {"objective": "mlm+nsp", "family": "bert", "steps": 2}
    task = make_task(options(text, vocab_kind="wordpiece", **given))
    task.save(task.model, tmp_path)
    assert "token_type_ids" in transformers.AutoTokenizer.from_pretrained(tmp_path)("ba", "be")
    assert set(batch_of(task)["token_type_ids"].tolist()) == {0, 1}
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"model_input_names": ["input_ids", "attention_mask"]}
    path.write_text(json.dumps(settings))
    assert "token_type_ids" not in transformers.AutoTokenizer.from_pretrained(tmp_path)("ba", "be")
    assert "token_type_ids" not in batch_of(make_task(options(text, tokenizer=str(tmp_path), **given)))


@pytest.mark.parametrize(("objective", "family"), [("mlm+nsp", "bert"), ("mlm+sop", "albert"), ("mlm+sop", "")])
def test_numbers_of_pairs_are_those_of_transformers(objective, family, text, tmp_path):
    """loss, accuracies and perplexity of held-out text, from the logits of transformers' model."""
    given = options(text, objective=objective, family=family, vocab_kind="wordpiece", steps=2)
    task = make_task(given)
    found, kind = evaluated(task), objective.removeprefix("mlm+")
    task.save(task.model, tmp_path / "saved")
    theirs = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "saved")

    def numbers(model):
        losses, right, pair_losses, pairs_right = [], [], [], []
        for batch in task.held_out_batches():
            with torch.no_grad():
                out = model(**padded(batch))
            chosen = batch["labels"] != -100
            real = torch.cat(
                [row[:n] for row, n in zip(out.prediction_logits, batch["batch"].cu_seqlens.diff(), strict=True)]
            )
            losses.append(F.cross_entropy(real[chosen], batch["labels"][chosen], reduction="none"))
            right.append(real[chosen].argmax(-1) == batch["labels"][chosen])
            pair = out["sop_logits" if "sop_logits" in out else "seq_relationship_logits"]
            pair_losses.append(F.cross_entropy(pair, batch[task.label], reduction="none"))
            pairs_right.append(pair.argmax(-1) == batch[task.label])
        loss, pair_loss, share, pair_share = (
            torch.cat(each).double().mean().item() for each in (losses, pair_losses, right, pairs_right)
        )
        parts = {"masked_accuracy": share, f"{kind}_accuracy": pair_share}
        return {"mlm_loss": loss, "loss": loss + pair_loss, **parts}

    near, exact = numbers(theirs), numbers(in_float64(theirs))
    for name, value in near.items():
        assert_close_to_theirs([found[name]], [value], [exact[name]])
    assert found["perplexity"] == pytest.approx(math.exp(found["mlm_loss"]))
    batch = batch_of(task)
    assert task.counts(batch) == [int((batch["labels"] != -100).sum()), 4]
    totals = [2.0 * count for count in task.counts(batch)]
    eps = torch.finfo(torch.float32).eps  # two terms are divided and added up in both
    assert 2 * task.loss(task.model, batch, totals).item() == pytest.approx(
        task.model(**batch).loss.item(), rel=4 * eps
    )
    lines = task.show(batch)
    assert len(lines) == 4 and all("to guess: " in line and "pair: " in line for line in lines)


def test_replaced_tokens(text, tmp_path):
    """The numbers of held-out text are those of the saved pair's own logits; a run goes on from the folder."""
    given = options(text, objective="rtd", steps=10)
    manual_seed(0)
    task = make_task(given)
    losses = train(task, given, tmp_path / "run")
    assert losses[-1] < losses[0] - 5
    assert task.model.generator.config.hidden_size * 4 == task.model.discriminator.config.hidden_size == 64
    found = evaluated(task)
    assert found == evaluated(task) and found["loss"] == pytest.approx(
        found["generator_loss"] + 50 * found["discriminator_loss"]
    )
    torch.manual_seed(EVALUATION_SEED)
    (batch,) = task.held_out_batches()
    with torch.no_grad():
        out = task.model(batch)
    said, truth = out.logits > 0, out.replaced == 1
    assert found["rtd_accuracy"] == pytest.approx((said == truth).float().mean().item())
    assert found["rtd_majority"] == pytest.approx(1 - truth.float().mean().item())
    assert 0.05 < truth.float().mean().item() < 0.16
    task.save(task.model, tmp_path / "saved")
    theirs = transformers.ElectraForPreTraining.from_pretrained(tmp_path / "saved")
    transformers.ElectraForMaskedLM.from_pretrained(tmp_path / "saved" / "generator")
    ids = batch["input_ids"][: batch["batch"].cu_seqlens[1]][None]
    with torch.no_grad():
        assert_as_theirs(task.model.discriminator, theirs, lambda model: model(ids).logits)
    again = make_task(options(text, objective="rtd", model=str(tmp_path / "saved")))
    assert evaluated(again) == pytest.approx(found)


def test_distillation_is_distilberts(text, tmp_path):
    """Its three losses by transformers' models and the formulas; the student begins as every other layer."""
    teacher = make_model(num_hidden_layers=2)
    assert teacher.config.num_hidden_layers == 2
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(3.0)  # far from uniform
    student = student_of(teacher)
    ours, theirs = student.base_model.encoder.layer, teacher.base_model.encoder.layer
    assert len(ours) == 1
    assert all(torch.equal(a, b) for a, b in zip(ours[0].parameters(), theirs[0].parameters(), strict=True))
    assert torch.equal(student.cls.predictions.bias, teacher.cls.predictions.bias)
    ids = [[5, 6, 2, 8], [9, 2, 11]]
    labels = [[-100, -100, 7, -100], [-100, 10, -100]]
    packed = fastbert.pack_inputs(ids, labels=labels)
    for model, folder in ((teacher, "teacher"), (student, "student")):
        model.save_pretrained(tmp_path / folder)
    models = [transformers.BertForMaskedLM.from_pretrained(tmp_path / f).eval() for f in ("teacher", "student")]
    formula = []
    for pair in (map(in_float64, models), models):
        hidden, scores = [], []
        for model in pair:
            outs = [model(torch.tensor([row]), output_hidden_states=True) for row in ids]
            hidden.append(torch.cat([out.hidden_states[-1][0] for out in outs]))
            scores.append(torch.stack([outs[0].logits[0, 2], outs[1].logits[0, 1]]))
        q, p = (F.softmax(s / 2, -1) for s in scores)
        soft = (q * (q.log() - p.log())).sum() * 4 / 2
        masked = F.cross_entropy(scores[1], torch.tensor([7, 10]))
        away = (1 - F.cosine_similarity(*hidden, dim=-1)).mean()
        formula.append(5 * soft + 2 * masked + away)
    found = Student(student.eval())(packed, hidden[0].detach(), scores[0].detach()).loss
    assert_close_to_reference(found, *formula, GRADIENT_FACTOR)
    with pytest.raises(ConfigError, match="a teacher needs two layers or more"):
        student_of(student)


def test_a_student_learns_and_is_saved(text, tmp_path):
    make_task(options(text)).save(task_model := make_task(options(text)).model, tmp_path / "teacher")
    assert task_model.config.num_hidden_layers == 2
    given = options(text, objective="distil", teacher=str(tmp_path / "teacher"), steps=10)
    task = make_task(given)
    losses = train(task, given, tmp_path / "run", lr=1e-3)
    assert losses[-1] < losses[0]
    assert all(p.grad is None for p in task.teacher.parameters())
    task.save(task.model, tmp_path / "student")
    saved = fastbert.AutoModelForMaskedLM.from_pretrained(tmp_path / "student")
    assert saved.config.num_hidden_layers == 1 and evaluated(task)["perplexity"] > 1


def test_masks_of_held_out_text_stay(text):
    """Whatever the seed and the masking of the run."""
    batches = [
        make_task(options(text, **changes)).held_out_batches() for changes in ({}, {"seed": 7, "masking": "0.4"})
    ]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"]) and torch.equal(one["labels"], other["labels"])
    assert_share(batches[0][0]["labels"] != -100, 0.15 * 22 / 24)
