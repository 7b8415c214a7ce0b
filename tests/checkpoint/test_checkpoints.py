"""Checkpoints both ways, bit for bit, for every family and head; old and other writers' files; tied weights; dtypes."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings

import pytest
import torch
import transformers
from batches import make_batch
from family_configs import config_for, make_config
from full import left_to_full, thinned
from hf import families_axis, hf_class, is_left_out, make_hf, models_axis
from kinds import of_every_kind, of_few_kinds
from safetensors import safe_open
from safetensors.torch import save_file

from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.families.schema import MaskedLM, PreTraining
from fastbert.models.auto import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
from fastbert.models.classes import CLASSES


def ties(model_type: str, head: str) -> bool:
    data = FAMILIES[model_type].heads.get(head)
    data = data.masked_lm if isinstance(data, PreTraining) else data
    return isinstance(data, MaskedLM) and data.may_tie


TIED = sorted(key for key in CLASSES if ties(*key))
tied_axis = pytest.mark.parametrize(("model_type", "head"), TIED, ids=[f"{m}-{h}" for m, h in TIED])


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def assert_same_state(model, expected) -> None:
    state = expected if isinstance(expected, dict) else expected.state_dict()
    ours = model.state_dict()
    assert set(ours) == set(state)
    for key, tensor in state.items():
        assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key


def assert_tied(model) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert model.tied_keys()
    for copied, original in model.tied_keys().items():
        assert parameters[copied] is parameters[original], copied


def load_hf(cls, folder):
    """transformers' model of a folder, which must hold exactly its keys."""
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], (kind, info[kind])
    return model


def save_folder(path, config, weights: dict[str, torch.Tensor], dtype: torch.dtype | None = None):
    """A checkpoint folder that holds just these weights."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    unshared = {key: tensor.detach().clone().to(dtype or tensor.dtype) for key, tensor in weights.items()}
    save_file(unshared, path / "model.safetensors")
    return path


def file_keys(folder) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def is_taken_by_others(p) -> bool:
    """Of the base model and the heads that could be tied, tied and untied, every fourth comes: so each family has one.
    Other heads come every sixteenth time.
    """
    if (p["model_type"], p["head"]) in TIED or p["head"] == "Model":
        return is_left_out(p, p["index"], of=4)
    return p["index"] == 2 or is_left_out(p, of=16)


@left_to_full(is_taken_by_others)
@pytest.mark.parametrize("index", [0, 2], ids=["tied", "untied"])
@models_axis
def test_both_ways_bit_for_bit(model_type, head, index, tmp_path):
    """transformers -> fastbert -> transformers: equal state dicts, equal key sets in the files, nothing to report."""
    config = config_for(model_type, head, index)
    theirs = make_hf(config, head)
    theirs.save_pretrained(tmp_path / "theirs")
    with no_warning():
        ours = CLASSES[model_type, head].from_pretrained(tmp_path / "theirs")
    assert not ours.missing_keys and not ours.unexpected_keys and not ours.training
    assert_same_state(ours, theirs)
    ours.save_pretrained(tmp_path / "ours")
    if model_type == "esm":  # transformers' own files have gamma and beta, and a layer "*"
        assert file_keys(tmp_path / "ours") == set(ours.state_dict()) - set(ours.tied_keys())
    else:
        assert file_keys(tmp_path / "ours") == file_keys(tmp_path / "theirs")
    assert_same_state(load_hf(type(theirs), tmp_path / "ours"), theirs)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").architectures == [type(theirs).__name__]
    with no_warning():
        assert_same_state(CLASSES[model_type, head].from_pretrained(tmp_path / "ours"), theirs)


@pytest.mark.parametrize("model_type", ("bert", "roberta", "distilbert", "albert"))
def test_without_pooler(model_type, tmp_path):
    config = config_for(model_type, "Model", 0)
    make_hf(config, "Model").save_pretrained(tmp_path)
    kind, ids = CLASSES[model_type, "Model"], torch.tensor([[5, 6, 7]])
    with no_warning():
        ours = kind.from_pretrained(tmp_path, add_pooling_layer=False)
    assert not any("pooler" in name for name, _ in ours.named_parameters())
    out, whole = ours(ids), kind.from_pretrained(tmp_path)(ids)
    assert out.pooler_output is None and torch.equal(out.last_hidden_state, whole.last_hidden_state)


@left_to_full(lambda p: is_left_out(p, of=16))  # what is fresh is drawn by the same function in all heads
@models_axis
def test_fresh_weights_are_saved_for_transformers(model_type, head, tmp_path):
    """A model that fastbert initialised: every parameter is set, and transformers reads it whole."""
    model = CLASSES[model_type, head](config_for(model_type, head))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    word = model.get_input_embeddings()
    assert (word.weight[word.padding_idx] == 0).all()
    model.save_pretrained(tmp_path)
    assert_same_state(load_hf(hf_class(model_type, head), tmp_path), model)


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_sharded_safetensors(family, tmp_path):
    theirs = make_hf(config_for(family, "MaskedLM"), "MaskedLM")
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_state(AutoModelForMaskedLM.from_pretrained(tmp_path), theirs)


@of_every_kind()
@thinned(4)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@tied_axis
def test_pickled_state_dict(model_type, head, zipped, tmp_path):
    """pytorch_model.bin of either format; it holds both names of tied tensors, which share storage."""
    theirs = make_hf(config_for(model_type, head), head)
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with no_warning():
        ours = CLASSES[model_type, head].from_pretrained(tmp_path)
    assert_same_state(ours, theirs)
    assert_tied(ours)
    pointers = [p.data_ptr() for p in ours.parameters()]
    assert len(set(pointers)) == len(pointers)


def test_sharded_pickles(tmp_path):
    theirs = make_hf(config_for("bert", "MaskedLM"), "MaskedLM")
    theirs.config.save_pretrained(tmp_path)
    items = list(theirs.state_dict().items())
    shards = {"pytorch_model-1.bin": dict(items[:9]), "pytorch_model-2.bin": dict(items[9:])}
    for name, part in shards.items():
        torch.save(part, tmp_path / name)
    index = {"weight_map": {key: name for name, part in shards.items() for key in part}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same_state(AutoModelForMaskedLM.from_pretrained(tmp_path), theirs)


def test_old_names(tmp_path):
    """gamma and beta, the position_ids buffer, and DataParallel's `module.`, all in one file."""
    theirs = make_hf(config_for("bert", "MaskedLM"), "MaskedLM")
    old = {"bert.embeddings.position_ids": torch.arange(20)[None]}
    for key, tensor in theirs.state_dict().items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[key] = tensor
    folder = save_folder(tmp_path / "old", config_for("bert", "MaskedLM"), {f"module.{k}": t for k, t in old.items()})
    with no_warning():
        assert_same_state(AutoModelForMaskedLM.from_pretrained(folder), theirs)


@of_few_kinds()
@families_axis
def test_base_checkpoint_into_a_head_and_back(model_type, tmp_path):
    """The base model's prefix is added and taken away; what is missing or not used is named in a warning."""
    head = "SequenceClassification"
    base, theirs = (make_hf(config_for(model_type, h), h) for h in ("Model", head))
    base.save_pretrained(tmp_path / "base")
    theirs.save_pretrained(tmp_path / "head")
    pooled = FAMILIES[model_type].heads[head].pooling_of(make_config(model_type)) == "pooler"
    out = FAMILIES[model_type].heads[head].out
    with pytest.warns(UserWarning, match=rf"initialised: .*{out}"):
        ours = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5)
    assert ours.config.num_labels == 5
    kept = {k: t for k, t in base.state_dict().items() if pooled or not k.startswith("pooler")}
    state, prefix = ours.base_model.state_dict(), ours.family.prefix + "."
    assert all(torch.equal(state[key], tensor) for key, tensor in kept.items())
    assert all(key.startswith("pooler") for key in set(state) - set(kept))  # which some base models do not have
    assert ours.missing_keys == sorted(k for k in ours.state_dict() if k.removeprefix(prefix) not in kept)
    assert all(torch.isfinite(p).all() and not p.is_meta for p in ours.parameters())
    for key in ours.missing_keys:
        std = ours.state_dict()[key].std()
        assert std == 0 if key.endswith(("bias", "norm.weight")) else 0 < std < 2 * ours.config.initializer_range, key

    with pytest.warns(UserWarning, match=rf"not used: .*{out}"):
        encoder = AutoModel.from_pretrained(tmp_path / "head")
    for key, tensor in theirs.state_dict().items():
        if key.startswith(prefix):
            found = encoder.state_dict().get(key.removeprefix(prefix))
            assert torch.equal(found, tensor) if found is not None else not ours.family.has_pooler, key
    assert not pooled or not encoder.missing_keys


@of_every_kind()
@left_to_full(lambda p: is_left_out(p, of=4))
@tied_axis
def test_tied_weights_under_one_name(model_type, head, tmp_path):
    """Whichever name of a tied tensor a file holds, both get it, as one Parameter that stays one in any dtype."""
    config = config_for(model_type, head)
    theirs = make_hf(config, head)
    tied = CLASSES[model_type, head](config).tied_keys()
    state = theirs.state_dict()
    for name, dropped in (("copies", set(tied.values())), ("originals", set(tied))):
        folder = save_folder(tmp_path / name, config, {k: t for k, t in state.items() if k not in dropped})
        with no_warning():
            ours = CLASSES[model_type, head].from_pretrained(folder)
        assert_same_state(ours, state)
        assert_tied(ours)
    for converted in (ours.to(torch.bfloat16), copy.deepcopy(ours), ours.double()):
        assert_tied(converted)
    batch = make_batch(config)
    labels = {"labels": batch.inputs["input_ids"].where(batch.real, -100)}
    if head == "PreTraining":
        pair = config.family.heads["PreTraining"].pair_label
        labels[pair] = torch.zeros(6, dtype=torch.long)
    ours(**batch.inputs, **labels).loss.backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    assert_tied(ours)


@of_every_kind()
@left_to_full(lambda p: is_left_out(p, 2, of=4))
@tied_axis
def test_two_tensors_where_the_config_ties(model_type, head, tmp_path):
    """As transformers: a checkpoint whose decoder is not the word embedding keeps both, and a warning names it."""
    untied = config_for(model_type, head, tie_word_embeddings=False)
    theirs = make_hf(untied, head)
    folder = save_folder(tmp_path / "x", untied.replace(tie_word_embeddings=True), theirs.state_dict())
    with pytest.warns(UserWarning, match=r"not tied.*weight"):
        ours = CLASSES[model_type, head].from_pretrained(folder)
    assert_same_state(ours, theirs)
    assert_same_state(type(theirs).from_pretrained(folder), theirs)
    ours.save_pretrained(tmp_path / "y")
    with no_warning():
        assert_same_state(CLASSES[model_type, head].from_pretrained(tmp_path / "y"), theirs)
    assert_same_state(load_hf(type(theirs), tmp_path / "y"), theirs)


def test_dtypes(tmp_path):
    config = config_for("bert", "Model")
    theirs = make_hf(config, "Model").bfloat16()
    theirs.save_pretrained(tmp_path)
    assert_same_state(AutoModel.from_pretrained(tmp_path), theirs)
    assert_same_state(AutoModel.from_pretrained(tmp_path, dtype=None), theirs)
    for dtype in (torch.float32, "fp32", "float16", torch.float64, "half", "float", "double"):
        model = AutoModel.from_pretrained(tmp_path, dtype=dtype)
        assert_same_state(model, copy.deepcopy(theirs).to(model.dtype))
        named = {"fp32": torch.float32} | {
            name: getattr(torch, name) for name in ("float16", "half", "float", "double")
        }
        assert model.dtype == named.get(dtype, dtype)
        assert AutoModel.from_pretrained(tmp_path, dtype=dtype, torch_dtype=model.dtype).dtype is model.dtype
        assert AutoModel.from_config(config, torch_dtype=dtype).dtype is model.dtype
    with pytest.raises(ConfigError, match="dtype='half' and torch_dtype='float' contradict each other"):
        AutoModel.from_pretrained(tmp_path, dtype="half", torch_dtype="float")
    assert AutoModel.from_pretrained(tmp_path, device="cpu").device.type == "cpu"
    with pytest.raises(ConfigError, match="unknown dtype 'half-baked'; valid names: auto, float32"):
        AutoModel.from_pretrained(tmp_path, dtype="half-baked")
    # A head that is not in the checkpoint is initialised in the checkpoint's dtype, so that the model runs.
    with pytest.warns(UserWarning):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.ones(1, 3, dtype=torch.long)).logits.dtype == torch.bfloat16


def test_parameters_own_their_memory(tmp_path):
    """safetensors gives maps of the file: a model must not change when the file does."""
    model = CLASSES["bert", "Model"](make_config("bert"))
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.write(b"\xff" * size)
    assert_same_state(loaded, model)
    assert all(p.requires_grad and p.is_leaf for p in loaded.parameters())
