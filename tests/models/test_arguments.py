"""from_pretrained and save_pretrained with transformers' arguments: their meaning, or one clear error."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
import torch
import transformers
from tiny import edit_config, write_model

import fastbert
from fastbert import CheckpointError, ConfigError

Auto = fastbert.AutoModelForSequenceClassification


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model", head="SequenceClassification")


@pytest.mark.parametrize("kind", (Auto, fastbert.BertForSequenceClassification))
@pytest.mark.parametrize("name", ("dtype", "torch_dtype"))
def test_dtype(kind, name, folder):
    assert kind.from_pretrained(folder, **{name: torch.bfloat16}).dtype is torch.bfloat16
    assert kind.from_pretrained(folder, **{name: "float16"}).dtype is torch.float16
    with pytest.raises(ConfigError, match="contradict each other"):
        kind.from_pretrained(folder, dtype="float16", torch_dtype=torch.bfloat16)


@pytest.mark.parametrize("device_map", ("cpu", "auto", torch.device("cpu"), {"": "cpu"}, {"a": "cpu", "b": "cpu"}))
def test_device_map(device_map, folder):
    model = Auto.from_pretrained(folder, device_map=device_map)
    assert model.hf_device_map == {"": model.device}


REFUSED = {
    "device_map": ({"a": "cpu", "b": "meta"}, "a model stands on one device"),
    "trust_remote_code": (True, "never runs code from a checkpoint"),
    "attn_implementation": ("paged", "is none of eager, sdpa"),
    "quantization_config": ({"a": 1}, r"fastbert\.quantize"),
    "generation_config": ({"a": 1}, "generate nothing"),
    "adapter_name": ("x", "peft"),
    "code_revision": ("main", "never runs code"),
    "device": ("cpu", "says? the same: give one of them"),
    "num_labels": (3, "num_labels"),
    "variant": ("fp16", "give the folder"),
    "weights_only": (False, "allowed: True"),
    "label2id": ({"a": 0, "b": 1}, "give id2label"),
    "id2label": ({0: "a", 1: None}, "id2label maps"),
    "nonsense": (1, "bert has no field 'nonsense'; it has "),
    "hidden_act": ("swish9", "is not one of"),
}
# What contradicts it.
BESIDE = {"device": {"device_map": "cpu"}, "num_labels": {"id2label": {0: "a", 1: "b"}}}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, folder):
    value, message = REFUSED[name]
    for kind in (Auto, fastbert.BertForSequenceClassification):
        with pytest.raises(ConfigError, match=message):
            kind.from_pretrained(folder, **{name: value}, **BESIDE.get(name, {}))


DONE_ANYWAY = {
    "low_cpu_mem_usage": True,
    "trust_remote_code": False,
    "weights_only": True,
    "use_safetensors": True,
    "attn_implementation": "sdpa",
    "quantization_config": None,
    "local_files_only": True,
    "token": "x",
    "revision": "main",
    "force_download": False,
    "subfolder": "",
}


def test_what_is_so_anyway(folder):
    plain = Auto.from_pretrained(folder).state_dict()
    assert all(
        torch.equal(t, plain[key]) for key, t in Auto.from_pretrained(folder, **DONE_ANYWAY).state_dict().items()
    )
    with pytest.raises(CheckpointError, match=r"use_safetensors=False: .* has safetensors"):
        Auto.from_pretrained(folder, use_safetensors=False)


def test_labels(folder):
    names = {0: "no", 1: "yes"}
    model = Auto.from_pretrained(folder, id2label=names, label2id={"no": 0, "yes": 1}, problem_type="regression")
    assert model.config.id2label == names and model.config.label2id == {"no": 0, "yes": 1}
    assert model.config.problem_type == "regression"
    edit_config(folder, id2label=None, label2id=None)
    assert Auto.from_pretrained(folder).config.id2label == {0: "LABEL_0", 1: "LABEL_1"}


@pytest.mark.parametrize(
    "changes", ({"num_labels": 5}, {"id2label": {i: str(i) for i in range(5)}}), ids=("n", "names")
)
def test_other_labels_are_a_new_head_if_mismatched_sizes_are_ignored(changes, folder):
    with pytest.raises(CheckpointError, match=r"classifier\.weight is \(2, 32\), the config asks for \(5, 32\)"):
        Auto.from_pretrained(folder, **changes)
    with pytest.warns(UserWarning, match=r"of another shape, so initialised: classifier\.weight"):
        model, info = Auto.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True, **changes)
    assert model.config.num_labels == 5 == len(model.config.id2label) == model.classifier.weight.shape[0]
    assert model.classifier.weight.isfinite().all() and not model.classifier.bias.any()
    theirs, expected = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, ignore_mismatched_sizes=True, output_loading_info=True, **changes
    )
    assert theirs.config.num_labels == 5
    assert {key for key, *_ in info["mismatched_keys"]} == {key for key, *_ in expected["mismatched_keys"]}
    assert info["missing_keys"] == set(expected["missing_keys"]) == set()
    assert info["unexpected_keys"] == set(expected["unexpected_keys"])


def test_options_of_outputs_stand_in_the_config(folder):
    model = Auto.from_pretrained(folder, output_hidden_states=True, return_dict=False)
    logits, hidden_states = model(torch.tensor([[1, 2, 3]]))
    assert logits.shape == (1, 2) and len(hidden_states) == 3
    assert model(torch.tensor([[1, 2, 3]]), return_dict=True, output_hidden_states=False).hidden_states is None


def test_configs_of_transformers_and_paths(folder):
    theirs = transformers.AutoConfig.from_pretrained(folder)
    expected = Auto.from_pretrained(folder).state_dict()
    for config in (
        theirs,
        theirs.to_dict(),
        folder,
        str(folder / "config.json"),
        fastbert.AutoConfig.from_pretrained(folder),
    ):
        found = Auto.from_pretrained(folder, config=config).state_dict()
        assert all(torch.equal(t, expected[key]) for key, t in found.items())
    assert isinstance(Auto.from_config(theirs), fastbert.BertForSequenceClassification)
    assert fastbert.AutoConfig.from_pretrained(folder, num_labels=7).num_labels == 7


def test_a_state_dict_stands_for_a_folder(folder):
    """And is copied: training the model leaves the caller's tensors alone."""
    state = {key: t + 1 for key, t in Auto.from_pretrained(folder).state_dict().items()}
    config = fastbert.AutoConfig.from_pretrained(folder)
    kind = fastbert.BertForSequenceClassification
    model = kind.from_pretrained(None, config=config, state_dict=state)
    assert all(torch.equal(t, state[key]) for key, t in model.state_dict().items())
    assert all(t.data_ptr() != state[key].data_ptr() for key, t in model.state_dict().items())
    for given in ({"config": config}, {"state_dict": state}, {}):
        with pytest.raises(ConfigError, match="a state_dict stands for a folder"):
            kind.from_pretrained(None, **given)
    for each in (Auto, kind):  # as in transformers
        with pytest.raises(ConfigError, match="a state_dict stands for a folder"):
            each.from_pretrained(folder, state_dict=state)
    with pytest.raises(CheckpointError, match="the config contradicts the weights"):
        kind.from_pretrained(None, config=config, state_dict={**state, "classifier.bias": torch.zeros(7)})


def test_what_the_hub_is_asked_for(folder, monkeypatch):
    asked = []

    def snapshot_download(repo_id, **options):
        asked.append((repo_id, options))
        return str(folder.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model = Auto.from_pretrained(
        "someone/something", revision="v2", cache_dir="/c", token="t", local_files_only=True, subfolder="model"
    )
    (repo_id, options), *_ = asked
    assert repo_id == "someone/something" == model.name_or_path == model.config.name_or_path
    wanted = {"revision": "v2", "cache_dir": "/c", "token": "t", "local_files_only": True, "force_download": False}
    assert wanted.items() <= options.items()
    with pytest.raises(CheckpointError, match=r"no subfolder '\.\./\.\.'"):
        Auto.from_pretrained("someone/something", subfolder="../..")


def test_the_tokenizer_stays_beside_the_model(folder, tmp_path):
    model = Auto.from_pretrained(folder)
    model.save_pretrained(tmp_path / "new")
    text = "the cat sat on a mat"
    tokenizers = [transformers.AutoTokenizer.from_pretrained(at) for at in (folder, tmp_path / "new")]
    assert tokenizers[0](text) == tokenizers[1](text)
    own = tmp_path / "own"
    own.mkdir()
    (own / "vocab.txt").write_text("[PAD]\n")  # a tokenizer that is there is a user's
    model.save_pretrained(own)
    assert (own / "vocab.txt").read_text() == "[PAD]\n" and not (own / "tokenizer.json").exists()


def test_save_pretrained(folder, tmp_path):
    model = Auto.from_pretrained(folder)
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()
    state = {key: t + 1 for key, t in model.state_dict().items()}
    model.save_pretrained(tmp_path / "state", state_dict=state, max_shard_size="5GB", safe_serialization=True)
    saved = Auto.from_pretrained(tmp_path / "state").state_dict()
    assert all(torch.equal(saved[key], t) for key, t in state.items())
    assert str(folder) not in (tmp_path / "state" / "config.json").read_text()
    for wrong in (
        {"max_shard_size": "1KB"},
        {"safe_serialization": False},
        {"variant": "fp16"},
        {"nonsense": 1},
        {"max_shard_size": "many"},
        {"repo_id": "a/b"},
    ):
        with pytest.raises(ConfigError):
            model.save_pretrained(tmp_path / "wrong", **wrong)
    assert not (tmp_path / "wrong").exists()


class Hub:
    """huggingface_hub.HfApi without a network: what it was asked for, and the files of the last upload."""

    calls: list = []  # noqa: RUF012
    files: dict = {}  # noqa: RUF012

    def __init__(self, token=None):
        self.calls.append(("token", token))

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", repo_id, options))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{repo_id.rpartition('/')[2]}")

    def create_branch(self, **options):
        self.calls.append(("create_branch", options))

    def file_exists(self, repo_id, name):
        return False

    def upload_folder(self, *, folder_path, **options):
        self.calls.append(("upload_folder", options))
        self.files.update({path.name: path.read_bytes() for path in folder_path.iterdir()})
        return "the commit"


def test_push_to_hub(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "files", {})
    model = Auto.from_pretrained(folder, id2label={0: "dull", 1: "fun"})
    given = {"private": True, "token": "t", "revision": "dev", "tags": ["films"], "commit_message": "First"}
    assert model.push_to_hub("films", **given) == "the commit"
    calls = {name: rest for name, *rest in Hub.calls}
    assert calls["token"] == ["t"] and calls["create_repo"] == ["films", {"private": True, "exist_ok": True}]
    upload = calls["upload_folder"][0]
    assert upload["repo_id"] == "me/films" and upload["revision"] == "dev" and upload["commit_message"] == "First"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "vocab.txt"} <= set(Hub.files)
    assert json.loads(Hub.files["config.json"])["id2label"] == {"0": "dull", "1": "fun"}
    card = huggingface_hub.ModelCard(Hub.files["README.md"].decode())
    assert card.data.pipeline_tag == "text-classification" and card.data.tags == ["films", "fastbert"]
    assert card.data.base_model is None and "Labels: dull, fun" in card.text and str(folder) not in card.content
    assert 'fastbert.AutoModelForSequenceClassification.from_pretrained("me/films")' in card.text
    Hub.files.clear()
    model.save_pretrained(tmp_path / "pushed", push_to_hub=True, repo_id="other")
    assert "model.safetensors" in Hub.files and (tmp_path / "pushed" / "README.md").exists()
