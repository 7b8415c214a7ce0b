"""PEFT in fastbert's own classes: adapters, and the copies that `modules_to_save` puts in a module's place."""

from __future__ import annotations

import contextlib
import copy
import itertools
from functools import partial

import pytest
import torch
from batches import make_batch, make_labels
from family_configs import config_for, make_config
from full import left_to_full
from hf import MODELS, is_left_out, make_hf, make_ours, models_axis
from kinds import of_every_kind_of_head
from parity import check
from precise import assert_close_to_theirs
from seeds import torch_generator
from torch import nn

import fastbert
from fastbert.errors import InputError
from fastbert.families.schema import PreTraining
from fastbert.models.hf.recording import hf_model_of

peft = pytest.importorskip("peft")

TASKS = {
    "SequenceClassification": "SEQ_CLS",
    "TokenClassification": "TOKEN_CLS",
    "QuestionAnswering": "QUESTION_ANS",
    "Model": "FEATURE_EXTRACTION",
}
IDS = torch.tensor([[2, 5, 6, 7, 0], [3, 8, 9, 0, 0]])
MASK = (IDS != 0).long()


def drawn(model: nn.Module, names: list[str], head: str, targets: list[str], name: str = "default", seed: int = 0):
    """`model` in PEFT, with numbers of their own in the adapter and in its copies of what `names` are the ends of."""
    task = TASKS.get(head)
    config = peft.LoraConfig(r=2, target_modules=targets, task_type=task, modules_to_save=list(names) or None)
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config)
    else:
        model = peft.get_peft_model(model, config, name)
    generator = torch_generator(seed)
    with torch.no_grad():
        for path, parameter in sorted(model.named_parameters()):
            if f".{name}" in path:
                noise = (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
                parameter.copy_(noise if "lora_" in path else parameter + noise)
    return model


def targets_of(config) -> list[str]:
    """By the ends of their names, two Linears of each layer: where one is in a copy, there are others that learn."""
    names = config.layer_specs[0].names
    return [names.up, names.linears[0].rpartition(".")[2]]


def copied(config, head: str) -> list[str]:
    """Containers by the ends of their names: the pooler, what holds the leaves of the head, and a part of a layer."""
    form = config.family.heads.get(head)
    paths = [config.family.pooler, config.layer_specs[0].names.attention_output]
    for part in (form.masked_lm.of(config), form) if isinstance(form, PreTraining) else (form,):
        part = part.of(config) if head == "MaskedLM" else part
        paths += [getattr(part, role, None) for role in ("dense", "out", "decoder")]
    return list(dict.fromkeys(path.rpartition(".")[0] for path in paths if path is not None and "." in path))


@of_every_kind_of_head()
@left_to_full(partial(is_left_out, of=6))
@models_axis
def test_outputs_loss_and_gradients(model_type, head):
    """RoBERTa's classifier (CamemBERT's) is a container, which PEFT copies for SEQ_CLS unasked: a KeyError once."""
    config, number = config_for(model_type, head, 0, num_hidden_layers=2), MODELS.index((model_type, head))
    if (model_type, head) == ("albert", "PreTraining"):
        config = config.replace(num_labels=2)
    batch = make_batch(config, "right", seed=number)
    labels = make_labels(config, head, batch, seed=number)
    change = partial(drawn, names=copied(config, head), head=head, targets=targets_of(config))
    check(config, head, batch, labels, torch.float32, change)


@pytest.mark.parametrize(
    ("model_type", "head", "names", "target"),
    (
        ("bert", "Model", ["pooler"], "query"),
        ("roberta", "SequenceClassification", ["encoder"], "word_embeddings"),
        ("roberta", "SequenceClassification", ["embeddings", "layer.0"], "query"),
        ("roberta", "MaskedLM", ["roberta"], "lm_head.dense"),
        ("distilbert", "MaskedLM", ["distilbert.transformer"], "vocab_transform"),
    ),
)
def test_the_adapter_in_use(model_type, head, names, target):
    """Layers that run as one op are remembered: of the first adapter, once, for all that came after it."""
    config = config_for(model_type, head, 0, num_hidden_layers=2)
    theirs = make_hf(config, head).eval()
    models = make_ours(config, head, theirs).eval(), theirs, copy.deepcopy(theirs).double()
    models = [drawn(model, names, head, [target]) for model in models]
    models = [drawn(model, names, head, [target], "other", seed=1).eval() for model in models]

    def compare() -> torch.Tensor:
        found = [model(input_ids=IDS, attention_mask=MASK) for model in models]
        found = [out.logits if "logits" in out else out.pooler_output for out in found]
        rows = MASK.bool() if found[0].dim() == 3 else slice(None)
        assert_close_to_theirs(*(t[rows] for t in found))
        return found[0]

    with torch.no_grad():
        seen = [compare()]
        for model in models:
            model.set_adapter("other")
        seen.append(compare())
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(model.disable_adapter())
            seen.append(compare())
        assert torch.equal(compare(), seen[1])
    assert not any(torch.equal(one, another) for one, another in itertools.combinations(seen, 2))


def test_adapters_by_row_are_refused():
    model = fastbert.BertModel(make_config("bert"))
    model = drawn(model, [], "Model", ["query"]).eval()
    with pytest.raises(InputError, match=r"^adapter_names and alora_offsets choose by the row .*fastbert.accelerate"):
        model(input_ids=IDS, attention_mask=MASK, adapter_names=["default", "__base__"])


def test_a_recording_reads_the_copies():
    """torch.export, ONNX and torch.jit.trace put the leaves of ours into transformers' model."""
    config = config_for("roberta", "SequenceClassification", 0)
    theirs = make_hf(config, "SequenceClassification").eval()
    ours = make_ours(config, "SequenceClassification", theirs).eval()
    ours, near, exact = (
        drawn(model, [], "SequenceClassification", ["query"]).eval()
        for model in (ours, theirs, copy.deepcopy(theirs).double())
    )
    recorded = hf_model_of(ours.get_base_model())
    with torch.no_grad():
        found = [model(input_ids=IDS, attention_mask=MASK).logits for model in (recorded, near, exact)]
    assert_close_to_theirs(*found)
