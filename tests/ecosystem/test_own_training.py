"""fastbert's own classes under those who train transformers' models: the same losses, by packed layers, counted."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from family_configs import config_for
from full import left_to_full
from hf import make_hf, make_ours
from precise import assert_close_to_theirs
from seeds import manual_seed, shifted, torch_generator
from torch import nn

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

LAYERS, STEPS = 4, 8


def rows(count: int = 32) -> list[dict]:
    generator, found = torch_generator(0), []
    for label in torch.randint(2, (count,), generator=generator).tolist():
        mask = torch.arange(12) < torch.randint(3, 12, (1,), generator=generator)
        ids = (torch.randint(5, 20, (12,), generator=generator) + 20 * label).where(mask, 0)
        found.append({"input_ids": ids, "attention_mask": mask.long(), "labels": label})
    return found


def both(head: str = "SequenceClassification") -> tuple[nn.Module, nn.Module]:
    """Our model, and transformers' with the same weights."""
    config = config_for("bert", head, 0, num_labels=2)
    theirs = make_hf(config, head)
    return make_ours(config, head, theirs), theirs


def batches(size: int = 8) -> list[dict[str, torch.Tensor]]:
    data = rows()
    chosen = [data[i : i + size] for i in range(0, len(data), size)] * (STEPS * size // len(data))
    return [{name: torch.stack([torch.as_tensor(row[name]) for row in some]) for name in some[0]} for some in chosen]


def trained(model: nn.Module, folder, data=None, **options) -> transformers.Trainer:
    data = rows() if data is None else data
    options = {"save_strategy": "no", "max_steps": STEPS, "per_device_train_batch_size": 8, **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        learning_rate=3e-4,
        logging_steps=1,
        seed=shifted(1),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=rows(8))
    trainer.train()
    return trainer


def losses_of(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_losses(actual, near, oracle) -> None:
    assert len(actual) == len(near) == len(oracle) > 0
    assert_close_to_theirs(actual, near, oracle)


def loop(model: nn.Module, prepare=lambda *both: both, backward=torch.Tensor.backward) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model, optimizer = prepare(model.train(), optimizer)
    found = []
    for batch in batches():
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@left_to_full(lambda p: "bf16" not in p["options"])  # the others are parts of it, or run without a Trainer, too
@pytest.mark.parametrize("options", ({}, {"bf16": True}, {"activation_checkpointing": True}), ids=str)
def test_trainer(options, tmp_path, packed_layers):
    ours, theirs = both()
    oracle = losses_of(trained(copy.deepcopy(theirs).double(), tmp_path))
    near = losses_of(trained(theirs, tmp_path, **options))
    assert not packed_layers
    trainer = trained(ours, tmp_path, **options)
    assert_same_losses(losses_of(trainer), near, oracle)
    assert len(packed_layers) == (2 if "activation_checkpointing" in options else 1) * LAYERS * STEPS


def heads_rows(head: str) -> list[dict]:
    """Columns that the Trainer keeps by the signature of forward. Questions have no padding: transformers' softmax
    over the tokens would count it, and ours does not (docs/differences.md).
    """
    found, generator = rows(), torch_generator(1)
    for row in found:
        label = row.pop("labels")
        if head == "QuestionAnswering":
            row["input_ids"] = torch.randint(5, 40, (12,), generator=generator)
            row["attention_mask"] = torch.ones(12, dtype=torch.long)
            row |= {"start_positions": label * 3 + 1, "end_positions": label * 3 + 4}
        elif head == "MultipleChoice":
            for name in ("input_ids", "attention_mask"):
                row[name] = torch.stack([row[name], row[name].flip(0) if name == "input_ids" else row[name]])
            row["labels"] = label
        else:
            row["labels"] = torch.where(row["attention_mask"] == 1, row["input_ids"] % 2, -100)
    return found


@left_to_full(lambda p: p["head"] != "TokenClassification")  # test_packing_collators.py; a sequence's head
@pytest.mark.parametrize("head", ("QuestionAnswering", "TokenClassification", "MultipleChoice"))
def test_trainer_of_other_heads(head, tmp_path, packed_layers):
    """Also what it evaluates: it finds the names of labels in the signature, and so a loss."""
    datasets = pytest.importorskip("datasets")
    ours, theirs = both(head)
    data = heads_rows(head)
    columns = {name: [torch.as_tensor(row[name]).tolist() for row in data] for name in data[0]} | {
        "unused": [0] * len(data)
    }
    data, found, evaluated = datasets.Dataset.from_dict(columns), [], []
    for model in (ours, theirs, copy.deepcopy(theirs).double()):
        trainer = trained(model, tmp_path, data, max_steps=4)
        assert len(packed_layers) == LAYERS * 4
        found.append(losses_of(trainer))
        trainer.eval_dataset = data.select(range(8))
        evaluated.append([trainer.evaluate()["eval_loss"]])
        if model is ours:
            assert len(packed_layers) == LAYERS * 5
            del packed_layers[LAYERS * 4 :]
    assert_same_losses(*found)
    assert_same_losses(*evaluated)


def test_trainer_saves_what_both_libraries_load_and_goes_on(tmp_path):
    """As a whole model, config included; a second Trainer goes on from the checkpoint as if there was no break."""
    ours, _ = both()
    straight = trained(copy.deepcopy(ours), tmp_path / "straight")
    saving = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    trained(copy.deepcopy(ours), tmp_path / "broken", load_best_model_at_end=True, **saving)
    checkpoint = tmp_path / "broken" / "checkpoint-4"
    resumed = copy.deepcopy(ours)
    arguments = copy.copy(straight.args)
    arguments.output_dir = str(tmp_path / "resumed")
    trainer = transformers.Trainer(model=resumed, args=arguments, train_dataset=rows())
    trainer.train(resume_from_checkpoint=str(checkpoint))
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, straight.model.get_parameter(name)), name
    trainer.save_model(tmp_path / "saved")
    inputs = {name: t for name, t in batches()[0].items() if name != "labels"}
    expected = resumed.eval()(**inputs).logits
    loaded = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded(**inputs).logits, expected)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    near, oracle = theirs(**inputs).logits, copy.deepcopy(theirs).double()(**inputs).logits
    assert_close_to_reference(expected, oracle, near, GRADIENT_FACTOR)


def test_gradient_accumulation_is_the_mean_over_all_labels(tmp_path):
    """By num_items_in_batch. (transformers' BertForSequenceClassification takes it and does not divide by it.)"""
    ours, _ = both()
    whole = trained(copy.deepcopy(ours), tmp_path, max_steps=2)
    in_parts = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
    parts = trained(ours, tmp_path, max_steps=2, **in_parts)
    assert_same_losses(losses_of(parts), losses_of(whole), losses_of(whole))


def test_peft(packed_layers, tmp_path):
    import peft

    lora = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS", init_lora_weights=False)
    ours, theirs = both()
    found = []
    for model in (ours, theirs, copy.deepcopy(theirs).double()):
        manual_seed(0)
        adapted = peft.get_peft_model(model, lora)
        found.append(loop(adapted))
    assert_same_losses(*found)
    assert len(packed_layers) == LAYERS * STEPS


def test_accelerate(packed_layers):
    from accelerate import Accelerator

    ours, theirs = both()
    accelerator = Accelerator(cpu=True)
    found = [loop(m, accelerator.prepare, accelerator.backward) for m in (ours, theirs)]
    assert_same_losses(*found, loop(copy.deepcopy(both()[1]).double()))
    assert len(packed_layers) == LAYERS * STEPS


def test_lightning(packed_layers, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def fit(model):
        module = Module(model.train())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", enable_model_summary=False, default_root_dir=tmp_path, **quiet
        )
        trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
        return module.losses

    ours, theirs = both()
    exact = loop(copy.deepcopy(theirs).double())
    assert_same_losses(fit(ours), fit(theirs), exact)
    assert len(packed_layers) == LAYERS * STEPS
