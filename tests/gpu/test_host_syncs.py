"""How often a forward call waits for a GPU: counted by the calls that would, so that no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch, make_labels
from family_configs import CHOICES, config_for, make_config
from full import halved, left_to_full
from hf import make_hf
from host_syncs import HostSyncs, no_value_is_on_the_host
from slack import with_capacity

import fastbert
from fastbert import ops
from fastbert.backend import use_backend
from fastbert.errors import InputError
from fastbert.models.classes import CLASSES
from fastbert.native.availability import triton_error
from fastbert.packed_inputs import ModelInputs
from fastbert.packing import PackedBatch
from fastbert.training.finetuning import embedding_losses


def test_what_waits_is_counted():
    """Each way that Python has of asking a tensor, and the ops whose results' sizes are values."""
    x = torch.arange(3)
    ways = (
        lambda: x.tolist(), lambda: x[0].item(), lambda: int(x[0]), lambda: bool(x[0]), lambda: [0, 1][x[0]],
        lambda: x.nonzero(), lambda: x[x > 1], lambda: x.masked_select(x > 1), lambda: x.repeat_interleave(x),
        lambda: x.unique(), lambda: x.equal(x), lambda: x.cpu(), lambda: x.clone().index_put_((x > 1,), x[0]),
        lambda: x.float().multinomial(1),
    )  # fmt: skip
    for i, way in enumerate(ways):
        with HostSyncs() as syncs:
            way()
        assert len(syncs.found) == 1, (i, syncs.found)
    with HostSyncs() as syncs:
        x[x.nonzero_static(size=2).flatten()].where(x[:2] > 0, 0).sum()
    assert syncs.found == []


def make_inputs(kind: str, model_type: str = "bert") -> dict:
    """`kind`: an attention mask's pattern, or packed, with position ids and types too."""
    batch = make_batch(make_config(model_type), "none" if kind == "none" else "holes")
    if kind == "packed":
        return batch.packed() | {"max_seqlen": 11}
    return {**batch.inputs, "position_ids": batch.positions}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    no_value_is_on_the_host(monkeypatch)


@pytest.fixture
def unchecked():
    fastbert.check_inputs(False)
    yield
    fastbert.check_inputs(True)


def prepare(model, inputs: dict):
    with HostSyncs() as syncs:
        prepared = model.prepare(ModelInputs(**inputs))
    return prepared, syncs.found


KINDS = ("none", "holes", "packed")
# What the interpreter runs in a moment: the kernels' shapes make no difference to who waits.
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16}


@halved
@pytest.mark.parametrize("given", ("all ids", "positions counted"))
@pytest.mark.parametrize("model_type", ("bert", "roberta"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_checked_and_packed_in_one_copy(kind, model_type, given):
    model = CLASSES[model_type, "Model"](config_for(model_type, "Model", 0, **TINY))
    inputs = make_inputs(kind, model_type)
    if given == "positions counted":
        del inputs["position_ids"]
    _, found = prepare(model, inputs)
    assert found == ["tolist"]


@pytest.mark.parametrize("kind", KINDS)
def test_unchecked_a_batch_is_not_waited_for(kind, unchecked):
    """But for the token count behind a mask, and a longest length that was not given."""
    model, inputs = CLASSES["bert", "Model"](config_for("bert", "Model", 0, **TINY)), make_inputs(kind)
    _, found = prepare(model, inputs)
    assert found == (["tolist"] if kind == "holes" else [])
    if kind == "packed":
        prepared, found = prepare(model, inputs | {"max_seqlen": None})
        lengths = inputs["cu_seqlens"].diff()
        assert len(found) == 1 and prepared.batch.max_seqlen == int(lengths.max())


@left_to_full(lambda p: p["kind"] != "holes")
@pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_whole_forward_call_waits_once(kind):
    """On the kernels that a GPU runs; unpacking and pooling too."""
    model = CLASSES["bert", "Model"](config_for("bert", "Model", 0, **TINY)).eval()
    inputs = make_inputs(kind)
    expected = model(**inputs)
    with use_backend("triton"), HostSyncs() as syncs:
        out = model(**inputs)
    assert syncs.found == ["tolist"]
    assert out.last_hidden_state.shape == expected.last_hidden_state.shape


@pytest.mark.parametrize("head", ("TokenClassification", "SequenceClassification"))
def test_labels_are_checked_in_one_copy(head):
    model = CLASSES["bert", head](config_for("bert", head, 0, **TINY))
    inputs = make_inputs("none")
    labels = torch.zeros(inputs["input_ids"].shape[: 2 if head == "TokenClassification" else 1], dtype=torch.int64)
    with HostSyncs() as plain:
        model(**inputs)
    with HostSyncs() as labelled:
        model(**inputs, labels=labels)
    assert labelled.found == [*plain.found, "tolist"]


def test_the_switch(unchecked):
    """Off, values are not looked at; shapes, dtypes and masks are. On again, they are."""
    model = CLASSES["bert", "Model"](config_for("bert", "Model", 0, **TINY))
    ids, offsets = torch.full((6,), 10**6), torch.tensor([0, 4, 3])
    assert model.prepare(ModelInputs(ids, cu_seqlens=offsets, max_seqlen=4)).ids.input_ids is ids
    PackedBatch.from_cu_seqlens(offsets, None, 6)
    with pytest.raises(InputError, match="cu_seqlens has shape"):
        model.prepare(ModelInputs(ids, cu_seqlens=offsets[None], max_seqlen=4))
    with pytest.raises(InputError, match="attention_mask has 6 values"):
        model.prepare(ModelInputs(ids.view(1, 6), ids.view(1, 6)))
    fastbert.check_inputs(True)
    with pytest.raises(InputError, match="cu_seqlens falls from 4 to 3"):
        model.prepare(ModelInputs(ids, cu_seqlens=offsets, max_seqlen=4))
    with pytest.raises(InputError, match="input_ids holds 1000000; valid values are 0 to 42"):
        model.prepare(ModelInputs(ids, cu_seqlens=torch.tensor([0, 4, 6]), max_seqlen=4))


ALL_HEADS = [("bert", head) for model_type, head in CLASSES if model_type == "bert"]
ALL_HEADS += [("electra", "PreTraining"), ("albert", "PreTraining"), ("roberta", "SequenceClassification")]


def make_packed(model_type: str, head: str, kind: str) -> fastbert.PackedInputs:
    """`kind`: padded, with holes and without, or lists; with every label that the head takes."""
    config = config_for(model_type, head, 0)
    batch = make_batch(config, "none" if kind == "none" else "holes", batch_size=CHOICES, seqlen=5)
    fields = {**batch.inputs, **make_labels(config, head, batch, seed=0), "position_ids": batch.positions}
    if kind == "lists":
        real = fields.pop("attention_mask").bool()
        fields = {name: [*map(torch.masked_select, t, real)] if t.dim() == 2 else t for name, t in fields.items()}
    if head == "MultipleChoice":
        labels = {"labels": fields.pop("labels")}
        fields = {name: [t] if kind == "lists" else t[None] for name, t in fields.items()} | labels
    return fastbert.pack_inputs(**fields)


@pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
@left_to_full(lambda p: ALL_HEADS.index((p["model_type"], p["head"])) % 2 == 1)
@left_to_full(lambda p: p["model_type"] != "bert" or p["head"] != "PreTraining")
@pytest.mark.parametrize(("model_type", "head"), ALL_HEADS)
def test_a_training_step_on_packed_inputs_waits_for_nothing(model_type, head):
    """Forward, loss and backward, on the kernels that a GPU runs; dropout, too; slack behind the batch, or padding."""
    model = CLASSES[model_type, head](config_for(model_type, head, 0, hidden_dropout_prob=0.1, **TINY)).train()
    for packed in (make_packed(model_type, head, "holes"), with_capacity(make_packed(model_type, head, "lists"))):
        with use_backend("triton"), HostSyncs() as syncs:
            out = model(packed)
            (out.last_hidden_state.sum() if head == "Model" else out.loss).backward()
        assert syncs.found == []


@pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
@pytest.mark.parametrize(("head", "kind"), (("Model", "none"), ("MaskedLM", "holes"), ("MultipleChoice", "lists")))
@torch.no_grad()
def test_inference_on_packed_inputs_waits_for_nothing(head, kind):
    model, packed = CLASSES["bert", head](config_for("bert", head, 0, **TINY)).eval(), make_packed("bert", head, kind)
    with use_backend("triton"), HostSyncs() as syncs:
        fields = list(model(**packed).values())  # what is deferred is computed, too
    assert syncs.found == [] and all(torch.isfinite(t).all() for t in fields)


@pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
def test_joint_pre_training_on_packed_inputs_waits_for_nothing():
    config = config_for("electra", "MaskedLM", 0, **TINY)
    models = (CLASSES["electra", head](config) for head in ("MaskedLM", "PreTraining"))
    packed = make_packed("electra", "MaskedLM", "none")
    with use_backend("triton"), HostSyncs() as syncs:
        fastbert.ElectraForJointPreTraining(*models).train()(packed).loss.backward()
    assert syncs.found == []


@pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
def test_labels_of_few_tokens_are_not_looked_for():
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    labels = torch.where(torch.arange(12) % 3 == 0, 2, -100)
    with HostSyncs() as syncs:
        ops.cross_entropy(hidden, weight, None, labels, backend="triton").backward()
    assert syncs.found == []


@pytest.mark.parametrize("loss", ("ranking", "cosent", "cosine"))
def test_a_loss_of_vectors_waits_for_nothing(loss):
    vectors, scores, is_real = torch.randn(6, 2, 8, requires_grad=True), torch.rand(6), torch.arange(6) < 4
    of = {
        "ranking": lambda: embedding_losses.ranking(vectors, is_real, 20.0, symmetric=True),
        "cosent": lambda: embedding_losses.cosent(vectors, is_real, scores, 20.0),
        "cosine": lambda: embedding_losses.cosine(vectors, is_real, scores),
    }[loss]
    with HostSyncs() as syncs:
        of().backward()
    assert syncs.found == [] and vectors.grad.isfinite().all()


@left_to_full(lambda p: p["head"] == "TokenClassification")  # whose loss goes as that of MaskedLM
@pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
@pytest.mark.parametrize("head", ("TokenClassification", "MaskedLM", "QuestionAnswering"))
def test_a_training_step_of_an_accelerated_model_waits_once(head):
    """For the mask: it tells by the way of labels at padding. Losses of transformers' own wait for nothing."""
    config = config_for("bert", head, 0, **TINY)
    batch = make_batch(config, "right", batch_size=3, seqlen=5)
    labels = make_labels(config, head, batch, seed=0)
    if head == "QuestionAnswering":
        model = fastbert.accelerate(make_hf(config, head).train(), spans_over_real_tokens=True)
    else:
        model = fastbert.accelerate(make_hf(config, head).train())
        labels["labels"] = labels["labels"].where(batch.real, -100)
    model(**batch.inputs)  # what a first call looks at stays
    with use_backend("triton"), HostSyncs() as syncs:
        model(**batch.inputs, **labels).loss.backward()
    assert syncs.found == ["tolist"] and fastbert.status(model).packed == 2
