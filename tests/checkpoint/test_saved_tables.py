"""save_pretrained of models whose tables were replaced: what is loaded, here or by transformers, is what was saved."""

from __future__ import annotations

import warnings

import pytest
import torch
from family_configs import config_for, make_config
from full import halved, left_to_full
from hf import FAMILIES, hf_class, is_left_out, randomise
from kinds import of_few_kinds
from test_checkpoints import assert_same_state, load_hf
from torch import nn

from fastbert import families
from fastbert.errors import ConfigError
from fastbert.families.schema import value_of
from fastbert.layers.embeddings import ScaledEmbedding
from fastbert.layers.leaves import get_leaf, set_module
from fastbert.models.auto import model_class
from fastbert.models.masked_lm import MaskedLMHeadModel
from fastbert.testing.numerics import assert_close_to_reference

IDS = torch.tensor([[3, 9, 4, 1, 7], [5, 2, 8, 6, 11]])
FIELDS = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
MASKED = [kind for kind in FAMILIES if "MaskedLM" in families.FAMILIES[kind].heads]
CASES = [
    (kind, head, role)
    for kind in FAMILIES
    for head in ("Model", "MaskedLM", "TokenClassification")
    for role in FIELDS
    if getattr(make_config(kind).embeddings, role) is not None
    and (head == "Model" or head in families.FAMILIES[kind].heads)
]


def make(model_type: str, head: str, **fields):
    return randomise(model_class(model_type, head)(config_for(model_type, head, 0, **fields))).eval()


def replace_table(model, role: str, more: int) -> None:
    """A table of more rows, or fewer, and nothing else."""
    path = getattr(model.config.embeddings, role)
    old = get_leaf(model.base_model, path)
    rows, width = old.num_embeddings + more, old.embedding_dim
    table = nn.Embedding(rows, width, old.padding_idx)
    if isinstance(old, ScaledEmbedding):
        table = ScaledEmbedding(rows, width, old.scale, old.padding_idx)
    set_module(model.base_model, path, table)


def has_bias(model) -> bool:
    """Whether the decoder has one of its own."""
    return value_of(model.masked_lm.decoder_bias, model.config)


def replace_words(model, more: int) -> None:
    """Another vocabulary, in the word table and all that a head has of it."""
    replace_table(model, "word", more)
    if not isinstance(model, MaskedLMHeadModel):
        return
    names, rows = model.masked_lm, model.config.vocab_size + more
    set_module(model, names.decoder, nn.Linear(model.decoder_width(model.config), rows, bias=has_bias(model)))
    if names.bias is not None:
        parent, _, leaf = names.bias.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(torch.randn(rows)))
    model.tie_weights()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)[0]


def assert_round_trip(model, folder) -> None:
    model.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = type(model).from_pretrained(folder)
    assert_same_state(loaded, model)
    assert torch.equal(logits(loaded), logits(model))
    head = type(model).__name__.removeprefix(model.family.classes).removeprefix("For")
    assert_same_state(load_hf(hf_class(model.config.model_type, head), folder), model)


def is_taken_by_others(p) -> bool:
    """MaskedLM, which is tied to the table, has one of the word table's cases, and less often the others'; a head that
    is not has a family's own prefix, no more, and comes every eighth time.
    """
    if p["head"] == "MaskedLM":
        seldom = is_left_out(p, of=3) and is_left_out(p, 2, of=3)
        return (p["more"] < 0) == is_left_out(p) or (p["role"] != "word" and seldom)
    return p["more"] < 0 or (p["head"] == "TokenClassification" and p["role"] != "word") or is_left_out(p, of=8)


@halved
@of_few_kinds()
@left_to_full(is_taken_by_others)
@pytest.mark.parametrize("more", (-1, 7))
@pytest.mark.parametrize(("model_type", "head", "role"), CASES)
def test_a_replaced_table(model_type, head, role, more, tmp_path):
    model = make(model_type, head)
    if role == "word":
        replace_words(model, more)
    else:
        replace_table(model, role, more if role == "position" or more > 0 else 0)
    before = model.config
    assert_round_trip(model, tmp_path)
    rows = get_leaf(model.base_model, getattr(model.config.embeddings, role)).num_embeddings
    assert vars(type(model).from_pretrained(tmp_path).config)[FIELDS[role]] == rows
    assert model.config is before


def other_word_table(model):
    replace_table(model, "word", 7)


def other_decoder(model):
    model.cls.predictions.decoder = nn.Linear(64, 30)


def other_width(model):
    model.bert.embeddings.position_embeddings = nn.Embedding(20, 48)


def fewer_words_than_the_pad_id(model):
    model.config = model.bert.config = model.config.replace(pad_token_id=40)
    replace_words(model, -10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_word_table, r"nothing was saved.*: cls\.predictions\.decoder\.weight is \(43, 64\), not \(50, 64\), "),
        (other_decoder, r"nothing was saved.*: .*decoder\.weight is \(30, 64\), not \(43, 64\)"),
        (
            other_width,
            r"nothing was saved.*: bert\.embeddings\.position_embeddings\.weight is \(20, 48\), not \(20, 64\)",
        ),
        (fewer_words_than_the_pad_id, r"pad_token_id 40 is outside the vocabulary of 33"),
    ],
)
def test_what_no_config_describes_is_refused_before_anything_is_written(change, message, tmp_path):
    model = make("bert", "MaskedLM")
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    change(model)
    with pytest.raises(ConfigError, match=message):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@of_few_kinds()
@halved
@pytest.mark.parametrize("model_type", [kind for kind in MASKED if families.FAMILIES[kind].heads["MaskedLM"].may_tie])
@pytest.mark.parametrize("shared", ("nothing", "the weight"))
def test_a_decoder_that_is_no_longer_tied(model_type, shared, tmp_path):
    """It was left out, and the word table loaded in its place."""
    model = make(model_type, "MaskedLM")
    decoder = nn.Linear(model.config.embedding_width, model.config.vocab_size, bias=has_bias(model))
    if shared == "the weight":
        decoder.weight = model.get_input_embeddings().weight
    set_module(model, model.masked_lm.decoder, decoder)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same_state(loaded, model)
    assert torch.equal(logits(loaded), logits(model))
    assert_same_state(load_hf(hf_class(model_type, "MaskedLM"), tmp_path), model)


LABELLED = [
    *(
        (kind, head)
        for kind in FAMILIES
        for head in ("SequenceClassification", "TokenClassification")
        if head in families.FAMILIES[kind].heads
    ),
    ("albert", "PreTraining"),
]


@left_to_full(lambda p: is_left_out(p, of=8))
@pytest.mark.parametrize(("model_type", "head"), LABELLED)
def test_another_classifier(model_type, head, tmp_path):
    model = make(model_type, head, id2label={0: "a", 1: "b", 2: "c"})
    old = get_leaf(model, model.label_leaf)
    set_module(model, model.label_leaf, nn.Linear(old.in_features, 5, bias=old.bias is not None))
    assert_round_trip(model, tmp_path)
    assert type(model).from_pretrained(tmp_path).config.id2label[4] == "LABEL_4"


def test_the_same_labels_keep_their_names(tmp_path):
    model = make("bert", "TokenClassification", id2label={0: "a", 1: "b", 2: "c"})
    model.classifier = nn.Linear(64, 3)
    assert_round_trip(model, tmp_path)
    assert type(model).from_pretrained(tmp_path).config.id2label == {0: "a", 1: "b", 2: "c"}


def test_equal_values_stay_tied(tmp_path):
    model = make("bert", "MaskedLM")
    model.cls.predictions.decoder.weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    assert_round_trip(model, tmp_path)
    assert type(model).from_pretrained(tmp_path).config.tie_word_embeddings


def test_a_leaf_that_is_no_table_leaves_the_config_as_it_is(tmp_path):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(30, 64)

    model = make("bert", "Model")
    model.embeddings.word_embeddings = Wrapped()
    assert model.live_config == model.config


WITH_LONE_BIAS = [kind for kind in MASKED if make(kind, "MaskedLM").lone_bias is not None]


@pytest.mark.parametrize("model_type", WITH_LONE_BIAS)
def test_a_decoder_that_was_replaced_by_one_with_a_bias_keeps_it_beside_the_lone_bias(model_type):
    model = make(model_type, "MaskedLM")
    decoder = model.get_output_embeddings()
    with torch.no_grad():
        before = model(IDS).logits
        new = nn.Linear(decoder.in_features, decoder.out_features)
        new.weight.copy_(decoder.weight)
        set_module(model, model.masked_lm.decoder, new)
        found = model(IDS).logits
    exact = before.double() + new.bias.detach().double()
    assert_close_to_reference(found, exact, before + new.bias.detach())
