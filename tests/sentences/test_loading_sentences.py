"""The constructors as sentence-transformers' users call them: the same meaning, or one error."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tiny
import torch
from full import left_to_full
from precise import assert_as_theirs

import fastbert
from fastbert import hub
from fastbert.errors import ConfigError

TEXTS = ["the cat sat on the mat.", "who sat in the old house and ran to the new house, we? " * 8, "a Dog RAN"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.write_modules(tiny.write_model(folder), "Pooling")
    tiny.write_json(folder / "1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": "mean"})
    settings = {"prompts": {"query": "who? ", "other": "a dog "}, "similarity_fn_name": "dot", "truncate_dim": 9}
    tiny.write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def as_numbers(vectors: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """In the model's dtype, which the error rule goes by: NumPy has no bfloat16."""
    vectors = torch.from_numpy(vectors)
    return vectors if vectors.dtype is torch.float64 else vectors.to(dtype)


CALLS = {
    "prompts": {"prompts": {"query": "the cat ", "mine": "in the house "}, "default_prompt_name": "mine"},
    "similarity": {"similarity_fn_name": "manhattan", "truncate_dim": 5},
    "dtype": {"model_kwargs": {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}},
    "old dtype": {"model_kwargs": {"torch_dtype": "float", "device_map": "cpu"}, "dtype": "fp32"},
    "tokenizer": {"processor_kwargs": {"model_max_length": 11, "truncation_side": "left", "padding_side": "right"}},
    "hub": {"revision": "main", "local_files_only": True, "token": False, "trust_remote_code": False},
    "config": {"config_kwargs": {"layer_norm_eps": 0.1}, "backend": "torch"},
}


@left_to_full(lambda p: p["options"] not in (CALLS["dtype"], CALLS["tokenizer"], CALLS["config"]))
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_the_arguments_of_the_constructor(folder, options):
    device = {} if "device_map" in options.get("model_kwargs", {}) else {"device": "cpu"}
    theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), **device, **options)
    ours = fastbert.SentenceEncoder(folder, **device, **options)
    for call in ("encode", "encode_query", "encode_document"):
        assert_as_theirs(ours, theirs, lambda model, call=call: as_numbers(getattr(model, call)(TEXTS), ours.dtype))
    assert ours.prompts == theirs.prompts and ours.default_prompt_name == theirs.default_prompt_name
    assert ours.similarity_fn_name == theirs.similarity_fn_name and ours.dim == theirs.get_embedding_dimension()
    assert str(ours.dtype) == str(theirs.dtype) and ours.max_seq_length == theirs.max_seq_length
    same = fastbert.SentenceEncoder.from_pretrained(folder, **device, **options)
    assert np.array_equal(same.encode(TEXTS), ours.encode(TEXTS))


REFUSED = {
    "trust_remote_code=True is not supported": {"trust_remote_code": True},
    "backend='onnx' is not supported": {"backend": "onnx"},
    "model_kwargs has 'wings'": {"model_kwargs": {"wings": 2}},
    "quantization_config=": {"model_kwargs": {"quantization_config": "x"}},
    "processor_kwargs has 'wings'": {"tokenizer_kwargs": {"wings": 2}},
    "truncation_side is 'up'": {"processor_kwargs": {"truncation_side": "up"}},
    "bert has no field 'wings'": {"config_kwargs": {"wings": 2}},
    "default_prompt_name is 'b'; this model has: query, document, other": {"default_prompt_name": "b"},
    "unknown similarity 'x'": {"similarity_fn_name": "x"},
    "dtype='bfloat16' and the dtype 'float16'": {"dtype": "bfloat16", "model_kwargs": {"dtype": "float16"}},
    "cache_folder and cache_dir": {"cache_folder": "a", "cache_dir": "b"},
    "max_seq_length is 999; this model allows 3 to 64": {"max_seq_length": 999},
    "device 'cuda:9' is not there": {"device": "cuda:9"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(folder, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        fastbert.SentenceEncoder(folder, **REFUSED[message])


def test_what_is_unknown(folder):
    with pytest.raises(TypeError, match="unknown argument 'modules'; there are: dtype, device"):
        fastbert.SentenceEncoder(folder, modules=[])
    with pytest.raises(fastbert.InputError, match="truncate_dim is 0"):
        fastbert.SentenceEncoder(folder, truncate_dim=0)
    with pytest.raises(TypeError, match=r"prompts\['a'\] is a int"):
        fastbert.SentenceEncoder(folder, prompts={"a": 1})


@pytest.mark.parametrize("name", ["SentenceEncoder", "Reranker", "SparseEncoder", "TextClassifier"])
def test_the_hub_gets_what_is_said_of_it(monkeypatch, name):
    """And a name without an organisation is looked for where sentence-transformers looks."""
    seen = []

    def refuse(hub_id, config_only, options):
        seen.append((hub_id, options))
        raise OSError("no network here")

    monkeypatch.setattr(hub, "_download", refuse)
    given = {"revision": "v1", "token": "abc", "local_files_only": True, "force_download": True, "subfolder": "inner"}
    with pytest.raises(fastbert.CheckpointError, match="no network here"):
        getattr(fastbert, name)("some-model", cache_folder="there", **given)
    place = {"SentenceEncoder": "sentence-transformers/", "Reranker": "cross-encoder/"}.get(name, "")
    assert seen == [(f"{place}some-model", hub.HubOptions(cache_dir="there", **given))]
    seen.clear()
    with pytest.raises(fastbert.CheckpointError):
        getattr(fastbert, name).from_pretrained("me/some-model", cache_dir="there", **given)
    assert seen == [("me/some-model", hub.HubOptions(cache_dir="there", **given))]


def test_a_name_of_its_own_on_the_hub(monkeypatch, folder):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def only_plain(hub_id, config_only, options):
        if "/" in hub_id:
            raise LocalEntryNotFoundError(hub_id)
        return folder

    monkeypatch.setattr(hub, "_download", only_plain)
    assert fastbert.SentenceEncoder("bert-base-uncased", device="cpu").dim == 9


def test_a_reranker_as_a_cross_encoder(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    # The first seed's few numbers are beyond the rule by luck, and judging four draws takes five times as long.
    tiny.write_model(tmp_path, head="SequenceClassification", num_labels=1, seed=1)
    pairs = [("the cat", text) for text in TEXTS]
    for options in (
        {"max_length": 20, "num_labels": 1},
        {"activation_fn": torch.nn.Tanh(), "prompts": {"query": "who? "}},
    ):
        theirs = library.CrossEncoder(str(tmp_path), device="cpu", **options)
        ours = fastbert.Reranker(tmp_path, device="cpu", **options)
        assert_as_theirs(ours, theirs, lambda model: model.predict(pairs))
        assert ours.max_length == ours.max_seq_length == theirs.max_seq_length
    with pytest.raises(ConfigError, match=r"num_labels=3: the checkpoint of .* has 1"):
        fastbert.Reranker(tmp_path, num_labels=3)
    with pytest.raises(ConfigError, match="max_length=9 and max_seq_length=8 contradict"):
        fastbert.Reranker(tmp_path, max_length=9, max_seq_length=8)
