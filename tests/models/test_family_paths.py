"""How the layers of every family run: as one op on the CPU, compiled, checkpointed, on any number of threads, alone."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from batches import make_batch
from counted_ops import Ops
from family_configs import NUM_CONFIGS, has_rotary, has_windows, make_config
from full import left_to_full, thinned
from hf import FAMILIES, families_axis, randomise
from kinds import of_every_kind
from precise import in_float64
from seeds import manual_seed

import fastbert
from fastbert.models.classes import CLASSES
from fastbert.native.availability import extension_error
from fastbert.sentences import SentenceEncoder
from fastbert.testing.cases import DTYPES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

has_kernels = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))
dtype_axis = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SPECIAL = tuple(f for f in FAMILIES if has_rotary(make_config(f)))
special_axis = pytest.mark.parametrize("model_type", SPECIAL)


def make(model_type: str, index: int = 0, dtype=torch.float32, **changes):
    config = make_config(model_type, index, **{"max_position_embeddings": 80, **changes})
    return randomise(CLASSES[model_type, "Model"](config)).to(dtype)


def fused_cases() -> list[tuple[str, int]]:
    """All but RoFormer where it turns values, too, a convolution, and rows that stand head by head."""
    cases = [(name, index) for name in FAMILIES for index in range(NUM_CONFIGS)]
    specs = {case: make_config(*case).layer_specs for case in cases}
    cases = [case for case in cases if not any(spec.after or spec.names.per_head for spec in specs[case])]
    turns = {case: [spec.attention.rotary for spec in make_config(*case).layer_specs] for case in cases}
    return [case for case in cases if not any(position and position.rotates_values for position in turns[case])]


@of_every_kind()
@thinned(4)
@has_kernels
@dtype_axis
@pytest.mark.parametrize(("model_type", "index"), fused_cases())
def test_layers_are_one_op(model_type, index, dtype):
    """In inference and in training, forward and backward, but for layers that come again: nothing runs op by op."""
    model, batch = make(model_type, index, dtype), make_batch(make_config(model_type, index), "right")
    paths = model.config.layer_paths
    calls = 1 if len(set(paths)) == len(paths) else len(paths)
    with Ops() as ops, torch.no_grad():
        model.eval()(**batch.inputs)
    assert ops.calls["encoder_cpu"] + ops.calls["encoder_layers_cpu"] == 1, ops.calls
    assert not any("attention" in name for name in ops.calls), ops.calls
    with Ops() as ops:
        model.train()(**batch.inputs).last_hidden_state.float().square().sum().backward()
    assert ops.calls["encoder_layers_fwd_cpu"] == ops.calls["encoder_layers_bwd_cpu"] == calls, ops.calls
    assert not any("attention" in name or "feed_forward" in name for name in ops.calls), ops.calls


@of_every_kind()
@left_to_full(lambda p: (FAMILIES.index(p["model_type"]) + DTYPES.index(p["dtype"])) % 2 == 1)
@dtype_axis
@families_axis
def test_isolation(model_type, dtype):
    """Other tokens in one sequence, or another length of it, change no bit of another sequence's."""
    model, batch = make(model_type, 0, dtype).eval(), make_batch(make_config(model_type), "right", 5, 40)
    with torch.no_grad():
        before = model(**batch.inputs).last_hidden_state
        batch.inputs["input_ids"][2] = 7
        batch.inputs["attention_mask"][2] = 0
        batch.inputs["attention_mask"][2, :33] = 1
        after = model(**batch.inputs).last_hidden_state
    others = [0, 1, 3, 4]
    assert torch.equal(before[others], after[others]) and not torch.equal(before[2], after[2])


@thinned(6)  # the rows that a thread takes do not go by the family
@has_kernels
@dtype_axis
@special_axis
def test_the_number_of_threads_changes_no_bit(model_type, dtype):
    model, batch = make(model_type, 0, dtype, num_hidden_layers=2), make_batch(make_config(model_type), "right", 5, 70)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            model.zero_grad()
            out = model(**batch.inputs).last_hidden_state
            (out.float() ** 2).sum().backward()
            results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    finally:
        torch.set_num_threads(threads)
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


@special_axis
def test_gradient_checkpointing(model_type):
    """The same bits, dropout's masks among them."""
    dropout = {name: 0.2 for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")}
    dropout = {name: p for name, p in dropout.items() if name not in fastbert.families.FAMILIES[model_type].fixed}
    model, batch = make(model_type, **dropout).train(), make_batch(make_config(model_type), "holes")
    results = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        manual_seed(1)
        model(**batch.inputs).last_hidden_state.square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert results[0] and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@left_to_full(lambda p: p["backend"] == "inductor" or p["model_type"] != "modernbert")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@special_axis
def test_compiles_into_one_graph(model_type, backend):
    """Windows, grouped heads and rotary embedding; the positions of the caller's, too."""
    model, batch = make(model_type, num_hidden_layers=2).eval(), make_batch(make_config(model_type), "right", 4, 30)
    assert has_windows(model.config) or "layer_types" not in model.config.own
    torch.compiler.reset()
    compiled = torch.compile(model.encode_packed, fullgraph=True, backend=backend)
    given = batch.packed()
    arguments = (given["input_ids"], given["cu_seqlens"], given["max_seqlen"])
    with torch.no_grad():
        for positions in (None, given["position_ids"].remainder(7)):
            found, eager = (f(*arguments, position_ids=positions) for f in (compiled, model.encode_packed))
            oracle = copy.deepcopy(model).double().encode_packed(*arguments, position_ids=positions)
            assert_close_to_reference(found, oracle, eager, GRADIENT_FACTOR)
            assert torch.equal(found, eager) or backend == "inductor"  # which computes cosines otherwise


@thinned(4)
@pytest.mark.parametrize(
    ("settings", "length"),
    [(None, 50), ({"do_lower_case": False}, 50), ({"max_seq_length": None}, 50), ({"max_seq_length": 20}, 20)],
)
@special_axis
def test_sentences(model_type, settings, length, tmp_path):
    """As sentence-transformers: a text is cut to the tokenizer's own model_max_length where nothing else says."""
    folder = (
        tiny.write_model(tmp_path, model_type=model_type, local_attention=6)
        if model_type == "modernbert"
        else (tiny.write_model(tmp_path, model_type=model_type))
    )
    tiny.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "model_max_length": 50})
    if settings is not None:
        tiny.write_json(folder / "sentence_bert_config.json", settings)
    encoder = SentenceEncoder.from_pretrained(folder)
    assert encoder.max_seq_length == length
    long = "the cat sat on mat " * 40
    texts = ["the cat sat", long, "a dog ran in to house"]
    found = encoder.encode(texts, convert_to_tensor=True)
    ids = encoder.tokenizer.encode(long).ids
    assert len(ids) == length
    model = fastbert.AutoModel.from_pretrained(folder)
    with torch.no_grad():
        literal, exact = (m(torch.tensor([ids])).last_hidden_state.mean(1)[0] for m in (model, in_float64(model)))
        alone = encoder.encode(long, convert_to_tensor=True)
    assert_close_to_reference(found[1], exact, literal, GRADIENT_FACTOR)
    assert torch.equal(found[1], alone)


def test_sentences_without_any_limit(tmp_path):
    """transformers writes 1e30 where a tokenizer has no limit: the config's max_position_embeddings is one."""
    folder = tiny.write_model(tmp_path, model_type="modernbert")
    tiny.write_json(folder / "tokenizer_config.json", {"model_max_length": 10**30})
    assert SentenceEncoder.from_pretrained(folder).max_seq_length == 64
