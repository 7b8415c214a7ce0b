"""SentenceEncoder's arguments against sentence-transformers', on a tiny random model with every kind of module."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import tiny
import torch
from precise import assert_as_theirs, assert_close_to_theirs, in_float64
from safetensors.torch import save_file
from seeds import manual_seed

import fastbert
from fastbert.errors import ConfigError, InputError

TEXTS = [
    "the cat sat on the mat.",
    "a dog ran",
    "",
    "who sat in the old house and ran to the new house, we?",
    "Zebra CATS",
]
PROMPTS = {"query": "who? ", "passage": "the old ", "other": "in the house "}


def write(folder, **pooling):
    tiny.write_modules(tiny.write_model(folder), "Pooling", "Dense", "Normalize")
    tiny.write_json(folder / "1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": "mean", **pooling})
    dense = {
        "in_features": 32,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    tiny.write_json(folder / "2_Dense/config.json", dense)
    manual_seed(3)
    weights = {"linear.weight": torch.randn(24, 32), "linear.bias": torch.randn(24)}
    save_file(weights, folder / "2_Dense/model.safetensors")
    tiny.write_json(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "similarity_fn_name": "dot"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ours(folder):
    return fastbert.SentenceEncoder.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def theirs(folder):
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


CALLS = {
    "prompt_name": {"prompt_name": "other"},
    "prompt": {"prompt": "a dog "},
    "tensor": {"convert_to_tensor": True},
    "list": {"convert_to_numpy": False},
    "batch_size": {"batch_size": 2},
    "normalized": {"normalize_embeddings": True},
    "truncated": {"truncate_dim": 7},
    "truncated and normalized": {"truncate_dim": 7, "normalize_embeddings": True, "convert_to_tensor": True},
    "too wide": {"truncate_dim": 99},
    "tokens": {"output_value": "token_embeddings"},
    "device": {"device": "cpu"},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_the_arguments_of_encode(ours, theirs, options):
    assert_as_theirs(ours, theirs, lambda model: model.encode(TEXTS, **options))
    assert_as_theirs(ours, theirs, lambda model: model.encode(TEXTS[3], **options))


def test_queries_and_documents(ours, theirs):
    for name in ("encode_query", "encode_document"):
        assert_as_theirs(ours, theirs, lambda model, name=name: getattr(model, name)(TEXTS))
        assert_as_theirs(ours, theirs, lambda model, name=name: getattr(model, name)(TEXTS, prompt_name="other"))
    assert not np.allclose(ours.encode_query(TEXTS), ours.encode_document(TEXTS))
    assert ours.prompts == theirs.prompts


def test_every_output_at_once(ours, theirs):
    models = (ours, theirs, in_float64(theirs))
    for found, wanted, exact in zip(*(model.encode(TEXTS, output_value=None) for model in models), strict=True):
        real = wanted["attention_mask"].bool()
        assert found["input_ids"].tolist() == wanted["input_ids"][real].tolist()
        tokens = (wanted["token_embeddings"][real], exact["token_embeddings"][real])
        assert_close_to_theirs(found["token_embeddings"], *tokens)
        assert_close_to_theirs(*(each["sentence_embedding"] for each in (found, wanted, exact)))


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precisions(ours, theirs, precision):
    """From the same floats: a value beside a step would else fall on one side here and on the other there."""
    from sentence_transformers.util import quantize_embeddings

    for options in ({}, {"convert_to_tensor": True}):
        floats, found = ours.encode(TEXTS), ours.encode(TEXTS, precision=precision, **options)
        wanted = theirs.encode(TEXTS, precision=precision, **options)
        assert type(found) is type(wanted) and found.dtype == wanted.dtype and found.shape == wanted.shape
        assert np.array_equal(np.asarray(found), quantize_embeddings(floats, precision))
    assert ours.encode([], precision=precision).shape[0] == 0
    if precision.endswith("int8"):
        with pytest.raises(InputError, match="goes by the range of many vectors"):
            ours.encode("cat", precision=precision)


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities(ours, theirs, name):
    assert ours.similarity_fn_name == theirs.similarity_fn_name == "dot"  # the folder's
    try:
        ours.similarity_fn_name = theirs.similarity_fn_name = name
        a, b = torch.randn(3, 24), torch.randn(3, 24)
        exact = theirs.similarity(a.double(), b.double())
        for one, other in ((a, b), (a.numpy(), b.numpy()), (list(a), list(b))):
            assert_close_to_theirs(ours.similarity(one, other), theirs.similarity(one, other), exact)
        assert_close_to_theirs(ours.similarity(a[0], b), theirs.similarity(a[0], b), exact[:1])
        pairs = [model.similarity_pairwise(a, b.numpy()) for model in (ours, theirs)]
        assert_close_to_theirs(*pairs, theirs.similarity_pairwise(a.double(), b.double()))
    finally:
        ours.similarity_fn_name = theirs.similarity_fn_name = "dot"
    with pytest.raises(ConfigError, match="unknown similarity 'maxsim'; there are cosine, dot"):
        ours.similarity_fn_name = "maxsim"


def test_attributes(ours, theirs):
    assert ours.get_embedding_dimension() == ours.get_sentence_embedding_dimension() == ours.dim == 24
    assert theirs.get_embedding_dimension() == 24
    assert ours.get_max_seq_length() == ours.max_seq_length == theirs.max_seq_length == 64
    long = "the cat " * 40
    try:
        ours.max_seq_length = theirs.max_seq_length = 9
        assert_as_theirs(ours, theirs, lambda model: model.encode(long))
        ours.truncate_dim = theirs.truncate_dim = 5
        assert_as_theirs(ours, theirs, lambda model: model.encode(long))
        assert ours.dim == theirs.get_embedding_dimension() == 5
    finally:
        ours.max_seq_length = theirs.max_seq_length = 64
        ours.truncate_dim = theirs.truncate_dim = None
    with pytest.raises(ConfigError, match="max_seq_length is 65"):
        ours.max_seq_length = 65


@pytest.mark.parametrize(
    "modes", ["mean", "max", "cls", "weightedmean", ["lasttoken", "mean_sqrt_len_tokens", "weightedmean"]]
)
def test_a_prompt_that_is_not_pooled(tmp_path, modes):
    """As INSTRUCTOR's: the tokens of the prompt are read by the others, and left out of the vector."""
    tiny.write_modules(tiny.write_model(tmp_path), "Pooling")
    pooling = {"embedding_dimension": 32, "pooling_mode": modes, "include_prompt": False}
    tiny.write_json(tmp_path / "1_Pooling/config.json", pooling)
    ours = fastbert.SentenceEncoder.from_pretrained(tmp_path, device="cpu")
    theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(str(tmp_path), device="cpu")
    for prompt in ("who ran? ", None):
        assert_as_theirs(ours, theirs, lambda model, prompt=prompt: model.encode(TEXTS, prompt=prompt))
    assert not np.allclose(ours.encode(TEXTS, prompt="who ran? "), ours.encode(TEXTS))


@pytest.mark.full
@pytest.mark.parametrize("processes", (1, pytest.param(2, marks=pytest.mark.full)))  # each imports all that there is
def test_a_pool_gives_the_same_bits(ours, processes, one_thread):
    """Workers get chunks in the order of the texts: the same batches, so the same bits. With as many threads on both
    sides: a folder's Dense is a product of torch's, whose last bits go by their number.
    """
    texts = [text or "in" for text in TEXTS] * 3
    alone = np.concatenate([ours.encode(texts[i : i + 5], prompt="a ") for i in range(0, 15, 5)])
    with ours.start_multi_process_pool(processes * ["cpu"]) as pool:
        assert np.array_equal(ours.encode(texts, pool=pool, chunk_size=5, prompt="a "), alone)
        assert ours.encode([], pool=pool).shape == (0, 24)
        with pytest.raises(InputError, match="chunk_size is 0"):
            ours.encode(texts, pool=pool, chunk_size=0)
        tensors = ours.encode(texts, pool=pool, chunk_size=5, prompt="a ", convert_to_tensor=True)
        assert np.array_equal(tensors.numpy(), alone)
    ours.stop_multi_process_pool(pool)  # twice is no fault
    assert np.array_equal(pickle.loads(pickle.dumps(ours)).encode(TEXTS), ours.encode(TEXTS))


def test_what_is_refused(ours):
    wrong = {
        "unknown output_value 'x'": {"output_value": "x"},
        "unknown precision 'int4'; there are float32": {"precision": "int4"},
        "exclude each other": {"normalize_embeddings": True, "normalize": False},
        "prompt 'a' and prompt_name 'query'": {"prompt": "a", "prompt_name": "query"},
        "batch_size is 0": {"batch_size": 0},
        "truncate_dim is -1": {"truncate_dim": -1},
        "chunk_size is for a pool": {"chunk_size": 3},
        "excludes a pool": {"output_value": None, "device": ["cpu"]},
        "at least one device": {"device": []},
    }
    for message, options in wrong.items():
        with pytest.raises(InputError, match=message):
            ours.encode(TEXTS, **options)
    with pytest.raises(ConfigError, match="device 'cuda:77' is not there"):
        ours.encode(TEXTS, device="cuda:77")


def test_a_stream_that_begins_later_has_the_same_chunks(ours, monkeypatch):
    """Also where long texts cut chunks short: what several machines share is cut at multiples of a chunk."""
    from fastbert.sentences import batches

    monkeypatch.setattr(batches, "CHUNK_CHARS", 60)
    texts = TEXTS * 4
    whole = [vectors for vectors, _ in ours.encode_stream(texts, chunk_texts=6)]
    later = [vectors for vectors, _ in ours.encode_stream(texts[12:], chunk_texts=6)]
    assert max(map(len, whole)) < 6 < len(whole)
    assert [len(rows) for rows in whole[-len(later) :]] == [len(rows) for rows in later]
    assert np.array_equal(np.concatenate(whole)[12:], np.concatenate(later))


def test_progress_bar(tmp_path, capsys):
    encoder = fastbert.SentenceEncoder.from_pretrained(tiny.write_model(tmp_path), device="cpu")
    encoder.encode(TEXTS)
    encoder.encode(TEXTS, show_progress_bar=False)
    assert capsys.readouterr().err == ""
    encoder.encode(TEXTS, show_progress_bar=True)
    assert "encoding: 100%" in capsys.readouterr().err


def test_a_sentence_encoder_calls_its_model_where_that_is_called(tmp_path):
    encoder = fastbert.SentenceEncoder.from_pretrained(tiny.write_model(tmp_path))
    before, seen = encoder.encode(["the cat", "a dog ran"]), []
    handle = encoder.model.register_forward_hook(lambda *_: seen.append("hook"))
    assert np.array_equal(encoder.encode(["the cat", "a dog ran"]), before)
    handle.remove()
    own = encoder.model.forward
    encoder.model.forward = lambda *args, **kwargs: seen.append("forward") or own(*args, **kwargs)
    assert np.array_equal(encoder.encode(["the cat", "a dog ran"]), before)
    assert seen == ["hook", "forward"]
