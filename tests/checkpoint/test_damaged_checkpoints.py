"""Checkpoints that are damaged, malicious, contradictory or absent: refused with the file or the keys named."""

from __future__ import annotations

import json
import pathlib
import pickle
import warnings

import pytest
import torch
from family_configs import config_for, make_config
from full import halved
from hf import make_hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from seeds import torch_generator

from fastbert.checkpoint.pretrained import CheckpointError, read_weights
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.models.auto import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForTokenClassification,
    model_class,
)


@pytest.fixture
def saved(tmp_path):
    """A folder that fastbert saved, and the state dict that it holds."""
    model = model_class("bert")(make_config("bert", 0, num_hidden_layers=1, intermediate_size=16))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", {key: t.clone() for key, t in model.state_dict().items()}


def resave(folder, change) -> None:
    """Change the file's tensors, and write it as another program would, without checksums."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors")


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere is not a folder"):
        AutoModel.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        AutoModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(make_config("bert").to_dict()))
    with pytest.raises(CheckpointError, match=r"has no weights: none of model\.safetensors"):
        AutoModel.from_pretrained(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file is not a folder"):
        AutoModel.from_pretrained(tmp_path / "file")


@halved
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("left", [0, 5, 200, -1, -5000])
def test_truncated_weights(saved, name, left):
    folder, state = saved
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / name)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:left])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        AutoModel.from_pretrained(folder)


def test_every_damaged_byte_is_seen(saved):
    """One flipped bit, all over the header and here and there in the payload: an error, or the same tensors."""
    folder, state = saved
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    generator = torch_generator(0)
    places = [*range(0, header, 7), *torch.randint(header, len(whole), (60,), generator=generator).tolist()]
    survived = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        file.write_bytes(damaged)
        try:
            weights = read_weights(folder)
        except CheckpointError as error:
            assert "model.safetensors" in str(error)
            continue
        assert place < header, "a flipped bit of the payload was not seen"
        assert set(weights) == set(state) and all(torch.equal(weights[key], state[key]) for key in state)
        survived += 1
    assert survived < len(places) / 10


def test_damaged_payload_is_named(saved):
    folder, _ = saved
    file = folder / "model.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 64
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: tensor \S+ does not match the checksum"):
        AutoModel.from_pretrained(folder)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_damaged_pickles(saved, zipped):
    """Whatever torch.load makes of a flipped bit or a lost end, the caller sees a CheckpointError or tensors."""
    folder, state = saved
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save({key: state[key] for key in list(state)[:3]}, file, _use_new_zipfile_serialization=zipped)
    whole = file.read_bytes()
    refused = 0
    for place in [*range(0, min(len(whole), 1500), 11), *range(max(0, len(whole) - 1500), len(whole), 11)]:
        flipped = bytearray(whole)
        flipped[place] ^= 0x08
        for content in (flipped, whole[:place]):
            file.write_bytes(content)
            try:
                assert all(isinstance(t, torch.Tensor) for t in read_weights(folder).values())
            except CheckpointError as error:
                assert "pytorch_model.bin" in str(error)
                refused += 1
    assert refused > 100


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False, None], ids=["zip", "legacy", "bare"])
def test_malicious_pickle(saved, zipped, tmp_path):
    folder, _ = saved
    (folder / "model.safetensors").unlink()
    content = {"embeddings.word_embeddings.weight": Malicious(tmp_path / "owned")}
    if zipped is None:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        AutoModel.from_pretrained(folder)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [[1, 2], {"model": {"a": torch.ones(1)}}, {"step": 3}, torch.ones(2)])
def test_pickles_that_are_no_state_dict(saved, content):
    folder, _ = saved
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is no state dict"):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(saved, value):
    folder, _ = saved
    resave(folder, lambda weights: weights["pooler.dense.weight"][3].fill_(value))
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.weight holds values that are not finite"):
        AutoModel.from_pretrained(folder)


def test_float8(saved):
    """Its scales stand elsewhere, under names that every library chooses otherwise."""
    folder, state = saved
    key = "pooler.dense.weight"
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        resave(folder, lambda weights, dtype=dtype: weights.update({key: torch.ones(64, 64).to(dtype)}))
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {key} is {dtype}; of floating point fastbert"):
            AutoModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    odd = torch.ones(64, 64)
    for t in (odd.to(torch.float8_e5m2), odd.to_sparse(), odd.to("meta")):
        torch.save({**state, key: t}, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin: {key} is "):
            AutoModel.from_pretrained(folder)


def test_one_tensor_of_another_dtype(saved):
    """Converted to what most values are, which is said; a float32 LayerNorm in a model of 16 bits runs, and stays."""
    folder, state = saved
    key, norm, ids = "pooler.dense.weight", "embeddings.LayerNorm.weight", torch.tensor([[5, 6]])
    for dtype in (torch.float16, torch.float64, torch.bfloat16):
        resave(folder, lambda weights, dtype=dtype: weights.update({key: state[key].to(dtype)}))
        with pytest.warns(UserWarning, match=rf"converted to torch.float32: {key} \({dtype}\)"):
            model = AutoModel.from_pretrained(folder)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert torch.equal(model.pooler.dense.weight, state[key].to(dtype).float()) and model(ids)
    half = {name: t if name == norm else t.bfloat16() for name, t in state.items()}
    resave(folder, lambda weights: weights.update(half))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModel.from_pretrained(folder)
        assert {p.dtype for p in AutoModel.from_pretrained(folder, dtype="fp32").parameters()} == {torch.float32}
    assert {name: p.dtype for name, p in model.named_parameters()} == {name: t.dtype for name, t in half.items()}
    resave(folder, lambda weights: weights.update({**state, key: torch.full((64, 64), 1e300, dtype=torch.float64)}))
    with pytest.raises(CheckpointError, match=rf"tensor {key} holds values that are not finite in torch.float32"):
        AutoModel.from_pretrained(folder)
    resave(folder, lambda weights: weights.update({key: torch.full((64, 64), 1e6)}))
    with pytest.raises(CheckpointError, match=rf"tensor {key} holds values that are not finite in torch.float16"):
        AutoModel.from_pretrained(folder, dtype="fp16")


def test_another_models_weights(saved):
    folder, _ = saved
    save_file({"transformer.h.0.attn": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"it has 1 different layers, the weights hold 0: none, but transformer\.h\.0\.attn"
    ):
        AutoModel.from_pretrained(folder)


def test_heads_that_a_family_does_not_have(tmp_path):
    make_hf(config_for("roberta", "Model"), "Model").save_pretrained(tmp_path)
    for auto in (AutoModelForPreTraining, AutoModelForNextSentencePrediction):
        with pytest.raises(ConfigError, match=f"roberta has no head {auto.head}; it has: MaskedLM, MultipleChoice"):
            auto.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "index",
    ["", "{}", "[]"]
    + [f'{{"weight_map": {entry}}}' for entry in ("3", '{"a": "gone.safetensors"}', '{"a": "../x.bin"}', '{"a": 7}')],
)
def test_damaged_shard_indices(saved, index):
    folder, _ = saved
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        AutoModel.from_pretrained(folder)


def test_a_shard_without_its_tensors(saved):
    folder, state = saved
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    weight_map = {**dict.fromkeys(state, "part.safetensors"), "lost.weight": "part.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"names tensors that its shards do not hold: lost\.weight"):
        AutoModel.from_pretrained(folder)


def test_folder_that_cannot_be_written(saved, tmp_path):
    model = AutoModel.from_pretrained(saved[0])
    (tmp_path / "file").write_text("whole")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            model.save_pretrained(folder)
    assert (tmp_path / "file").read_text() == "whole"


def test_labels_of_a_checkpoint_and_of_the_caller(tmp_path):
    config = config_for("bert", "TokenClassification", 0, id2label={0: "x", 1: "y", 2: "z"})
    make_hf(config, "TokenClassification").save_pretrained(tmp_path)
    assert EncoderConfig.from_file(tmp_path / "config.json").id2label == {0: "x", 1: "y", 2: "z"}
    assert AutoModelForTokenClassification.from_pretrained(tmp_path).config.num_labels == 3
    with pytest.raises(CheckpointError, match=r"classifier\.weight is \(3, 64\), the config asks for \(5, 64\)"):
        AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=5)
    with pytest.warns(UserWarning, match="cls"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["", "5", "[1]", "{}", '{"sha256": 5, "shapes": {}}', "[" * 100_000])
def test_metadata_that_is_damaged(text, saved):
    folder, weights = saved
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    for key in ("fastbert_config", "fastbert_crc32"):
        if (key, text) == ("fastbert_crc32", "{}"):
            continue  # nothing to compare
        save_file(weights, folder / "model.safetensors", {**metadata, key: text})
        with pytest.raises(CheckpointError, match=rf"model\.safetensors.*({key}|sha256|crc)"):
            AutoModel.from_pretrained(folder)
