"""Files of the families whose hub files are laid out otherwise than the tree, and entries of their config.json.

`test_checkpoints.py` has every family and head both ways, bit for bit.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from family_configs import config_for, make_config
from full import halved, left_to_full
from hf import FAMILIES, families_axis, hf_class, hf_config, hf_config_class, make_hf, make_ours
from precise import assert_as_theirs
from safetensors.torch import load_file, save_file

from fastbert import families
from fastbert.config import EncoderConfig
from fastbert.errors import CheckpointError
from fastbert.families.schema import Split
from fastbert.models.auto import AutoModel, AutoModelForMaskedLM
from fastbert.models.classes import CLASSES

LAID_OUT = tuple(name for name, data in families.FAMILIES.items() if any(isinstance(r, Split) for r in data.files))
laid_out_axis = pytest.mark.parametrize("model_type", LAID_OUT)


def assert_same_state(model, theirs) -> None:
    state = theirs.state_dict()
    assert set(model.state_dict()) == set(state)
    for key, tensor in model.state_dict().items():
        assert tensor.dtype == state[key].dtype and torch.equal(tensor, state[key]), key


def saved(model_type: str, folder, index: int = 0, head: str = "MaskedLM", **options):
    """transformers' model and the tensors of the files that it wrote."""
    theirs = make_hf(config_for(model_type, head, index), head)
    theirs.save_pretrained(folder, **options)
    return theirs, load_file(folder / "model.safetensors") if not options else None


def rewritten(folder, weights: dict[str, torch.Tensor]) -> None:
    save_file({key: t.clone() for key, t in weights.items()}, folder / "model.safetensors")


@halved
@laid_out_axis
@pytest.mark.parametrize("index", range(4))
def test_files_hold_the_same_tensors(model_type, index, tmp_path):
    """In the authors' layout: names, pieces and bits."""
    theirs, file = saved(model_type, tmp_path, index)
    ours = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert_same_state(ours, theirs)
    assert not ours.missing_keys and not ours.unexpected_keys
    ours.save_pretrained(tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert set(written) == set(file) != {key for key, _ in theirs.named_parameters()}
    assert all(torch.equal(written[key], file[key]) for key in file)


@laid_out_axis
def test_shards(model_type, tmp_path):
    theirs, _ = saved(model_type, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_state(AutoModelForMaskedLM.from_pretrained(tmp_path), theirs)


@laid_out_axis
def test_names_of_the_tree(model_type, tmp_path):
    """A file that has the tree's names already, as a plain state dict does; with and without the base's prefix."""
    theirs, _ = saved(model_type, tmp_path)
    prefix = families.FAMILIES[model_type].prefix + "."
    state = {key: t for key, t in theirs.state_dict().items() if not key.endswith("decoder.weight")}
    for name in (lambda key: key, lambda key: key.removeprefix(prefix)):
        rewritten(tmp_path, {name(key): t for key, t in state.items()})
        assert_same_state(AutoModelForMaskedLM.from_pretrained(tmp_path), theirs)


@laid_out_axis
def test_with_and_without_the_prefix(model_type, tmp_path):
    """A base model's file, and the encoder of a head's file, in the authors' layout."""
    theirs, file = saved(model_type, tmp_path)
    prefix = families.FAMILIES[model_type].prefix + "."
    with pytest.warns(UserWarning, match="not used"):
        encoder = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
    for key, tensor in encoder.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[prefix + key]), key
    rewritten(tmp_path, {key.removeprefix(prefix): t for key, t in file.items()})
    assert_same_state(AutoModelForMaskedLM.from_pretrained(tmp_path), theirs)


def test_gte_calls_its_base_new(tmp_path):
    """The hub's files of GTE say "new." where transformers says "gte."."""
    theirs, file = saved("gte", tmp_path)
    renamed = {
        f"new.{key.removeprefix('gte.')}" if not key.startswith("lm_head") else key: t for key, t in file.items()
    }
    assert set(renamed) != set(file)
    rewritten(tmp_path, renamed)
    assert_same_state(AutoModelForMaskedLM.from_pretrained(tmp_path), theirs)
    assert_same_state(type(theirs).from_pretrained(tmp_path), theirs)


def one_of(model_type: str) -> tuple[Split, str]:
    """A rule of the family, and what stands in a file for its first leaf's weight in the first layer."""
    return next(rule for rule in families.FAMILIES[model_type].files if isinstance(rule, Split))


@laid_out_axis
@pytest.mark.parametrize("lost", range(3))
def test_a_part_that_is_missing(model_type, lost, tmp_path):
    """One of query, key and value: neither loaded at random nor left out of a file."""
    rule = one_of(model_type)
    theirs, file = saved(model_type, tmp_path)
    state = {key: t for key, t in theirs.state_dict().items() if not key.endswith("decoder.weight")}
    absent = next(key for key in state if f"{rule.new[lost]}.weight" in key)
    rewritten(tmp_path, {key: t for key, t in state.items() if key != absent})
    with pytest.raises(CheckpointError, match=rf"is there, but not .*{rule.new[lost]}.weight: files have them as one"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    rewritten(tmp_path, file)
    ours = AutoModelForMaskedLM.from_pretrained(tmp_path)
    ours.get_submodule(absent.removesuffix(".weight")).weight = None
    with pytest.raises(CheckpointError, match=rf"is there, but not .*{rule.new[lost]}.weight: files have them as one"):
        ours.save_pretrained(tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@laid_out_axis
def test_parts_that_are_not_equal(model_type, tmp_path):
    rule = one_of(model_type)
    _, file = saved(model_type, tmp_path)
    key = next(key for key in file if f"{rule.old}.weight" in key)
    rewritten(tmp_path, {**file, key: file[key][:-1]})
    with pytest.raises(
        CheckpointError, match=rf"{rule.old}.weight has shape .*; its rows must divide into 3 equal parts"
    ):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    rewritten(tmp_path, file)
    ours = AutoModelForMaskedLM.from_pretrained(tmp_path)
    layer = ours.get_submodule(ours.family.prefix).get_submodule(ours.config.layer_paths[0])
    layer.get_submodule(rule.new[1]).to(torch.float64)
    with pytest.raises(CheckpointError, match=rf"{rule.old}.weight is one tensor in files"):
        ours.save_pretrained(tmp_path / "ours")


FUSED = Split(
    "self_attn.qkv_proj",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    lambda config: (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads),
)


@pytest.mark.parametrize("index", (0, 1))  # with one key head and two, without biases and with
def test_unequal_parts(index, monkeypatch, tmp_path):
    """A made-up family: EuroBERT, grouped queries and all, in files that have query, key and value as one tensor."""
    config = make_config("eurobert", index)
    assert config.num_key_value_heads < config.num_attention_heads
    theirs = make_hf(config, "MaskedLM")
    monkeypatch.setitem(families.FAMILIES, "eurobert", replace(config.family, files=(FUSED,)))
    make_ours(config, "MaskedLM", theirs).save_pretrained(tmp_path)
    file, state = load_file(tmp_path / "model.safetensors"), theirs.state_dict()
    fused = {key: t for key, t in file.items() if ".qkv_proj." in key}
    assert len(fused) == config.num_hidden_layers * (1 + config.attention_bias)
    for key, t in fused.items():
        assert torch.equal(t, torch.cat([state[key.replace("qkv_proj", f"{part}_proj")] for part in "qkv"]))
    assert not any(name in key for key in file for name in FUSED.new)
    assert_same_state(AutoModelForMaskedLM.from_pretrained(tmp_path), theirs)

    key = next(iter(fused))
    rewritten(tmp_path, {**file, key: file[key][:-1]})
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    with pytest.raises(
        CheckpointError, match=rf"{key} has .*; its rows must divide into parts of {heads} to {groups} to"
    ):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    rewritten(tmp_path, file)
    ours = AutoModelForMaskedLM.from_pretrained(tmp_path)
    part = ours.get_submodule(key.rpartition(".")[0].replace("qkv_proj", "k_proj"))
    part.weight = torch.nn.Parameter(part.weight[:-1].detach())
    with pytest.raises(CheckpointError, match=rf"must have rows in the ratio {heads} to {groups} to {groups}"):
        ours.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@halved
@families_axis
def test_config_entries_are_kept(model_type, tmp_path):
    """What transformers writes into config.json, with unknown entries: after loading and saving the same."""
    config = make_config(model_type, 0)
    theirs = hf_config_class(model_type).from_dict(
        {**config.to_dict(), "somebodys_own": {"list": [1, 2.5, None]}, "torch_dtype": "float32"}
    )
    theirs._attn_implementation = None
    model = hf_class(model_type, "Model")(theirs)
    model.save_pretrained(tmp_path)
    AutoModel.from_pretrained(tmp_path).save_pretrained(tmp_path / "ours")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "ours"))
    assert before.items() <= after.items() and before["somebodys_own"] == {"list": [1, 2.5, None]}
    again = transformers.AutoConfig.from_pretrained(tmp_path / "ours").to_dict()
    assert again == {
        **transformers.AutoConfig.from_pretrained(tmp_path).to_dict(),
        "_name_or_path": str(tmp_path / "ours"),
    }


@families_axis
def test_defaults(model_type):
    """A config.json that says nothing means what it means to transformers."""
    config = EncoderConfig.from_dict({"model_type": model_type})
    theirs = hf_config_class(model_type)().to_dict()
    for name, value in config.to_dict().items():
        if None not in (value, theirs.get(name)) and name not in ("id2label", "label2id"):
            assert value == theirs[name], (name, value, theirs[name])
    if "rope_parameters" in theirs:
        given = EncoderConfig.from_dict({**theirs, "model_type": model_type})
        assert config.layer_specs == given.layer_specs


@families_axis
def test_whether_a_base_model_has_a_pooler(model_type):
    """As transformers' class has, where none is asked for."""
    config = make_config(model_type, 0)
    theirs = hf_class(model_type, "Model")(hf_config(config))
    ours = CLASSES[model_type, "Model"](config)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]


OLD = {
    "modernbert": (
        {"global_attn_every_n_layers": 2, "global_rope_theta": 500.0, "local_rope_theta": 20.0, "local_attention": 6},
        {"global_attn_every_n_layers": 1, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"layer_types": None, "global_rope_theta": 500.0, "reference_compile": False},
    ),
    **dict.fromkeys(
        ("eurobert", "gte", "jina_embeddings_v3", "nomic_bert"),
        (
            {"rope_theta": 77.0},
            {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_theta": 77.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ),
    ),
}


# The others upgrade their entries by GTE's function.
@left_to_full(lambda p: p["model_type"] not in ("modernbert", "gte") and p["number"] != 1)
@pytest.mark.parametrize(("model_type", "number"), [(m, i) for m in OLD for i in range(len(OLD[m]))])
def test_entries_of_old_files(model_type, number, tmp_path):
    """Rotary embedding and the order of layers as files had them before rope_parameters and layer_types."""
    entries = make_config(model_type, 0).to_dict()
    entries = {key: value for key, value in entries.items() if key not in ("rope_parameters", "layer_types")}
    entries = json.loads(json.dumps({**entries, **OLD[model_type][number]}))
    theirs = hf_config_class(model_type).from_dict(dict(entries))
    theirs._attn_implementation = "eager"
    model = hf_class(model_type, "Model")(theirs).eval()
    config = EncoderConfig.from_dict(entries)
    assert config.layer_specs == EncoderConfig.from_dict(theirs.to_dict()).layer_specs
    ours = CLASSES[model_type, "Model"](config).eval()
    ours.load_state_dict(model.state_dict())
    ids = torch.randint(3, 40, (2, 17))
    with torch.no_grad():
        assert_as_theirs(ours, model, lambda model: model(ids)[0])
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(again(ids)[0], model(ids)[0])


assert LAID_OUT and set(OLD) <= set(FAMILIES)
