"""LoRA: what learns, and that PEFT and transformers read what is saved."""

from __future__ import annotations

import pytest
import torch
from finetuning_runs import base, padded, task_of, write_rows
from test_finetuning_classification import AUTO, rows_of

from fastbert.errors import ConfigError
from fastbert.testing.numerics import assert_close_to_reference
from fastbert.training.optimizers import make_optimizer, parameter_groups


def trained(task, steps: int = 3) -> None:
    optimizer = make_optimizer("adamw", parameter_groups(task.model, 1e-2), (0.9, 0.999), 1e-8)
    batch = task.collate(None)([task.train[i] for i in range(len(task.train))])
    for _ in range(steps):
        task.loss(task.model.train(), batch, [float(n) for n in task.counts(batch)]).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_only_adapters_and_new_weights_learn_and_peft_reads_them(tmp_path):
    import copy

    import peft
    import transformers

    path = write_rows(tmp_path / "a.jsonl", rows_of("single"))
    model = base(tmp_path)
    task = task_of(model, path, lora_rank=4, lora_alpha=8)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    trained(task)
    changed = {name for name, value in task.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name, p in task.model.named_parameters() if p.requires_grad}
    assert {name for name in changed if "lora_" not in name} == {"classifier.weight", "classifier.bias"}
    assert len(changed) == 2 + 2 * 2 * 2  # A and B, of query and value, in two layers

    task.save(task.model, tmp_path / "saved")
    logits = task.model.eval()(**{k: v for k, v in _batch(task).items() if k != "labels"}).logits
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    start = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    alone = peft.PeftModel.from_pretrained(start, tmp_path / "saved" / "adapter").eval()
    inputs = padded(task, whole)
    for reference in (whole, alone):
        with torch.no_grad():
            oracle = copy.deepcopy(reference).double()(**inputs).logits
            assert_close_to_reference(logits, oracle, reference(**inputs).logits, 3)
    assert "lora_" not in "".join(whole.state_dict())


def _batch(task):
    return task.collate(None)([task.train[i] for i in range(len(task.train))])


def test_targets_are_named_or_refused(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", rows_of("single"))
    task = task_of(base(tmp_path), path, lora_rank=2, lora_targets=("key", "intermediate.dense"))
    learning = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n, p in task.model.named_parameters() if "lora_" in n}
    assert learning == {"key", "dense"}
    with pytest.raises(ConfigError, match=r"PEFT: .* --lora-targets may name: classifier, dense, key, query, value"):
        task_of(base(tmp_path), path, lora_rank=2, lora_targets=("nothing",))
    with pytest.raises(ConfigError, match="lora_targets was given without lora_rank"):
        task_of(base(tmp_path), path, lora_targets=("key",))
    assert AUTO
