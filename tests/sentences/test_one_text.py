"""One text at once: what stands between the string and the vector, and that the quick way changes no bit."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tiny
import torch
import warm
from counted_ops import Ops
from full import halved, left_to_full
from peak_bytes import peak_bytes

import fastbert
from fastbert.errors import InputError
from fastbert.execution import snapshot
from fastbert.models import base
from fastbert.native.availability import extension_error

has_kernels = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))

TEXT = "the cat sat on the mat, and a dog ran to the old house."
TEXTS = [TEXT, "a dog", "", "who? " * 40, "the mat"]  # cut, empty, and several lengths
POOLINGS = ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
FAMILIES = ("bert", "roberta", "distilbert", "xlm-roberta", "roberta-prelayernorm", "electra", "mpnet", "modernbert")
DTYPES = ("float32", "bfloat16", "int8")
OPTIONS = {
    "plain": {},
    "as it is pooled": {"normalize": False},
    "shorter": {"truncate_dim": 9},
    "shorter, of length 1": {"truncate_dim": 9, "normalize_embeddings": True},
    "a prompt": {"prompt": "who? "},
    "binary": {"precision": "binary"},
}
MOST_CALLS = (
    150  # of functions of Python's and C's with one text, where everything is warm: 117, and room for others' releases
)


COUNT = """
import sys, fastbert
encoder = fastbert.SentenceEncoder(sys.argv[1], device="cpu")
for _ in range(3):
    encoder.encode(sys.argv[2])
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
encoder.encode(sys.argv[2])
sys.setprofile(None)
print(calls)
"""


def make(folder, family="bert", pooling="mean", dtype="float32", include_prompt=True, **fields):
    tiny.write_modules(tiny.write_model(folder, model_type=family, **fields), "Pooling", "Normalize")
    settings = {
        "embedding_dimension": fields.get("hidden_size", 32),
        "pooling_mode": pooling,
        "include_prompt": include_prompt,
    }
    tiny.write_json(folder / "1_Pooling/config.json", settings)
    return fastbert.SentenceEncoder(folder, dtype=dtype, device="cpu")


def both_ways(encoder, monkeypatch, run):
    """What `run()` gives as it is, and where no op does all of an encoder."""
    served = []
    at_once = base.at_once

    def counted(*args, **options):
        found = at_once(*args, **options)
        served.append(found is not None)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(base, "at_once", counted)
        quick = run()
    with monkeypatch.context() as patch:
        patch.setattr(base, "at_once", lambda *args, **options: None)
        patch.setattr("fastbert.execution.at_once", lambda *args: None)
        others = run()
    return quick, others, served


def is_left_out(pooling: int, options: int, dtype: str) -> bool:
    """Every second pair of a pooling and options stays, each in one dtype."""
    return (pooling + options // 2) % 2 != 0 or DTYPES.index(dtype) != (pooling + options) % 3


@left_to_full(lambda p: is_left_out(POOLINGS.index(p["pooling"]), list(OPTIONS).index(p["options"]), p["dtype"]))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_quick_way_has_the_others_bits(options, pooling, dtype, tmp_path, monkeypatch):
    encoder = make(tmp_path, "bert", pooling, dtype, include_prompt=False)
    given = OPTIONS[options]

    def run():
        return [*(encoder.encode(text, **given) for text in TEXTS), encoder.encode(TEXTS, **given)]

    quick, others, served = both_ways(encoder, monkeypatch, run)
    assert all(map(np.array_equal, quick, others))
    if extension_error() is None and pooling in ("mean", "cls") and options != "a prompt":
        assert all(served) and served


@halved
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_quick_way_of_families(family, dtype, tmp_path, monkeypatch):
    encoder = make(tmp_path, family, dtype=dtype)
    quick, others, _ = both_ways(encoder, monkeypatch, lambda: [*map(encoder.encode, TEXTS), encoder.encode(TEXTS)])
    assert all(map(np.array_equal, quick, others))


@pytest.mark.parametrize("kind", ("single", "multi", "regression", "one label"))
def test_scores_of_one_text(kind, tmp_path, monkeypatch):
    """A classifier's logits and probabilities by each problem_type, alone and among others, both ways."""
    problem = {"single": "single_label", "multi": "multi_label", "one label": "multi_label"}.get(kind)
    problem = "regression" if problem is None else f"{problem}_classification"
    labels = 1 if kind in ("regression", "one label") else 3
    fields = {"num_labels": labels, "problem_type": problem}
    classifier = fastbert.TextClassifier(
        tiny.write_model(tmp_path, head="SequenceClassification", **fields), device="cpu"
    )
    quick, others, _ = both_ways(classifier, monkeypatch, lambda: [classifier.predict(text) for text in TEXTS])
    assert repr(quick) == repr(others)


@has_kernels
def test_operators_and_calls_of_one_text(tmp_path):
    """So that what was emptied stays empty: operators, and calls of Python's and C's functions."""
    encoder = make(tmp_path)
    for _ in range(3):
        encoder.encode(TEXT)
    with Ops() as ops:
        encoder.encode(TEXT)
    assert dict(ops.calls) == {"encoder_cpu": 1}
    # In a process of its own: what tests watch (conftest.py) calls functions, too.
    counted = warm.run([sys.executable, "-c", COUNT, str(tmp_path), TEXT])
    assert counted.returncode == 0, counted.stderr
    assert int(counted.stdout) <= MOST_CALLS, counted.stdout


@has_kernels
def test_operators_of_a_models_own_call(tmp_path):
    model = make(tmp_path).model
    ids = torch.tensor([[2, 5, 6, 7, 3]])
    with torch.inference_mode():
        model(ids)
        with Ops() as ops:
            model(ids)
        assert dict(ops.calls) == {"encoder_cpu": 1}
        with Ops() as ops:
            model(torch.tensor([[2, 5, 3], [2, 3, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]))
        assert ops.calls["encoder_cpu"] == 1


def hook(encoder):
    encoder.model.embeddings.word_embeddings.register_forward_hook(lambda module, args, out: out * 2)


def hook_the_model(encoder):
    encoder.model.register_forward_pre_hook(lambda module, args: None)


def other_words(encoder):
    table = encoder.model.embeddings.word_embeddings
    table.weight = torch.nn.Parameter(table.weight.detach() * 2)


def write_words(encoder):
    with torch.no_grad():
        encoder.model.embeddings.word_embeddings.weight.mul_(2)


def other_memory(encoder):
    norm = encoder.model.embeddings.LayerNorm
    norm.weight.data = norm.weight.data * 2


def other_eps(encoder):
    encoder.model.embeddings.LayerNorm.eps = 0.5


def fewer_layers(encoder):
    encoder.model.encoder.layer = encoder.model.encoder.layer[:1]


CHANGES = (hook, other_words, write_words, other_memory, other_eps, fewer_layers)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_around_the_layers_is_seen(change, tmp_path, monkeypatch):
    encoder = make(tmp_path)
    before = encoder.encode(TEXT)
    change(encoder)
    quick, others, _ = both_ways(encoder, monkeypatch, lambda: [encoder.encode(TEXT)])
    assert np.array_equal(*quick, *others) and not np.array_equal(before, *quick)


@has_kernels
def test_tables_that_change_when_they_are_read_are_called(tmp_path, monkeypatch):
    encoder = make(tmp_path)
    encoder.encode(TEXT)
    encoder.model.embeddings.word_embeddings.max_norm = 0.01
    _, _, served = both_ways(encoder, monkeypatch, lambda: encoder.encode(TEXT))
    assert served and not any(served)


def test_a_model_that_is_waited_for_is_called(tmp_path):
    encoder = make(tmp_path)
    before, seen = encoder.encode(TEXT), []
    encoder.model.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state.shape))
    assert np.array_equal(encoder.encode(TEXT), before) and len(seen) == 1


def test_dtypes_that_come_apart_run_op_by_op(tmp_path):
    """One tensor of another dtype, in the place of the same parameter: torch's ops say what is wrong with it."""
    encoder = make(tmp_path)
    encoder.encode(TEXT)
    norm = encoder.model.encoder.layer[1].output.LayerNorm
    norm.weight.data = norm.weight.data.double()
    with pytest.raises((RuntimeError, ValueError)):
        encoder.encode(TEXT)
    norm.weight.data = norm.weight.data.float()
    assert np.isfinite(encoder.encode(TEXT)).all()


def test_bad_ids_are_named_as_before(tmp_path):
    encoder = make(tmp_path)
    encoder.tokenizer.add_tokens(["zzzz"])
    limit = encoder.model.config.vocab_size
    with pytest.raises(InputError, match=f"input_ids holds {limit}; valid values are 0 to {limit - 1}"):
        encoder.encode("zzzz")
    encoder.model.embeddings.position_embeddings = torch.nn.Embedding(4, 32)
    with pytest.raises(InputError, match=r"a sequence of .* tokens is longer than the position table, which has 4"):
        encoder.encode(TEXT)


@has_kernels
def test_a_reason_is_found_once_and_forgotten_with_what_it_was(tmp_path, monkeypatch):
    """A leaf of another class, as an adapter is: looked at once, until it is a plain one again."""
    looks = []
    look = snapshot._encoder_of
    monkeypatch.setattr(snapshot, "_encoder_of", lambda *args: looks.append(1) or look(*args))
    encoder = make(tmp_path)
    expected = encoder.encode(TEXT)
    attention = encoder.model.encoder.layer[1].attention.self
    plain = attention.query

    class Adapter(torch.nn.Linear):
        pass

    attention.query = Adapter(32, 32)
    attention.query.load_state_dict(plain.state_dict())
    for _ in range(3):
        assert np.array_equal(encoder.encode(TEXT), expected)
    assert len(looks) == 2
    attention.query = plain
    assert np.array_equal(encoder.encode(TEXT), expected) and len(looks) == 3


@has_kernels
def test_tensors_are_let_go(tmp_path):
    import gc
    import weakref

    encoder = make(tmp_path)
    encoder.encode(TEXT)
    held = weakref.ref(encoder.model.embeddings.word_embeddings.weight)
    del encoder
    gc.collect()
    assert held() is None


@has_kernels
@pytest.mark.parametrize("threads", (1, 2, 3, 8))
def test_the_same_bits_for_any_number_of_threads(threads, tmp_path):
    """More threads than cores, too: those that get none delay no other, and change nothing."""
    encoder = make(tmp_path, hidden_size=192, intermediate_size=640, num_attention_heads=6)
    before = torch.get_num_threads()
    expected = encoder.encode(TEXTS)
    try:
        torch.set_num_threads(threads)
        assert np.array_equal(encoder.encode(TEXTS), expected)
    finally:
        torch.set_num_threads(before)


@has_kernels
@pytest.mark.parametrize("model_type", ("bert", "roberta-prelayernorm"))
def test_hidden_states_that_are_pooled_are_no_tensors(model_type, tmp_path):
    """One matrix for all layers, and nothing of it goes through the allocator's heap."""
    folder = tiny.write_model(tmp_path, model_type=model_type)
    encoder = fastbert.SentenceEncoder(folder, device="cpu")
    text, hidden_states = "dog " * 60, 62 * 32 * 4
    for _ in range(2):
        encoder.encode(text)
    assert peak_bytes(lambda: encoder.encode(text)) < hidden_states // 2
    assert peak_bytes(lambda: encoder.encode(text, output_value="token_embeddings")) >= hidden_states
