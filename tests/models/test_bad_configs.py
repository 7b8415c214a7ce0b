"""config.json and the other JSON files of a folder, with every field out of bounds, of another type, or damaged."""

from __future__ import annotations

import dataclasses
import json
import re
import typing

import pytest
import tiny
import torch
from safetensors.torch import save_file

import fastbert
from fastbert.checkpoint.pretrained import CheckpointError
from fastbert.config import MAX_LAYERS, MAX_SIZE, EncoderConfig
from fastbert.data.tokenization import load_tokenizer
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.families.schema import ActivationName, Choice, Count, Field, Flag, Number, Share, Structure
from fastbert.models.auto import AutoModel
from fastbert.sentences import SentenceEncoder

NAN, INF = float("nan"), float("inf")
NO_INTEGERS = (True, False, "x", "", 1.5, [], [1], {}, NAN, INF)
HUGE = (2**63, 10**4000, -(2**63))
SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
COUNTS = ("type_vocab_size", "num_hidden_layers", "num_hidden_groups", "num_labels")
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "qa_dropout",
    "summary_last_dropout",
)
BAD = {
    **dict.fromkeys(SIZES, (*NO_INTEGERS, *HUGE, 0, -1, None, MAX_SIZE + 1)),
    **dict.fromkeys(COUNTS, (*NO_INTEGERS, *HUGE, -1, 2**31)),
    "embedding_size": (*NO_INTEGERS, *HUGE, 0, -1),
    "inner_group_num": (*NO_INTEGERS, *HUGE, 0, -1, None),
    **dict.fromkeys(DROPOUTS, (True, False, "x", [], {}, NAN, INF, 1, -0.1, 10**4000)),
    **dict.fromkeys(("layer_norm_eps", "initializer_range"), (True, "x", [], {}, NAN, INF, -1, 1e39, 10**400, None)),
    "pad_token_id": (*NO_INTEGERS, *HUGE, -1, len(tiny.VOCAB)),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), (True, "x", 1.5, {}, NAN, [None], [[1]])),
    "hidden_act": (5, None, "", [], {}, True, NAN, "mish"),
    "summary_activation": (5, [], {}, True, NAN, "mish", 0),
    "model_type": (5, None, "", [], {}, True, NAN, ["bert"], "gpt2"),
    "tie_word_embeddings": (5, None, "", [], {}, "true", 1, NAN),
    "problem_type": (5, [], {}, True, NAN),
    "architectures": (5, {}, "BertModel", [5], [["BertModel"]], [None], True, NAN),
    "id2label": (5, [], ["a"], "a", {"x": "a"}, {"0": []}, {"0": None}, {"0": {}}, {"0": "a", "00": "b"}, {"1.5": "a"}),
}  # fmt: skip

# Those of the fields that only some families have, by the kind of the field.
BAD_OF_KIND = {
    Flag: lambda kind: [value for value in BAD["tie_word_embeddings"] if value is not kind.default],
    Number: lambda kind: (None, "", "1", [], {}, True, NAN, float("inf"), kind.low, -1),
    Share: lambda kind: (*BAD["hidden_dropout_prob"], None),
    Count: lambda kind: (*NO_INTEGERS, *HUGE, kind.low - 1, kind.high + 1, *([] if kind.default is None else [None])),
    Choice: lambda kind: (5, None, "", [], {}, True, NAN, "xyzzy"),
    ActivationName: lambda kind: BAD["hidden_act"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sentence encoder's folder with every JSON file that fastbert reads."""
    root = tiny.write_model(tmp_path_factory.mktemp("model"))
    tiny.write_modules(root, "Pooling", "Dense")
    tiny.write_json(root / "1_Pooling/config.json", {"word_embedding_dimension": 32})
    tiny.write_json(root / "2_Dense/config.json", {"in_features": 32, "out_features": 8})
    save_file({"linear.weight": torch.ones(8, 32), "linear.bias": torch.ones(8)}, root / "2_Dense/model.safetensors")
    tiny.write_json(root / "sentence_bert_config.json", {"max_seq_length": 16})
    tiny.write_json(root / "config_sentence_transformers.json", {"prompts": {}})
    return root


@pytest.fixture
def file(folder):
    """Writes a file of the folder, which is as it was afterwards: put(name, bytes or an object)."""
    before: dict = {}

    def put(name: str, content: object):
        path = folder / name
        before.setdefault(path, path.read_bytes() if path.exists() else None)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    yield put
    for path, content in before.items():
        path.unlink() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("name", BAD)
def test_every_field(name, folder, file):
    """One error that names the field, from the file and from Python, before any layer is built."""
    entries = json.loads((folder / "config.json").read_text())
    for value in BAD[name]:
        if name == "num_labels":
            entries.pop("id2label", None)
        file("config.json", {**entries, name: value})
        with pytest.raises(ConfigError, match=name) as caught:
            AutoModel.from_pretrained(folder)
        assert len(str(caught.value)) < 400
        if name not in ("architectures", "id2label"):
            with pytest.raises(ConfigError, match=name):
                EncoderConfig(**{"vocab_size": len(tiny.VOCAB), name: value})


def test_the_list_is_complete():
    """`own` has no entry of its own in a config.json; those of the families' fields are below."""
    assert {field.name for field in dataclasses.fields(EncoderConfig)} - {"extra", "own"} <= BAD.keys()
    assert {*BAD_OF_KIND, Structure} == set(typing.get_args(Field))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_a_family(model_type):
    for name, kind in FAMILIES[model_type].fields.items():
        theirs = FAMILIES[model_type].hf_names.get(name, name)
        for value in BAD_OF_KIND[type(kind)](kind) if type(kind) is not Structure else ():
            with pytest.raises(ConfigError, match=theirs) as caught:
                EncoderConfig.from_dict({"model_type": model_type, theirs: value})
            assert len(str(caught.value)) < 400
            with pytest.raises(ConfigError, match=theirs):
                EncoderConfig.of_family(model_type, **{name: value})


@pytest.mark.parametrize("own", (5, None, "x", [], ["x"], True, {"xyzzy": 1}, {5: 1}))
def test_fields_that_a_family_does_not_have(own):
    with pytest.raises(ConfigError, match=r"bert has no field 'xyzzy'|bert has no field 5|own is"):
        EncoderConfig(own=own)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 100_000}, rf"num_hidden_layers is 100000; it must be an integer from 0 to {MAX_LAYERS}"),
        ({"num_hidden_groups": 2**31}, r"num_hidden_groups is 2147483648; it must be an integer from 0"),
        (
            {"num_hidden_layers": 200, "inner_group_num": 100},
            r"num_hidden_layers 200 times inner_group_num 100 is more",
        ),
        (
            {"num_hidden_groups": 200, "inner_group_num": 100},
            r"num_hidden_groups 200 times inner_group_num 100 is more",
        ),
        ({"vocab_size": MAX_SIZE}, r"vocab_size 2147483647 times hidden_size 768 is a table of more than"),
        ({"embedding_size": 2**30, "vocab_size": 2**20}, r"vocab_size 1048576 times embedding_size 1073741824 is a"),
        ({"hidden_size": 2**30, "num_attention_heads": 1}, r"hidden_size 1073741824 times hidden_size 1073741824 is"),
        ({"num_labels": 3, "id2label": {0: "a"}}, r"id2label names 1 labels, and num_labels is 3"),
        ({"vocab_size": 10**5000}, r"vocab_size is an integer of 16610 bits"),
        ({"id2label": {"0": "a"}}, r"id2label maps '0' to 'a'"),
    ],
)
def test_fields_together(fields, message):
    with pytest.raises(ConfigError, match=message):
        EncoderConfig(**fields)


def test_what_is_odd_but_means_something(folder, file):
    """Ids that are lists, labels that are numbers, a dtype that is not read; names of other labels; no activation."""
    entries = json.loads((folder / "config.json").read_text())
    file("config.json", {**entries, "eos_token_id": [3, 4], "id2label": {"0": 1, "1": 2.5}, "torch_dtype": [5]})
    model = AutoModel.from_pretrained(folder)
    assert model.config.id2label == {0: "1", 1: "2.5"}
    assert model.config.replace(num_labels=3).id2label == {i: f"LABEL_{i}" for i in range(3)}
    assert model.config.replace(num_labels=2).id2label == model.config.id2label
    for none in ("", None):
        file("config.json", {**entries, "summary_activation": none})
        assert AutoModel.from_pretrained(folder).config.summary_activation == none


JSON_FILES = (
    "config.json",
    "modules.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "sentence_bert_config.json",
    "tokenizer_config.json",
    "config_sentence_transformers.json",
    "tokenizer.json",
)
DAMAGED = {
    "an integer of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "nested": b"[" * 100_000,
    "closed": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "no UTF-8": b'{"a": "\xff"}',
    "a number": b"5",
    "cut": b'{"a"',
    "empty": b"",
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("name", JSON_FILES)
def test_every_json_file(name, damage, folder, file):
    file(name, DAMAGED[damage])
    with pytest.raises((ConfigError, CheckpointError), match=re.escape(name)):
        SentenceEncoder.from_pretrained(folder, device="cpu")


@pytest.mark.parametrize("damage", DAMAGED)
def test_shard_index(damage, tmp_path):
    tiny.write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(DAMAGED[damage])
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        AutoModel.from_pretrained(tmp_path)


LENGTHS = ("x", True, 0, -1, 1.5, INF, NAN, [], {})
NO_FLAGS = (5, "true", [], None)
ENTRIES = [
    ("sentence_bert_config.json", "max_seq_length", LENGTHS),
    ("sentence_bert_config.json", "do_lower_case", NO_FLAGS),
    ("tokenizer_config.json", "model_max_length", LENGTHS),
    ("1_Pooling/config.json", "pooling_mode", (5, [], [5], {}, "x", True, [[]])),
    ("1_Pooling/config.json", "pooling_mode_mean_tokens", NO_FLAGS),
    ("1_Pooling/config.json", "include_prompt", NO_FLAGS),
    ("2_Dense/config.json", "out_features", (True, "8", None, 0, -8, 8.0, [], 10**4000, MAX_SIZE + 1)),
    ("2_Dense/config.json", "bias", NO_FLAGS),
    ("2_Dense/config.json", "activation_function", (5, [], None, "torch.nn.modules.activation.Softmax")),
    ("config_sentence_transformers.json", "prompts", (5, [], "x", True, {"a": 5}, {"a": []})),
    ("config_sentence_transformers.json", "default_prompt_name", (5, [], {}, True)),
]


@pytest.mark.parametrize(("name", "entry", "values"), ENTRIES, ids=[f"{name}-{entry}" for name, entry, _ in ENTRIES])
def test_entries_of_a_sentence_folder(name, entry, values, folder, file):
    entries = json.loads((folder / name).read_text())
    for value in values:
        file(name, {**entries, entry: value})
        place = re.escape(name.removesuffix("/config.json"))
        with pytest.raises((ConfigError, CheckpointError), match=rf"{place}.*{entry.partition('_')[0]}"):
            SentenceEncoder.from_pretrained(folder, device="cpu")


@pytest.mark.parametrize("modules", [[5], [{}], [{"type": 5, "path": ""}], [{"type": "a.Transformer", "path": 5}]])
def test_modules(modules, folder, file):
    file("modules.json", modules)
    with pytest.raises(CheckpointError, match=r"modules\.json is no list of modules"):
        SentenceEncoder.from_pretrained(folder, device="cpu")


def test_lengths_without_a_limit(folder, file):
    """transformers writes 1e30 there, as an integer or as a float."""
    file("sentence_bert_config.json", {})
    for length in (10**30, 1e30, None):
        file("tokenizer_config.json", {"model_max_length": length})
        assert SentenceEncoder.from_pretrained(folder, device="cpu").max_seq_length == 64


@pytest.mark.parametrize(
    "entry", ["unk_token", "cls_token", "do_lower_case", "strip_accents", "tokenize_chinese_chars"]
)
def test_settings_of_a_vocabulary(entry, tmp_path):
    tiny.write_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    for value in (5, [], {}, {"content": 5}, "xyzzy", 0):
        tiny.write_json(tmp_path / "tokenizer_config.json", {entry: value})
        with pytest.raises(CheckpointError, match=entry):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("value", [NAN, INF, 3], ids=["nan", "inf", "integers"])
def test_numbers_of_a_dense_module(value, folder, file):
    path = folder / "2_Dense/model.safetensors"
    file("2_Dense/model.safetensors", path.read_bytes())
    save_file({"linear.weight": torch.full((8, 32), value), "linear.bias": torch.ones(8)}, path)
    with pytest.raises(CheckpointError, match=r"2_Dense: tensor linear.weight holds"):
        SentenceEncoder.from_pretrained(folder, device="cpu")


def test_fresh_models_have_no_other_bound():
    config = EncoderConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=100, intermediate_size=8)
    with torch.device("meta"):
        assert len(fastbert.AutoModel.from_config(config).encoder.layer) == 100
