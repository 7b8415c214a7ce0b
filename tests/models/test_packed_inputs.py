"""PackedInputs: what a model makes of one is what it makes of the batch itself, and what is refused."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from batches import make_batch, make_labels
from family_configs import CHOICES, config_for, make_config
from full import halved, left_to_full
from hf import gradients, randomise
from seeds import manual_seed

import fastbert
from fastbert.errors import InputError
from fastbert.families import FAMILIES
from fastbert.models.base import EncoderModel
from fastbert.models.classes import CLASSES

HEADS = [("bert", head) for model_type, head in CLASSES if model_type == "bert"]
# Heads of other forms: no pooler, one token's score, order of sentences, dropout before, positions counted from ids.
HEADS += [
    ("distilbert", "SequenceClassification"),
    ("electra", "PreTraining"),
    ("electra", "MultipleChoice"),
    ("albert", "PreTraining"),
    ("roberta", "MaskedLM"),
    ("roberta", "Model"),
    ("xlm-roberta", "SequenceClassification"),
]


def make_model(model_type: str, head: str, **changes) -> torch.nn.Module:
    config = config_for(model_type, head, 0, num_hidden_layers=1, **changes)
    return randomise(CLASSES[model_type, head](config)).train()


def make_fields(model_type: str, head: str, pattern: str) -> dict[str, torch.Tensor]:
    """A padded batch with labels, as a model takes it."""
    config = config_for(model_type, head, 0)
    batch = make_batch(config, pattern)
    fields = {**batch.inputs, **make_labels(config, head, batch, seed=0)}
    if FAMILIES[model_type].positions_from_ids and pattern == "holes":
        fields["position_ids"] = batch.positions
    if head == "MultipleChoice":
        fields |= {name: t.view(-1, CHOICES, t.shape[-1]) for name, t in fields.items() if t.dim() == 2}
    return fields


def assert_same_step(model, expected: dict, packed: fastbert.PackedInputs) -> None:
    """Fields, loss and gradients of `model(**expected)` and of both ways to give `packed`, bit for bit."""
    first, second = (copy.deepcopy(model) for _ in range(2))
    outputs = [model(**expected), first(packed), second(**packed)]
    for out in outputs:
        (out["last_hidden_state"].square().sum() if "last_hidden_state" in out else out["loss"]).backward()
    for other, out in ((first, outputs[1]), (second, outputs[2])):
        assert list(out) == list(outputs[0])
        for name in out:
            assert torch.equal(out[name], outputs[0][name]), name
        theirs = gradients(other)
        for name, grad in gradients(model).items():
            assert (grad is None) == (theirs[name] is None) and (grad is None or torch.equal(grad, theirs[name])), name


@halved
@pytest.mark.parametrize("backend", ("auto", "torch"))
@pytest.mark.parametrize("model_type,head", HEADS)
def test_no_sequence_has_a_loss_of_zero_and_gradients_of_zeros(model_type, head, backend):
    """What a rank without a part in a step computes: every weight has a gradient, which DDP and FSDP2 wait for."""
    model = make_model(model_type, head)
    for pattern in ("none", "right"):
        packed = fastbert.pack_inputs(**make_fields(model_type, head, pattern)).without_sequences()
        with contextlib.nullcontext() if backend == "auto" else fastbert.use_backend(backend):
            out = model(**packed, **({} if head == "Model" else {"num_items_in_batch": 7.0}))
            loss = out["last_hidden_state"].sum() if head == "Model" else out["loss"]
            loss.backward()
        assert loss == 0.0
    for name, grad in gradients(model).items():
        assert (grad is None and head == "Model" and "pooler" in name) or not grad.any(), name


PATTERNS = [(*model, pattern) for model in HEADS for pattern in ("none", "holes")]
PATTERNS += [(model_type, "Model", pattern) for model_type in ("bert", "roberta") for pattern in ("right", "left")]


def is_shown_by_another(p) -> bool:
    """Each head has one pattern, and the next head the other."""
    number = PATTERNS.index((p["model_type"], p["head"], p["pattern"]))
    return (number + number // 2) % 2 == 1


@left_to_full(is_shown_by_another)
@pytest.mark.parametrize(("model_type", "head", "pattern"), PATTERNS)
def test_a_padded_batch_packed_ahead_gives_the_same_bits(model_type, head, pattern):
    fields = make_fields(model_type, head, pattern)
    assert_same_step(make_model(model_type, head), fields, fastbert.pack_inputs(**fields))


@pytest.mark.parametrize(
    ("model_type", "head", "as_row"),
    [(*model, torch.Tensor.tolist) for model in HEADS]
    + [("bert", "MaskedLM", torch.Tensor.numpy), ("bert", "MultipleChoice", torch.Tensor.clone)],
)
def test_lists_give_the_bits_of_packed_input(model_type, head, as_row):
    """Of its tokens, types and labels one after the other."""
    fields = make_fields(model_type, head, "right")
    choices, mask = fields["input_ids"].dim() == 3, fields.pop("attention_mask")
    real = (mask.flatten(0, 1) if choices else mask).bool()
    expected, lists = {}, {}
    for name, t in fields.items():
        grid = t.flatten(0, 1) if choices and t.dim() == 3 else t
        expected[name] = grid[real] if grid.dim() == 2 else grid
        lists[name] = [as_row(row[keep]) for row, keep in zip(grid, real, strict=True)] if grid.dim() == 2 else grid
        if choices and t.dim() == 3:
            lists[name] = [lists[name][i : i + CHOICES] for i in range(0, len(grid), CHOICES)]
    lengths = real.sum(1)
    expected["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    expected |= {"max_seqlen": int(lengths.max())} | ({"num_choices": CHOICES} if choices else {})
    assert_same_step(make_model(model_type, head), expected, fastbert.pack_inputs(**lists))


def test_a_tokenizers_lists_may_be_padded_on_the_right():
    ids, labels = [[5, 6, 7], [8, 0, 0], [0, 0, 0]], [[1, -100, 2], [3, -100, -100], [-100] * 3]
    packed = fastbert.pack_inputs(ids, [[1, 1, 1], [1, 0, 0], [0, 0, 0]], labels=labels)
    assert packed["input_ids"].tolist() == [5, 6, 7, 8] and packed["labels"].tolist() == [1, -100, 2, 3]
    batch = packed["batch"]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 4] and batch.labelled.tolist() == [0, 2, 3]
    assert (batch.max_seqlen, batch.bounds) == (3, {"input_ids": (5, 8), "labels": (0, 3)})


def test_what_float_labels_mean():
    """A regression's values, and several labels at once."""
    for num_labels, labels in ((1, [0.5, -2.0]), (3, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])):
        model = make_model("bert", "SequenceClassification", num_labels=num_labels)
        out = model(fastbert.pack_inputs([[1, 2], [3, 4, 5]], labels=labels))
        expected = model(
            torch.tensor([[1, 2, 0], [3, 4, 5]]), torch.tensor([[1, 1, 0], [1] * 3]), labels=torch.tensor(labels)
        )
        assert torch.equal(out.loss, expected.loss)


def test_joint_pre_training_samples_the_same():
    config = make_config("electra", 0)
    model = fastbert.ElectraForJointPreTraining(*(CLASSES["electra", h](config) for h in ("MaskedLM", "PreTraining")))
    fields, outputs = make_fields("electra", "MaskedLM", "holes"), []
    for given in (fields, {"input_ids": fastbert.pack_inputs(**fields)}):
        manual_seed(0)
        outputs.append(model(**given))
    assert torch.equal(outputs[0].loss, outputs[1].loss) and torch.equal(outputs[0].logits, outputs[1].logits)


# --------------------------------------------------------------------------------------------------------------------
# Refusals

IDS, ROWS = torch.arange(12).view(2, 6), [[1, 2, 3], [4, 5]]
BAD_LISTS = {
    "no batch": ({"input_ids": []}, "an empty batch: input_ids holds no sequence"),
    "one sequence": ({"input_ids": [1, 2]}, r"input_ids holds a sequence of shape \(\); it must be a list of lists"),
    "text": ({"input_ids": "text"}, "input_ids is a str; it must be a list of sequences"),
    "floats": ({"input_ids": [[1.0, 2.0]]}, r"input_ids is torch\.float32; it must hold integers"),
    "words": ({"input_ids": [["a"]]}, "input_ids makes no tensor"),
    "too large": ({"input_ids": [[1 << 70]]}, "input_ids makes no tensor"),
    "types' rows": ({"input_ids": ROWS, "token_type_ids": ROWS[:1]}, "token_type_ids has 1 sequences; input_ids has 2"),
    "types' length": (
        {"input_ids": ROWS, "token_type_ids": [[0] * 3, [0] * 3]},
        "token_type_ids has 3 values for sequence 1, which has 2 tokens",
    ),
    "labels' length": (
        {"input_ids": ROWS, "labels": [[0] * 2, [0] * 2]},
        "labels has 2 values for sequence 0, which has 3 tokens",
    ),
    "labels' count": ({"input_ids": ROWS, "labels": [0]}, r"labels has shape \(1,\); there are 2 sequences"),
    "float positions": ({"input_ids": ROWS, "start_positions": [0.5, 1.0]}, "start_positions is torch.float32; it"),
    "mask of lists": ({"input_ids": ROWS, "attention_mask": [[0, 1, 1], [1, 1]]}, "of sequence 0 is not ones and then"),
    "mask of a tensor": ({"input_ids": ROWS, "attention_mask": IDS}, "attention_mask is a Tensor; it must be a list"),
    "mask's values": ({"input_ids": IDS, "attention_mask": IDS}, "attention_mask has 10 values that are neither 0"),
    "dimensions": ({"input_ids": IDS[0]}, r"input_ids has shape \(6,\); it must be \(batch, seqlen\)"),
    "no column": ({"input_ids": IDS[:, :0]}, r"input_ids has shape \(2, 0\); it must be \(batch, seqlen\), both at"),
    "labels' shape": ({"input_ids": IDS, "labels": IDS[:, 1:]}, r"labels has shape \(2, 5\); input_ids has \(2, 6\)"),
    "device": ({"input_ids": IDS.to("meta")}, "input_ids is on meta; pack_inputs works on the host"),
    "choices": ({"input_ids": [[[1], [2]], [[3]]]}, r"as many choices in every field; input_ids has \[1, 2\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LISTS)
def test_pack_inputs_refuses(case):
    fields, message = BAD_LISTS[case]
    with pytest.raises(InputError, match=message):
        fastbert.pack_inputs(**fields)


BAD_FOR_A_MODEL = {
    "id": ("Model", {"input_ids": [[1, 43]]}, "input_ids holds 43; valid values are 0 to 42"),
    "type": ("Model", {"input_ids": [[1]], "token_type_ids": [[2]]}, "token_type_ids holds 2; valid values are 0 to 1"),
    "length": ("Model", {"input_ids": [[1] * 21]}, "a sequence of 21 tokens is longer than the position table"),
    "word": ("MaskedLM", {"input_ids": ROWS, "labels": [[1, -100, 43], [1, 1]]}, "labels holds 43; valid values are 0"),
    "class": (
        "SequenceClassification",
        {"input_ids": ROWS, "labels": [0, 3]},
        "labels holds 3; valid values are 0 to 2",
    ),
    "numbers": (
        "SequenceClassification",
        {"input_ids": ROWS, "labels": [[1.0, 0.0], [0.0, 0.0]]},
        r"labels has shape \(2, 2\); the logits' is \(2, 3\)",
    ),
    "classes of tokens": (
        "TokenClassification",
        {"input_ids": ROWS, "labels": [0, 1]},
        r"labels has shape \(2,\); it must",
    ),
    "tokens of classes": (
        "SequenceClassification",
        {"input_ids": ROWS, "labels": ROWS},
        "labels has 5 entries for 2 seq",
    ),
    "pair": (
        "PreTraining",
        {"input_ids": ROWS, "labels": ROWS, "next_sentence_label": [0, 2]},
        "next_sentence_label holds 2; valid values are 0 to 1",
    ),
    "choice": ("MultipleChoice", {"input_ids": [ROWS], "labels": [2]}, "labels holds 2; valid values are 0 to 1"),
    "no choice": ("MultipleChoice", {"input_ids": ROWS}, "packed input of a multiple-choice model needs num_choices"),
}


@pytest.mark.parametrize("case", BAD_FOR_A_MODEL)
def test_a_model_refuses_before_it_launches_anything(case, monkeypatch):
    head, fields, message = BAD_FOR_A_MODEL[case]
    model, packed = make_model("bert", head), fastbert.pack_inputs(**fields)
    monkeypatch.setattr(EncoderModel, "encode", lambda *args: pytest.fail("the encoder ran"))
    with pytest.raises(InputError, match=message):
        model(packed)


def test_what_does_not_belong_together():
    model, packed = make_model("bert", "TokenClassification"), fastbert.pack_inputs(ROWS)
    for given, message in (
        ({"attention_mask": IDS}, "a PackedInputs is all of a batch"),
        ({"labels": packed["input_ids"]}, "labels and a PackedInputs exclude each other"),
    ):
        with pytest.raises(InputError, match=message):
            model(packed, **given)
    with pytest.raises(InputError, match="max_seqlen and batch exclude each other"):
        model(**packed, max_seqlen=3)
    with pytest.raises(InputError, match="the input has 4 tokens; its batch has 5"):
        model(packed["input_ids"][:4], batch=packed["batch"])
    with pytest.raises(InputError, match="the PackedInputs is on meta, the model on cpu"):
        model(packed.to("meta"))
    with pytest.raises(InputError, match="no PackedInputs can be made of"):
        fastbert.PackedInputs({"input_ids": IDS})
    with pytest.raises(TypeError, match="takes no num_choices"):
        model(fastbert.pack_inputs([ROWS]))
    fields = make_fields("roberta", "Model", "holes")
    del fields["position_ids"]
    with pytest.raises(InputError, match="in front of other tokens, and roberta counts positions over all ids but 1"):
        make_model("roberta", "Model")(fastbert.pack_inputs(**fields))
