"""EncoderConfig: to and from transformers' configs of every family; configs that cannot be run are refused by field."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
from family_configs import NUM_CONFIGS, make_config
from full import left_to_full
from hf import families_axis, hf_config, hf_config_class
from tiny import edit_config

from fastbert.config import _OWN_FIELDS, EncoderConfig
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.models.auto import AutoModel, model_class


@pytest.fixture
def saved(tmp_path):
    """A folder that fastbert saved."""
    model_class("bert")(make_config("bert", 0, num_hidden_layers=1)).save_pretrained(tmp_path)
    return tmp_path


# Each family has two of them, ELECTRA the one that saw a past fault.
@left_to_full(lambda p: ([*FAMILIES].index(p["model_type"]) + p["index"]) % 4 != 1)
@pytest.mark.parametrize("index", range(NUM_CONFIGS))
@families_axis
def test_config_both_ways(model_type, index):
    unusual = {
        "hidden_dropout_prob": 0.21, "attention_probs_dropout_prob": 0.22, "classifier_dropout": 0.23,
        "initializer_range": 0.03, "pad_token_id": 5, "bos_token_id": 6, "eos_token_id": 7, "num_labels": 4,
        "problem_type": "regression", "id2label": {0: "a", 1: "b", 2: "c", 3: "d"},
    }  # fmt: skip
    unusual = {name: value for name, value in unusual.items() if name not in FAMILIES[model_type].fixed}
    for changes in ({}, unusual):
        config = make_config(model_type, index, **changes)
        entries = config.to_dict()
        theirs = hf_config(config)
        for name, value in entries.items():
            if is_worked_out(model_type, name, value):
                continue
            expected = {int(i): label for i, label in value.items()} if name == "id2label" else value
            # Gemma's window has another value in a file.
            assert expected in (getattr(theirs, name), theirs.to_dict()[name]), name
        # A field that is not written is one that the family does not have, at its default.
        for field in dataclasses.fields(config):
            name = FAMILIES[model_type].hf_names.get(field.name, field.name)
            if name not in entries and field.name not in ("extra", "own", "num_labels"):
                default = getattr(EncoderConfig.of_family(model_type), field.name)
                assert getattr(config, field.name) == default, name
        for source in (entries, theirs.to_dict()):
            again = EncoderConfig.from_dict(json.loads(json.dumps(source)))
            assert again.layer_specs == config.layer_specs and again.embeddings == config.embeddings
            assert again.embedding_width == config.embedding_width
            same = {"extra": config.extra, "id2label": config.id2label, "own": config.own}
            same["embedding_size"] = config.embedding_size
            assert again.replace(**same) == config
            kept = [name for name, value in entries.items() if not is_worked_out(model_type, name, value)]
            assert {name: again.to_dict()[name] for name in kept} == {name: entries[name] for name in kept}
    assert theirs.num_labels == 4


def is_worked_out(model_type: str, name: str, value) -> bool:
    """Whether transformers writes down what follows from other fields, where we keep None (layer_types, head_dim)."""
    return value is None and name in FAMILIES[model_type].fields


@families_axis
def test_defaults_are_those_of_transformers(model_type):
    """A config.json that holds nothing but the family's name means the same in both libraries."""
    theirs = hf_config_class(model_type)()
    ours = EncoderConfig.from_dict({"model_type": model_type})
    for name, value in ours.to_dict().items():
        expected = {int(i): label for i, label in value.items()} if name == "id2label" else value
        if is_worked_out(model_type, name, value):
            continue
        if hasattr(theirs, name):
            # ESM's config has no vocabulary until a tokenizer gives it one.
            assert getattr(theirs, name) == expected or (model_type, name) == ("esm", "vocab_size"), name
        else:
            assert name in (*_OWN_FIELDS, *FAMILIES[model_type].fields) or value is None, name
    again = EncoderConfig.from_dict({name: value for name, value in theirs.to_dict().items() if value is not None})
    assert again.layer_specs == ours.layer_specs and again.embeddings == ours.embeddings


def test_entries_that_fastbert_does_not_read_survive(tmp_path):
    config = EncoderConfig.from_dict(
        {**make_config("bert").to_dict(), "mine": [1, {"two": 3}], "torch_dtype": "float16"}
    )
    model_class("bert")(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["mine"] == [1, {"two": 3}]
    assert saved["dtype"] == "float32" and "torch_dtype" not in saved  # the old name would contradict the weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"unknown model_type 'gpt2'; fastbert has: albert, bert"),
        ({"model_type": None}, r"config\.json has no model_type"),
        ({"hidden_size": 65}, r"hidden_size 65 is not a multiple of num_attention_heads 2"),
        ({"hidden_size": "64"}, r"hidden_size is '64'; it must be an integer from 1 to 2147483647"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers is -1; it must be an integer from 0 to 10000"),
        ({"hidden_act": "mish"}, r"hidden_act 'mish' is not one of: gelu"),
        ({"hidden_act": ["gelu"]}, r"hidden_act \['gelu'\] is not one of: gelu"),
        ({"hidden_dropout_prob": 1.0}, r"hidden_dropout_prob is 1\.0; it must be at least 0 and below 1"),
        ({"classifier_dropout": "a"}, r"classifier_dropout is 'a'; it must be at least 0 and below 1"),
        ({"layer_norm_eps": None}, r"layer_norm_eps is None; it must be a number of at least 0"),
        ({"pad_token_id": 43}, r"pad_token_id 43 is outside the vocabulary of 43"),
        ({"position_embedding_type": "relative_key"}, r"position_embedding_type='relative_key' is not supported"),
        ({"is_decoder": True}, r"is_decoder=True is not supported"),
    ],
)
def test_configs_that_cannot_be_run(saved, change, message):
    edit_config(saved, **change)
    with pytest.raises(ConfigError, match=message):
        AutoModel.from_pretrained(saved)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", '"bert"'])
def test_config_files_that_are_damaged(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json (is not valid JSON|holds a)"):
        AutoModel.from_pretrained(saved)


def test_config_changes_are_checked(saved):
    with pytest.raises(ConfigError, match="hidden_act 'mish'"):
        AutoModel.from_pretrained(saved, hidden_act="mish")
    with pytest.raises(ConfigError, match="takes model_type 'bert', not 'albert'"):
        model_class("bert")(make_config("albert"))


@pytest.mark.parametrize(
    ("model_type", "message"),
    (
        ("bert", "only, and model_type is 'bert': give it to EncoderConfig.of_family"),
        ("eurobert", r"only: give it to EncoderConfig.of_family\('eurobert', num_key_value_heads=...\)"),
    ),
)
def test_fields_of_families_say_where_they_belong(model_type, message):
    with pytest.raises(
        ConfigError, match=f"num_key_value_heads is a field of eurobert, gemma3_text, qwen3, ultrabert {message}"
    ):
        EncoderConfig(model_type=model_type, num_key_value_heads=2)
    config = EncoderConfig.of_family("eurobert", num_key_value_heads=2)
    assert config.num_key_value_heads == 2
    assert config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    with pytest.raises(ConfigError, match="is a field of eurobert, gemma3_text, nomic_bert, qwen3, ultrabert only"):
        EncoderConfig(head_dim=2)
    for make in (EncoderConfig, lambda **fields: EncoderConfig.of_family("bert", **fields)):
        with pytest.raises(ConfigError, match="EncoderConfig has no field 'xyzzy'"):
            make(xyzzy=1)


@families_axis
def test_a_field_that_a_family_does_not_have_keeps_its_value(model_type):
    """Set to another one, it would be ignored, and lost in the file."""
    for name in FAMILIES[model_type].fixed:
        now = getattr(EncoderConfig.of_family(model_type), name)
        other = (
            not now if isinstance(now, bool) else f"{now}, but another" if isinstance(now, str) else (now or 0) + 0.5
        )
        with pytest.raises(ConfigError, match=rf"^{name} is .*; {model_type} has only"):
            EncoderConfig.of_family(model_type, **{name: other})
