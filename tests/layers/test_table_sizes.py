"""Models check ids by the rows of the tables that are there, on every route, whatever their config says."""

from __future__ import annotations

import copy

import pytest
import torch
from family_configs import make_config
from hf import FAMILIES
from seeds import manual_seed
from torch import nn

import fastbert
from fastbert.backend import use_backend
from fastbert.errors import InputError
from fastbert.models.classes import CLASSES
from fastbert.models.inputs import TableSizes
from fastbert.sentences.text_model import position_limit


@pytest.fixture
def unchecked():
    fastbert.check_inputs(False)
    yield
    fastbert.check_inputs(True)


TABLES = {
    "input_ids": "word_embeddings",
    "position_ids": "position_embeddings",
    "token_type_ids": "token_type_embeddings",
}
ROWS = {"input_ids": "vocab_size", "position_ids": "max_position_embeddings", "token_type_ids": "type_vocab_size"}


def make_model(model_type="bert", head="Model", **fields):
    manual_seed(0)
    return CLASSES[model_type, head](make_config(model_type, num_hidden_layers=2).replace(**fields)).eval()


def with_rows(model, name: str, rows: int):
    """`model` with a table of so many rows in place of the one for `name`, and a config that knows nothing of it."""
    embeddings, path = model.base_model.embeddings, TABLES[name]
    old = getattr(embeddings, path)
    setattr(embeddings, path, nn.Embedding(rows, old.embedding_dim, padding_idx=old.padding_idx))
    return model


def full(name: str, value: int) -> dict[str, torch.Tensor]:
    """A padded batch of ordinary ids, but for `name`, the last of which are `value`."""
    given = {n: torch.zeros(2, 4, dtype=torch.int64) for n in TABLES}
    given[name][:, -1] = value
    return given


def packed(given):
    return {n: t.flatten() for n, t in given.items()} | {"cu_seqlens": torch.tensor([0, 4, 8]), "max_seqlen": 4}


@pytest.mark.parametrize("change", (-1, 1, 3000))
@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_was_replaced(name, change):
    """Smaller or larger: its last row is served, with the bits and gradients of a model made so; the next is not."""
    rows = getattr(make_config("bert"), ROWS[name]) + change
    changed, made = with_rows(make_model(), name, rows), make_model(**{ROWS[name]: rows})
    made.load_state_dict(changed.state_dict())
    given = full(name, rows - 1)
    for inputs in (given, packed(given)):
        outputs = [model(**inputs)[0] for model in (changed, made)]
        assert torch.equal(*outputs)
        for out in outputs:
            out.square().sum().backward()
        for one, other in zip(changed.parameters(), made.parameters(), strict=True):
            assert one.grad is None or torch.equal(one.grad, other.grad)
    for value in (rows, -1, 10**6):
        bad = full(name, value)
        message = f"{name} holds {value}; valid values are 0 to {rows - 1}"
        for run, inputs in ((changed, bad), (changed, packed(bad)), (changed.encode_packed, packed(bad))):
            with pytest.raises(InputError, match=message):
                run(**inputs)


@pytest.mark.parametrize("model_type", [m for m in FAMILIES if make_config(m).embeddings.position is not None])
def test_lengths_go_by_the_position_table(model_type):
    """As many tokens as it has rows for; RoBERTa's positions begin beyond the pad id."""
    model = make_model(model_type)
    first = model.config.pad_token_id + 1 if model.family.positions_from_ids else 0
    for rows in (12, 31):
        with_rows(model, "position_ids", rows)
        assert position_limit(model) == rows - first
        model(torch.full((1, rows - first), 5))
        ids = torch.full((1, rows - first + 1), 5)
        message = f"a sequence of {ids.numel()} tokens is longer than the position table, which has {rows - first}"
        with pytest.raises(InputError, match=message):
            model(ids)
        with pytest.raises(InputError, match=message):
            model(ids[0], cu_seqlens=torch.tensor([0, ids.numel()]))


def test_what_config_says_does_not_count():
    model = make_model()
    model.config = model.config.replace(vocab_size=10**9, max_position_embeddings=10**9, type_vocab_size=10**9)
    for name, rows in zip(TABLES, (43, 20, 2), strict=True):
        with pytest.raises(InputError, match=f"{name} holds {rows}; valid values are 0 to {rows - 1}"):
            model(**full(name, rows))
    assert model.table_sizes() == TableSizes(43, 20, 2, 64)


def test_tables_of_another_width():
    """All of them make another model; one of them is an error, that names both."""
    model = make_model()
    embeddings = model.embeddings
    embeddings.word_embeddings = nn.Embedding(43, 48)
    for backend in ("torch", None):
        with (
            use_backend(backend or "auto"),
            pytest.raises((ValueError, RuntimeError), match=r"word has shape [(\[]43, 48"),
        ):
            model(torch.ones(1, 4).long())
    with pytest.raises(InputError, match="inputs_embeds has width 48; the model's is 64"):
        model(inputs_embeds=torch.ones(1, 4, 48))
    embeddings.position_embeddings, embeddings.token_type_embeddings = nn.Embedding(20, 48), nn.Embedding(2, 48)
    with pytest.raises(InputError, match="inputs_embeds has width 64; the model's is 48"):
        model(inputs_embeds=torch.ones(1, 4, 64))


def test_a_leaf_that_is_no_table_goes_by_the_config():
    """It is called; what it cannot look up it refuses by itself."""

    class Wrapped(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.table = nn.Embedding(rows, 64)

        def forward(self, ids):
            return self.table(ids)

    model = make_model()
    model.embeddings.word_embeddings = Wrapped(30)
    model(**full("input_ids", 29))
    with pytest.raises(IndexError):
        model(**full("input_ids", 30))
    with pytest.raises(InputError, match="input_ids holds 43; valid values are 0 to 42"):
        model(**full("input_ids", 43))


def test_labels_go_by_the_decoder_and_the_classifier():
    ids = torch.ones(1, 4).long()
    model = make_model(head="MaskedLM")
    model.cls.predictions.decoder = nn.Linear(64, 30)
    assert model(ids, labels=ids * 29).loss.isfinite()
    with pytest.raises(InputError, match="labels holds 30; valid values are 0 to 29"):
        model(ids, labels=ids * 30)
    model = make_model(head="TokenClassification")
    model.classifier = nn.Linear(64, 9)
    assert model(ids, labels=ids * 8).loss.isfinite()
    with pytest.raises(InputError, match="labels holds 9; valid values are 0 to 8"):
        model(ids, labels=ids * 9)


@pytest.mark.full
@torch.no_grad()
def test_unchecked_and_compiled_models_raise_on_a_cpu(unchecked):
    """By the op itself, since nothing looks before."""
    torch.compiler.reset()  # or what other tests compiled makes more of its sizes dynamic
    model = make_model(num_hidden_layers=1)
    compiled = torch.compile(model.encode_packed, backend="aot_eager", fullgraph=True)
    for backend in ("torch", "cpu"):
        with use_backend(backend):
            good = packed(full("input_ids", 1))
            assert torch.equal(compiled(**good), model.encode_packed(**good))
            for name in TABLES:
                for run in (model.encode_packed, compiled):
                    with pytest.raises(IndexError, match=f"{name} holds 5000|index out of range"):
                        run(**packed(full(name, 5000)))


def test_copies_of_a_model_have_tables_of_their_own():
    model = make_model()
    larger = with_rows(copy.deepcopy(model), "input_ids", 60)
    larger(**full("input_ids", 59))
    with pytest.raises(InputError, match="valid values are 0 to 42"):
        model(**full("input_ids", 59))
