"""fastbert.packed_weights.keep_packed_only: the bits stay, the weights go, and to read one is an error."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import seeds
import tiny
import torch
from family_configs import make_config
from full import halved
from isas import packs
from kinds import of_every_kind

from fastbert import _C, SentenceEncoder, quantize, repack, use_backend
from fastbert.families import FAMILIES
from fastbert.models.auto import model_class
from fastbert.ops._common import PackedOnly
from fastbert.packed_weights import keep_packed_only

DTYPES = ("float32", "bfloat16", "int8")
GONE = _C.packed_only_error
pytestmark = packs


def texts(count: int, words: int) -> list[str]:
    draw = seeds.torch_generator(count)
    places = torch.randint(len(tiny.WORDS.split()), (count, words), generator=draw).tolist()
    return [" ".join(tiny.WORDS.split()[i] for i in row) for row in places]


def gone(model: torch.nn.Module) -> list[PackedOnly]:
    tensors = [t for each in model.modules() for t in (*each._parameters.values(), *each._buffers.values())]
    return [t for t in tensors if isinstance(t, PackedOnly)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=200)


def served(folder, dtype="float32") -> SentenceEncoder:
    encoder = SentenceEncoder(folder, dtype=dtype, device="cpu")
    keep_packed_only(encoder)
    return encoder


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_have_the_same_bits(folder, dtype):
    """Of one text, of batches of fewer and of more rows than products pack for themselves, and op by op."""
    whole, alone = SentenceEncoder(folder, dtype=dtype, device="cpu"), served(folder, dtype)
    assert len(gone(alone.model)) == 12 and not gone(whole.model)
    for given in (texts(1, 3), texts(1, 60), texts(9, 20), texts(20, 60), texts(120, 60)):
        for _ in range(3):
            expected = whole.encode(given, batch_tokens=100_000, convert_to_tensor=True)
            assert torch.equal(alone.encode(given, batch_tokens=100_000, convert_to_tensor=True), expected)
    ids = torch.randint(5, 30, (4, 50), generator=seeds.torch_generator(1))
    for encoder in (whole, alone):  # layers with hooks are called one by one
        encoder.model.encoder.layer[0].register_forward_hook(lambda *arguments: None)
    with torch.no_grad():  # all of a weight that is there is compared, or packed on the way
        expected = whole.model(ids, output_hidden_states=True).hidden_states
        found = alone.model(ids, output_hidden_states=True).hidden_states
    assert all(map(torch.equal, found, expected)) and len(found) == 3


@of_every_kind()
@pytest.mark.parametrize("index", (0, 1))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_goes_on(model_type, index):
    """What cannot run by packed copies alone keeps its weights."""
    config = make_config(model_type, index)
    seeds.manual_seed(3)
    model = model_class(model_type)(config).eval().requires_grad_(False)
    ids = torch.randint(5, 43, (3, 17), generator=seeds.torch_generator(2))
    mask = torch.arange(17) < torch.tensor([[17], [5], [9]])
    calls = (torch.inference_mode, torch.no_grad)
    expected = []
    for mode in calls:
        with mode():
            expected.append(model(ids, attention_mask=mask).last_hidden_state)
    keep_packed_only(model)
    for mode, before in zip(calls, expected, strict=True):
        with mode():
            assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, before)
    called = any(spec.names.per_head or spec.after is not None for spec in config.layer_specs)  # DeBERTa's
    assert bool(gone(model)) == (not called)


READERS = {
    "print": lambda model, weight: repr(weight),
    "a sum": lambda model, weight: weight.sum(),
    "an element": lambda model, weight: weight[0, 0],
    "numpy": lambda model, weight: weight.numpy(),
    "tolist": lambda model, weight: weight.tolist(),
    "data": lambda model, weight: weight.data,
    "a write": lambda model, weight: weight.zero_(),
    "memory": lambda model, weight: weight.data_ptr(),
    "detach": lambda model, weight: weight.detach(),
    "clone": lambda model, weight: weight.clone(),
    "deepcopy": lambda model, weight: copy.deepcopy(model),
    "pickle": lambda model, weight: pickle.dumps(model),
    "to another dtype": lambda model, weight: model.to(torch.float64),
    "half": lambda model, weight: model.half(),
    "to meta": lambda model, weight: model.to("meta"),
    "state_dict": lambda model, weight: model.state_dict(),
    "repack": lambda model, weight: repack(model),
    "by another product": lambda model, weight: torch.nn.functional.linear(torch.ones(1, weight.shape[1]), weight),
    "the torch backend": lambda model, weight: run(model, "torch"),
}


def run(model, backend=None):
    with torch.no_grad(), use_backend(backend):
        return model(torch.tensor([[2, 9, 3]]))


@halved
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", ("float32", "int8"))
def test_to_read_a_weight_is_an_error(folder, tmp_path, reader, dtype):
    model = served(folder, dtype).model
    weight = gone(model)[0]
    if dtype == "int8" and reader in ("half", "to another dtype"):
        model.to(torch.float16)  # which leaves integers alone, as ever
        return
    with pytest.raises(RuntimeError) as error:
        READERS[reader](model, weight)
    assert str(error.value) == GONE
    assert weight.shape == model.encoder.layer[0].attention.self.query.weight.shape and weight.numel() == 64 * 64


def test_dlpack_which_does_not_ask_gets_nothing(folder):
    weight = gone(served(folder).model)[0]
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight)).isnan().all()


def test_what_needs_weights_is_told(folder, tmp_path):
    encoder = served(folder)
    model = encoder.model
    state = SentenceEncoder(folder, device="cpu").model.state_dict()
    calls = [
        lambda: encoder.save_pretrained(tmp_path / "saved"),
        lambda: quantize(model),
        lambda: model.load_state_dict(state),
        lambda: model.bfloat16(),
        lambda: train(model),
    ]
    if _C.has_bf16():  # others multiply in float32 under autocast, too
        calls.append(lambda: under_autocast(model))
    for call in calls:
        with pytest.raises(RuntimeError) as error:
            call()
        assert GONE in str(error.value)
    assert not (tmp_path / "saved" / "model.safetensors").exists()


def train(model):
    model.requires_grad_(True)
    model.train()(torch.tensor([[2, 9, 3]])).last_hidden_state.sum().backward()


def under_autocast(model):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.tensor([[2, 9, 3]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_goes_down_by_the_weights(folder, dtype):
    whole, alone = (
        SentenceEncoder(folder, dtype=dtype, device="cpu"),
        SentenceEncoder(folder, dtype=dtype, device="cpu"),
    )
    pointers = {t.untyped_storage().data_ptr() for t in tensors(alone.model)}
    weights = [leaf.weight for leaf in linear_leaves(whole.model)]
    held = _C.packed_bytes()
    keep_packed_only(alone)
    left = [t for t in tensors(alone.model) if not isinstance(t, PackedOnly)]
    assert {t.untyped_storage().data_ptr() for t in left} < pointers
    assert sum(t.nbytes for t in tensors(whole.model)) - sum(t.nbytes for t in left) == sum(w.nbytes for w in weights)
    for _ in range(3):
        alone.encode(texts(3, 9))
    assert _C.packed_bytes() == held  # nothing is packed beside
    for _ in range(3):
        whole.encode(texts(3, 9))
    beside = sum(t.packed.untyped_storage().nbytes() for t in gone(alone.model)) - (_C.packed_bytes() - held)
    assert 64 * len(weights) <= beside < 128 * len(weights)  # a header, and the rest of a cache line


def tensors(model) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def linear_leaves(model) -> list[torch.nn.Module]:
    return [leaf for name, leaf in model.named_modules() if hasattr(leaf, "in_features") and "layer." in name]


def test_a_weight_that_others_have_stays(folder):
    model = SentenceEncoder(folder, device="cpu").model
    first, second = (layer.attention.self.query for layer in model.encoder.layer)
    second.weight = first.weight
    keep_packed_only(model)
    assert len(gone(model)) == 10 and type(first.weight) is torch.nn.Parameter


def test_with_the_torch_backend_all_stay(folder):
    with use_backend("torch"):
        assert not gone(served(folder).model)


def test_bad_input_has_the_same_error(folder):
    errors = []
    for model in (SentenceEncoder(folder, device="cpu").model, served(folder).model):
        for ids in ([[2, 10_000, 3]], [[2] * 65]):
            with pytest.raises(Exception) as error:
                model(torch.tensor(ids))
            errors.append((type(error.value), str(error.value)))
    assert errors[:2] == errors[2:]


def test_several_threads(folder):
    alone, whole = served(folder), SentenceEncoder(folder, device="cpu")
    given = [texts(1 + i, 12) for i in range(8)]
    expected, found = [whole.encode(each, convert_to_tensor=True) for each in given], {}

    def encode(i: int) -> None:
        found[i] = alone.encode(given[i], convert_to_tensor=True)

    threads = [threading.Thread(target=encode, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in range(8))


def test_it_can_be_asked_for_twice(folder):
    encoder = served(folder)
    before = gone(encoder.model)
    keep_packed_only(encoder)
    assert all(a is b for a, b in zip(gone(encoder.model), before, strict=True))


def test_where_products_are_torchs_every_weight_stays(folder):
    encoder, chosen = SentenceEncoder(folder, device="cpu"), _C.isa()
    try:
        _C.set_isa("generic")
        keep_packed_only(encoder)
    finally:
        _C.set_isa(chosen)
    assert not gone(encoder.model)


@pytest.mark.skipif("avx2" not in _C.isas(), reason="int8 panels are packed alike for all instruction sets here")
def test_int8_panels_serve_the_instruction_set_that_packed_them(folder):
    encoder = SentenceEncoder(folder, device="cpu")
    quantize(encoder.model)
    chosen = _C.isa()
    try:
        _C.set_isa("avx2")
        keep_packed_only(encoder)
        encoder.encode(texts(1, 3))
        _C.set_isa("generic")
        with pytest.raises(RuntimeError, match="packed for another instruction set than the one in use"):
            encoder.encode(texts(1, 3))
    finally:
        _C.set_isa(chosen)
