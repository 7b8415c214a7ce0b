"""Configs that are assigned, tables that are resized, and classes that are transformers' where it is imported."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers
from family_configs import config_for
from full import halved
from hf import FAMILIES, families_axis, hf_class, hf_config, make_hf, make_ours
from kinds import of_few_kinds
from precise import assert_as_theirs
from seeds import manual_seed

import fastbert
from fastbert import ConfigError
from fastbert.families import FAMILIES as DATA


def test_an_entry_is_read_and_assigned():
    config = fastbert.EncoderConfig(num_hidden_layers=2)
    config.num_hidden_layers, config.use_cache, config.anything = 3, False, [1]
    assert len(config.layer_specs) == 3 and config.to_dict()["anything"] == [1] and config.is_encoder_decoder is False
    config.num_labels = 3
    assert config.id2label == {i: f"LABEL_{i}" for i in range(3)} and config.label2id["LABEL_2"] == 2
    config.id2label = {"0": "a", "1": "b"}
    assert config.num_labels == 2 and config.id2label == {0: "a", 1: "b"}
    for name, value in {"hidden_size": 7, "pad_token_id": -1, "label2id": {"x": 0}, "hidden_act": "?"}.items():
        with pytest.raises(ConfigError):
            setattr(config, name, value)
    with pytest.raises(AttributeError, match="has no field 'nothing'"):
        _ = config.nothing
    for other in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        fastbert.EncoderConfig.from_dict(config.to_dict()),
    ):
        assert other == config and other.anything == [1]
    named = fastbert.EncoderConfig.of_family("distilbert")
    named.n_layers = 2
    assert named.num_hidden_layers == named.n_layers == 2


def test_what_a_model_computes_by_stays():
    config = fastbert.EncoderConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    model = fastbert.BertForSequenceClassification(config)
    for name in ("num_hidden_layers", "hidden_dropout_prob", "vocab_size"):
        with pytest.raises(ConfigError, match=f"{name} cannot be assigned: a model of this config is there"):
            setattr(model.config, name, 0.0 if "prob" in name else 3)
    config.num_hidden_layers = 5  # the caller's own, for the next model
    assert model.config.num_hidden_layers == 1 and model.config is model.base_model.config
    model.config.problem_type, model.config.pad_token_id = "regression", 3
    assert model.base_model.config.problem_type == "regression"
    roberta = fastbert.RobertaModel(config_for("roberta", "Model"))
    with pytest.raises(ConfigError, match="counts positions by it"):
        roberta.config.pad_token_id = 9


def test_relatives():
    model = fastbert.BertForMaskedLM(config_for("bert", "MaskedLM"))
    out = model(torch.tensor([[1, 2]]))
    assert isinstance(model, transformers.PreTrainedModel) and isinstance(out, transformers.utils.ModelOutput)
    assert model.can_generate() is False and model.is_activation_checkpointing is False
    model.activation_checkpointing_enable()
    assert model.is_gradient_checkpointing
    theirs = make_hf(config_for("bert", "MaskedLM"), "MaskedLM")
    for options in ({}, {"exclude_embeddings": True}, {"only_trainable": True}):
        assert model.num_parameters(**options) == theirs.num_parameters(**options)


@pytest.mark.full  # the tests themselves import both, and test_imports.py looks at what an import takes
@pytest.mark.parametrize("order", ("fastbert, transformers", "transformers, fastbert"))
def test_relatives_in_either_order_and_not_before(order):
    program = f"""
        import {order}, sys
        config = fastbert.EncoderConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8)
        model = fastbert.BertModel(config)
        assert "transformers.modeling_utils" not in sys.modules
        assert isinstance(model, transformers.PreTrainedModel)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


TABLES = ((60, None, True), (43, 16, True), (30, None, True), (60, None, False), (None, 64, True))


def bias_of(model):
    return model.get_output_embeddings().bias


@halved
@pytest.mark.parametrize("tied", (True, False))
@pytest.mark.parametrize("rows,multiple,mean", TABLES)
def test_resized_as_transformers(rows, multiple, mean, tied):
    config = config_for("bert", "MaskedLM", tie_word_embeddings=tied)
    theirs = make_hf(config, "MaskedLM")
    ours = make_ours(config, "MaskedLM", theirs)
    for model in (ours, theirs):
        manual_seed(0)
        table = model.resize_token_embeddings(rows, multiple, mean)
        assert table is model.get_input_embeddings()
    assert ours.config.vocab_size == theirs.config.vocab_size == table.weight.shape[0] != 43
    kept = min(43, table.weight.shape[0])
    pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
    for (name, a), (other, b) in pairs:
        assert name == other and a.shape == b.shape, name
        assert torch.equal(a, b) if a.shape[:1] != table.weight.shape[:1] else torch.equal(a[:kept], b[:kept]), name
    if mean:  # around the mean of the old rows, by 1e-9 of their spread
        assert (ours.get_input_embeddings().weight - theirs.get_input_embeddings().weight).abs().max() < 1e-3
        assert (bias_of(ours) - bias_of(theirs)).abs().max() < 1e-3
    assert tied == (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight)
    ids = torch.randint(table.weight.shape[0], (2, 5))
    ours(ids, labels=ids).loss.backward()
    assert ours(ids).logits.shape[-1] == table.weight.shape[0]


@of_few_kinds()
@families_axis
def test_every_family_resizes_and_is_loaded_again(model_type, tmp_path):
    head = "MaskedLM" if "MaskedLM" in DATA[model_type].heads else "Model"
    config = config_for(model_type, head, num_hidden_layers=2)
    ours = make_ours(config, head, make_hf(config, head)).eval()
    assert FAMILIES and ours.resize_token_embeddings(50).weight.shape[0] == 50
    ours.save_pretrained(tmp_path)
    ids = torch.tensor([[49, 48, 5, 6]])
    expected = ours(ids)[0]
    assert torch.equal(type(ours).from_pretrained(tmp_path)(ids)[0], expected)
    theirs = hf_class(model_type, head).from_pretrained(tmp_path).eval()
    assert theirs.config.vocab_size == 50
    assert_as_theirs(ours, theirs, lambda model: model(ids)[0])


def test_tables_are_replaced():
    config = config_for("bert", "MaskedLM", tie_word_embeddings=False)
    model = fastbert.BertForMaskedLM(config)
    words, decoder = torch.nn.Embedding(43, 64), torch.nn.Linear(64, 43)
    model.set_input_embeddings(words)
    model.set_output_embeddings(decoder)
    assert model.get_input_embeddings() is words and model.get_output_embeddings() is decoder
    assert model.cls.predictions.bias is decoder.bias
    assert fastbert.BertModel(config).get_output_embeddings() is None
    model.set_input_embeddings(torch.nn.Sequential(words))
    with pytest.raises(TypeError, match="the word table is a Sequential"):
        model.resize_token_embeddings(50)


def test_a_config_of_transformers_makes_a_model():
    theirs = hf_config(config_for("bert", "Model"))
    assert fastbert.BertModel(theirs).config.hidden_size == theirs.hidden_size
