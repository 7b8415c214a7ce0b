"""Every input that no kernel may see is refused at the boundary, with its value and the limit; odd valid ones run."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch
from family_configs import config_for, make_config
from hf import FAMILIES, make_hf, make_ours

import fastbert
from fastbert.errors import InputError
from fastbert.models.classes import CLASSES

IDS = torch.arange(12).view(2, 6)
FLAT, OFFSETS = IDS.flatten(), torch.tensor([0, 5, 12], dtype=torch.int32)


def offsets(*values: int) -> dict[str, torch.Tensor]:
    return {"input_ids": FLAT, "cu_seqlens": torch.tensor(values, dtype=torch.int32)}


def with_value(tensor: torch.Tensor, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[..., -1] = value
    return changed


def make_model(model_type: str = "bert", head: str = "Model", **changes):
    return CLASSES[model_type, head](config_for(model_type, head, 0, **{"num_hidden_layers": 1, **changes})).eval()


BAD_INPUTS = {
    "nothing": ({}, "give exactly one of input_ids and inputs_embeds"),
    "ids and embeddings": ({"input_ids": IDS, "inputs_embeds": torch.ones(2, 6, 64)}, "give exactly one of"),
    "one dimension": ({"input_ids": FLAT}, r"shape \(12,\); its leading shape must be \(batch, seqlen\)"),
    "three dimensions": ({"input_ids": IDS[None]}, r"shape \(1, 2, 6\); its leading shape must be \(batch, seqlen\)"),
    "padded ids with offsets": ({"input_ids": IDS, "cu_seqlens": OFFSETS}, r"must be \(total_tokens,\), packed"),
    "flat embeddings": ({"inputs_embeds": torch.ones(2, 64)}, r"shape \(2, 64\); its leading shape must be \(batch"),
    "float ids": ({"input_ids": IDS.float()}, r"input_ids is torch\.float32; it must be an integer tensor"),
    "bool ids": ({"input_ids": IDS.bool()}, r"input_ids is torch\.bool; it must be an integer tensor"),
    "embedding width": ({"inputs_embeds": torch.ones(2, 6, 63)}, "inputs_embeds has width 63; the model's is 64"),
    "no sequence": ({"input_ids": IDS[:0]}, r"an empty batch: the input has shape \(0, 6\)"),
    "no column": ({"input_ids": IDS[:, :0]}, r"an empty batch: the input has shape \(2, 0\)"),
    "id too large": ({"input_ids": with_value(IDS, 43)}, "input_ids holds 43; valid values are 0 to 42"),
    "negative id": ({"input_ids": with_value(IDS, -1)}, "input_ids holds -1; valid values are 0 to 42"),
    "type too large": ({"input_ids": IDS, "token_type_ids": IDS}, "token_type_ids holds 11; valid values are 0 to 1"),
    "types' shape": (
        {"input_ids": IDS, "token_type_ids": IDS[:1]},
        r"token_type_ids has shape \(1, 6\); the input's is",
    ),
    "float types": ({"input_ids": IDS, "token_type_ids": IDS * 0.0}, r"token_type_ids is torch\.float32; it must be"),
    "position": (
        {"input_ids": IDS, "position_ids": with_value(IDS, 20)},
        "position_ids holds 20; valid values are 0 to 19",
    ),
    "negative position": (
        {"input_ids": IDS, "position_ids": IDS - 2},
        "position_ids holds -2; valid values are 0 to 19",
    ),
    "positions' shape": (
        {"input_ids": IDS, "position_ids": IDS[0]},
        r"position_ids has shape \(6,\); the input's is \(2, 6\)",
    ),
    "bool positions": (
        {"input_ids": IDS, "position_ids": IDS > 3},
        r"position_ids is torch\.bool; it must be an integer",
    ),
    "too long": (
        {"input_ids": IDS.repeat(1, 4)},
        "a sequence of 24 tokens is longer than the position table, which has 20",
    ),
    "packed too long": (
        {"input_ids": FLAT.repeat(2), "cu_seqlens": torch.tensor([0, 2, 24])},
        "a sequence of 22 tokens is longer than the position table, which has 20",
    ),
    "mask's shape": (
        {"input_ids": IDS, "attention_mask": IDS[:, 1:] > 0},
        r"attention_mask has shape \(2, 5\); it must be",
    ),
    "mask of 4 dimensions": (
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 6)},
        r"attention_mask has shape \(2, 1, 6",
    ),
    "complex mask": ({"input_ids": IDS, "attention_mask": IDS * 1j}, "must be bool, integer or float"),
    "mask of twos": (
        {"input_ids": IDS, "attention_mask": with_value(IDS * 0, 2)},
        "attention_mask has 2 values that are neither",
    ),
    "additive mask": (
        {"input_ids": IDS, "attention_mask": with_value(IDS * 0.0, -1e4)},
        "attention_mask has 2 values that are",
    ),
    "half a mask": (
        {"input_ids": IDS, "attention_mask": with_value(IDS * 0.0, 0.5)},
        "attention_mask has 2 values that are",
    ),
    "NaN mask": (
        {"input_ids": IDS, "attention_mask": with_value(IDS * 0.0, float("nan"))},
        "attention_mask has 2 values",
    ),
    "mask and offsets": (
        {**offsets(0, 12), "attention_mask": IDS > 0},
        "attention_mask and cu_seqlens exclude each other",
    ),
    "offsets' shape": (
        {"input_ids": FLAT, "cu_seqlens": OFFSETS[None]},
        r"cu_seqlens has shape \(1, 3\); it must be \(batch \+ 1,\)",
    ),
    "one offset": (offsets(0), r"cu_seqlens has shape \(1,\); it must be \(batch \+ 1,\), batch >= 1"),
    "float offsets": (
        {"input_ids": FLAT, "cu_seqlens": OFFSETS.float()},
        r"cu_seqlens is torch\.float32; it must be int32",
    ),
    "first offset": (offsets(1, 12), "cu_seqlens starts at 1, not at 0"),
    "falling offsets": (offsets(0, 7, 5, 12), "cu_seqlens falls from 7 to 5 at sequence 1"),
    "last offset": (offsets(0, 5, 11), "cu_seqlens ends at 11, but there are 12 tokens"),
    "offsets beyond": (offsets(0, 5, 13), "cu_seqlens ends at 13, but there are 12 tokens"),
    "max_seqlen": ({**offsets(0, 5, 12), "max_seqlen": 6}, "max_seqlen is 6, but the longest sequence has 7 tokens"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs(case):
    inputs, message = BAD_INPUTS[case]
    for head in ("Model", "TokenClassification"):
        with pytest.raises(InputError, match=message):
            make_model("bert", head)(**inputs)


POSITIONS = {"start_positions": torch.zeros(2).long(), "end_positions": torch.zeros(2).long()}
CHOICES = IDS.view(1, 2, 6)
BAD_LABELS = {
    "token label": (
        "TokenClassification",
        {"labels": with_value(IDS * 0, 3)},
        "labels holds 3; valid values are 0 to 2, and -100",
    ),
    "negative token label": (
        "TokenClassification",
        {"labels": with_value(IDS * 0, -1)},
        "labels holds -1; valid values are",
    ),
    "token labels' shape": ("TokenClassification", {"labels": IDS[0]}, r"labels has shape \(6,\); it must be \(2, 6\)"),
    "masked lm": ("MaskedLM", {"labels": with_value(IDS, 43)}, "labels holds 43; valid values are 0 to 42, and -100"),
    "masked lm's shape": ("MaskedLM", {"labels": IDS[:1]}, r"labels has shape \(1, 6\); it must be \(2, 6\)"),
    "pre-training": (
        "PreTraining",
        {"labels": IDS, "next_sentence_label": IDS[:, 2]},
        "next_sentence_label holds 8; valid values are 0 to 1",
    ),
    "pairs": ("NextSentencePrediction", {"labels": torch.tensor([0])}, "labels has 1 entries for 2 sequences"),
    "class": (
        "SequenceClassification",
        {"labels": torch.tensor([0, 3])},
        "labels holds 3; valid values are 0 to 2, and -100",
    ),
    "classes": ("SequenceClassification", {"labels": torch.tensor([0, 1, 2])}, "labels has 3 entries for 2 sequences"),
    "several labels": (
        "SequenceClassification",
        {"labels": torch.ones(2, 2)},
        r"labels has shape \(2, 2\); the logits' is \(2, 3\)",
    ),
    "choice": (
        "MultipleChoice",
        {"input_ids": CHOICES, "labels": torch.tensor([2])},
        "labels holds 2; valid values are 0 to 1",
    ),
    "choices": (
        "MultipleChoice",
        {"input_ids": CHOICES, "labels": torch.tensor([0, 1])},
        "labels has 2 entries for 1 sequences",
    ),
    "no choices": ("MultipleChoice", {}, r"inputs of shape \(batch, num_choices, seqlen\), not \(2, 6\)"),
    "no ids": ("MultipleChoice", {"input_ids": None}, r"inputs of shape \(batch, num_choices, seqlen\), not None"),
    "packed choices": (
        "MultipleChoice",
        {**offsets(0, 5, 12)},
        "packed input of a multiple-choice model needs num_choices",
    ),
    "uneven choices": (
        "MultipleChoice",
        {**offsets(0, 5, 12), "num_choices": 3},
        "2 sequences are no multiple of num_choices 3",
    ),
    "answers": (
        "QuestionAnswering",
        {**POSITIONS, "end_positions": torch.zeros(3)},
        "end_positions has 3 entries for 2 sequences",
    ),
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_bad_labels(case):
    head, inputs, message = BAD_LABELS[case]
    with pytest.raises(InputError, match=message):
        make_model("bert", head)(**{"input_ids": IDS, **inputs})


def test_heads_with_other_numbers_of_labels():
    with pytest.raises(InputError, match="question answering needs num_labels 2, not 3"):
        make_model("bert", "QuestionAnswering", num_labels=3)(IDS)
    with pytest.raises(InputError, match=r"problem_type 'rank' is none of regression, single_label_classification"):
        make_model("bert", "SequenceClassification", problem_type="rank")(IDS, labels=torch.ones(2, 3))
    with pytest.raises(InputError, match="labels holds 11; valid values are 0 to 1"):
        make_model("electra", "PreTraining")(IDS, labels=IDS)
    with pytest.raises(TypeError, match="BertForMaskedLM takes no next_sentence_label, past; it has labels"):
        make_model("bert", "MaskedLM")(IDS, next_sentence_label=IDS, past=1)


@pytest.mark.parametrize("model_type", [m for m in FAMILIES if make_config(m).embeddings.position is not None])
def test_families_limits(model_type):
    """RoBERTa's positions start beyond the pad id, so its table ends sooner; a family without types says so."""
    model = make_model(model_type)
    limit = 18 if model.family.positions_from_ids else 20
    model(torch.full((1, limit), 5))
    with pytest.raises(
        InputError, match=f"a sequence of {limit + 1} tokens is longer than the position table, which has {limit}"
    ):
        model(torch.full((1, limit + 1), 5))
    if model.config.embeddings.token_type is None:
        with pytest.raises(InputError, match=f"token_type_ids were given, but {model_type} has no token types"):
            model(IDS, token_type_ids=IDS * 0)
    else:
        last = model.config.type_vocab_size - 1
        model(IDS, token_type_ids=IDS * 0 + last)
        with pytest.raises(InputError, match=f"token_type_ids holds {last + 1}; valid values are 0 to {last}"):
            model(IDS, token_type_ids=IDS * 0 + last + 1)
    if limit == 18 and model.family.padding_idx is None:
        with pytest.raises(InputError, match="counts positions from pad_token_id, which this config does not have"):
            make_model(model_type, pad_token_id=None)(IDS)


@torch.no_grad()
def test_what_stands_at_padding_does_not_matter():
    """Ids, types and positions out of range are no error where the mask says padding; nor is NaN."""
    model, batch = make_model("bert", "TokenClassification"), make_batch(make_config("bert"), "holes")
    real, labels = batch.real, torch.zeros(6, 11, dtype=torch.long).where(batch.real, -100)
    clean = model(**batch.inputs, position_ids=batch.positions, labels=labels)
    odd = {name: t if name == "attention_mask" else t.where(real, 10**6) for name, t in batch.inputs.items()}
    out = model(**odd, position_ids=batch.positions.where(real, -7), labels=labels)
    assert torch.equal(out.logits, clean.logits) and torch.equal(out.loss, clean.loss)
    embeds = torch.randn(6, 11, 64).masked_fill(~real[..., None], float("nan"))
    assert torch.isfinite(model(inputs_embeds=embeds, attention_mask=batch.inputs["attention_mask"]).logits).all()


@torch.no_grad()
def test_task_types_that_a_config_has_no_use_for():
    """Ignored, whatever they are, as transformers' ERNIE does; other families have no such argument."""
    config = make_config("ernie", 1)
    assert not config.use_task_id
    theirs = make_hf(config, "Model").eval()
    ours, batch = make_ours(config, "Model", theirs).eval(), make_batch(config)
    given = {**batch.inputs, "task_type_ids": torch.full((6, 11), 99)}
    assert torch.equal(theirs(**given)[0], theirs(**batch.inputs)[0])
    for model in (ours, fastbert.accelerate(theirs)):
        assert torch.equal(model(**given)[0], model(**batch.inputs)[0])
    packed = fastbert.pack_inputs(**given)
    assert torch.equal(ours(packed)[0], ours(fastbert.pack_inputs(**batch.inputs))[0])
    with pytest.raises(InputError, match="task_type_ids were given, but bert has no task types"):
        make_model()(**given)


@torch.no_grad()
def test_odd_but_valid_inputs():
    """Other integer dtypes, masks of any dtype, non-contiguous ids and a mask of ones: the same bits."""
    model, batch = make_model(), make_batch(make_config("bert"), "holes")
    expected = model(**batch.inputs)[0]
    floats, integers = (torch.float32, torch.bfloat16), (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    for dtype in (torch.bool, torch.int8, torch.int16, torch.int32, *integers, *floats):
        mask = batch.inputs["attention_mask"].to(dtype)
        assert torch.equal(model(**{**batch.inputs, "attention_mask": mask})[0], expected)
        if dtype is not torch.bool:
            with pytest.raises(InputError, match=r"attention_mask has \d+ values that are neither 0"):
                model(**{**batch.inputs, "attention_mask": (batch.inputs["attention_mask"] * 3).to(dtype)})
    for dtype in (torch.int32, torch.uint16, torch.uint64):
        inputs = {name: t.to(dtype) for name, t in batch.inputs.items()}
        assert torch.equal(model(**inputs)[0], expected)
    strided = {name: t.T.contiguous().T for name, t in batch.inputs.items()}
    assert not strided["input_ids"].is_contiguous() and torch.equal(model(**strided)[0], expected)
    full = {name: t for name, t in batch.inputs.items() if name != "attention_mask"}
    assert torch.equal(model(**full)[0], model(**full, attention_mask=torch.ones(6, 11))[0])
