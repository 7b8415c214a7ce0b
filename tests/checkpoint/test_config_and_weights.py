"""A config and weights that do not belong together: other layers, sizes or heads; what may be edited by hand."""

from __future__ import annotations

import json
import re

import pytest
from family_configs import config_for, make_config
from hf import make_hf
from safetensors.torch import load_file, save_file
from tiny import edit_config

from fastbert.checkpoint.pretrained import CheckpointError
from fastbert.checkpoint.saving import BESIDE
from fastbert.config import EncoderConfig
from fastbert.models.auto import AutoModel, load_encoder, model_class


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_size": 128}, r"embeddings\.word_embeddings\.weight is \(43, 64\), the config asks for \(43, 128\)"),
        ({"vocab_size": 44}, r"word_embeddings\.weight is \(43, 64\), the config asks for \(44, 64\)"),
        ({"intermediate_size": 8}, r"intermediate\.dense\.weight is \(16, 64\), the config asks for \(8, 64\)"),
    ],
)
def test_config_contradicts_weights(change, key, tmp_path):
    """Of another writer's file the tensors' shapes tell; ours names the entry that was changed."""
    model_class("bert")(make_config("bert", 0, num_hidden_layers=1, intermediate_size=16)).save_pretrained(tmp_path)
    edit_config(tmp_path, **change)
    (name, value), *_ = change.items()
    with pytest.raises(
        CheckpointError, match=rf"config\.json has {name} {value}, but model\.safetensors was saved with"
    ):
        AutoModel.from_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="the config contradicts the weights: .*" + key):
        AutoModel.from_pretrained(tmp_path)


LAYERS = {
    "bert": ({"num_hidden_layers": 2}, "encoder.layer.0, encoder.layer.1"),
    "distilbert": ({"num_hidden_layers": 2}, "transformer.layer.0, transformer.layer.1"),
    "albert": ({"num_hidden_groups": 2, "num_hidden_layers": 4}, "encoder.albert_layer_groups.0.albert_layers.0, "),
}


@pytest.mark.parametrize("head", ["Model", "TokenClassification"])
@pytest.mark.parametrize("model_type", LAYERS)
def test_another_number_of_layers(model_type, head, tmp_path, recwarn):
    """Neither fresh layers nor some left out, but where the caller asks for it, by name or by a config of his own."""
    fields, held = LAYERS[model_type]
    name = next(iter(fields))
    theirs = make_hf(config_for(model_type, head, 0, **fields), head)
    theirs.save_pretrained(tmp_path)  # another writer's: nothing but the tensors tells
    kind = model_class(model_type, head)
    for count, there in ((1, "not used"), (3, "initialised")):
        theirs_of_it = {"n_layers" if model_type == "distilbert" else name: count}
        edit_config(tmp_path, **theirs_of_it)
        message = f"it has {count} different layers, the weights hold 2: {re.escape(held)}"
        for load in (kind.from_pretrained, lambda folder: load_encoder(folder, "it", None)):
            with pytest.raises(CheckpointError, match=message):
                load(tmp_path)
        config = EncoderConfig.from_file(tmp_path / "config.json")
        for options in ({"config": config}, {name: count}):
            with pytest.warns(UserWarning, match=there):
                kind.from_pretrained(tmp_path, **options)
    weights = load_file(tmp_path / "model.safetensors")
    first, second = (f"{held.partition(',')[0][:-1]}{i}." for i in (0, 1))
    if model_type != "albert":
        moved = {key.replace(second, first[:-2] + "7."): t for key, t in weights.items()}
        save_file(moved, tmp_path / "model.safetensors", {"format": "pt"})
        edit_config(tmp_path, **{"n_layers" if model_type == "distilbert" else name: 2})
        with pytest.raises(CheckpointError, match=r"it has 2 different layers, the weights hold 2: .*layer\.7"):
            kind.from_pretrained(tmp_path)


def test_what_may_be_edited_by_hand(tmp_path):
    model = model_class("bert", "SequenceClassification")(config_for("bert", "SequenceClassification"))
    model.save_pretrained(tmp_path)
    kind, whole = type(model), (tmp_path / "config.json").read_text()
    edit_config(tmp_path, id2label={"0": "no", "1": "yes", "2": 3}, hidden_dropout_prob=0.4, dtype="bfloat16")
    edited = kind.from_pretrained(tmp_path).config
    assert (edited.id2label, edited.hidden_dropout_prob) == ({0: "no", 1: "yes", 2: "3"}, 0.4)
    for change in ({"num_attention_heads": 4}, {"hidden_size": 32}, {"tie_word_embeddings": False}):
        (tmp_path / "config.json").write_text(whole)
        edit_config(tmp_path, **change)
        (name, value), saved = *change.items(), json.loads(whole)
        message = rf"config\.json has {name} {value}, but model\.safetensors was saved with {saved[name]}"
        with pytest.raises(CheckpointError, match=message):
            kind.from_pretrained(tmp_path)
    config = EncoderConfig.from_file(tmp_path / "config.json")
    assert not kind.from_pretrained(tmp_path, config=config).config.tie_word_embeddings


def test_an_older_config_put_back_is_an_error(tmp_path):
    """Also where a killed save has left its own beside: that one is of another save than the weights."""
    model_class("bert")(make_config("bert", num_hidden_layers=3)).save_pretrained(tmp_path)
    old = (tmp_path / "config.json").read_bytes()
    model_class("bert")(make_config("bert", num_hidden_layers=2)).save_pretrained(tmp_path)
    (tmp_path / f"{BESIDE}dead").mkdir()
    (tmp_path / f"{BESIDE}dead/config.json").write_bytes(old + b"\n")
    (tmp_path / "config.json").write_bytes(old)
    with pytest.raises(CheckpointError, match=r"has num_hidden_layers 3, but model\.safetensors was saved with 2"):
        AutoModel.from_pretrained(tmp_path)
