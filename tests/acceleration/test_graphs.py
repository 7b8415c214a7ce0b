"""fastbert.graphs: buckets, padding and bookkeeping; where there is no GPU, with eager calls in place of graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import make_batch
from family_configs import make_config
from hf import FAMILIES, families_axis
from kinds import of_every_kind, of_few_kinds
from seeds import manual_seed

import fastbert
from benchmarks.gpu.simulated.no_graphs import NoGraphs
from fastbert.cuda_graphs import encoder
from fastbert.cuda_graphs.blocks import StaticBatch
from fastbert.cuda_graphs.buckets import INFERENCE, Sizes, bucket_for
from fastbert.cuda_graphs.encoder import GraphedEncoder
from fastbert.errors import InputError
from fastbert.models.auto import model_class
from fastbert.packed_inputs import ModelInputs
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "inputs_embeds",
    "cu_seqlens",
    "max_seqlen",
)


def make_model(model_type: str = "bert", index: int = 0, **changes):
    manual_seed(1)
    return model_class(model_type, "Model")(make_config(model_type, index, **changes)).to(DEVICE).eval()


class Eager(NoGraphs):
    """In place of captured graphs; counts those that were captured, and those that are gone."""

    def __init__(self):
        self.captured, self.freed = [], 0

    def capture(self, run):
        run()
        self.captured.append(run)
        return run

    def nbytes(self, replay=None):
        return 1000 * (len(self.captured) - self.freed if replay is None else 1)

    def free(self, replay=None):
        self.freed += 1 if replay is not None else len(self.captured) - self.freed


@pytest.fixture
def graphs(monkeypatch):
    """As fastbert.graphs; where there is no GPU over eager calls, which what it gives has as `eager`."""
    if not ON_GPU:
        monkeypatch.setattr(encoder, "first_to_serve", lambda *args: fastbert.Backend.CPU)

    def make(model, **bounds):
        if ON_GPU:
            return fastbert.graphs(model, **bounds)
        eager = Eager()
        bounds = {"max_tokens": 8192, "max_graphs": 32, "max_memory": 2 << 30, **bounds}
        made = GraphedEncoder(model, **bounds, make_graphs=lambda device: eager)
        made.eager = eager
        return made

    return make


def compare(found, model, arguments) -> None:
    """Every field of `found` with the plain model's, by the error rule; a fp64 copy of the model is the oracle."""
    with torch.no_grad():
        plain = model(**arguments)
        doubles = {n: t.double() if n == "inputs_embeds" else t for n, t in arguments.items()}
        oracle = copy.deepcopy(model).double()(**doubles)
    assert list(found) == list(plain)
    for name in ("last_hidden_state", "pooler_output")[: len(plain)]:
        assert_close_to_reference(found[name], oracle[name], plain[name], GRADIENT_FACTOR, name)


def to_device(inputs):
    return {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}


def test_buckets_hold_their_batches_and_waste_at_most_a_third():
    for tokens in range(1, 5000):
        batch = Sizes(tokens, 3, min(tokens, 100))
        bucket = bucket_for(batch, INFERENCE)
        assert bucket.holds(batch) and bucket.batch_size == 8
        assert bucket.total_tokens <= tokens * 3 / 2 or bucket.total_tokens <= 32
    assert bucket_for(Sizes(8192, 1, 512), INFERENCE) == Sizes(8192, 8, 512)
    assert bucket_for(Sizes(40, 5, 9), INFERENCE) == Sizes(48, 8, 16)
    assert len({bucket_for(Sizes(n, 1, n), INFERENCE).total_tokens for n in range(1, 8193)}) <= 20


def is_relative(model) -> bool:
    return model.config.distances is not None and bool(model.config.distances.relatives)


@of_every_kind()
@pytest.mark.parametrize(
    ("model_type", "pattern"),
    (*((family, "all") for family in FAMILIES), ("bert", "none"), ("bert", "left"), ("roberta", "holes")),
)
def test_a_static_batch_gives_the_same_outputs(model_type, pattern):
    """Slack rows hold an earlier batch, cu_seqlens goes on with empty sequences: real tokens do not notice."""
    model = make_model(model_type)
    batch = make_batch(model.config, "right" if is_relative(model) else pattern)  # without holes: see the next test
    inputs = model.prepare(ModelInputs(**to_device(batch.inputs)))
    has_types = inputs.ids.token_type_ids is not None
    bucket = bucket_for(Sizes(inputs.batch.total_tokens, inputs.batch.batch_size, 11), INFERENCE)
    has_tasks = model.config.embeddings.task_type is not None
    static = StaticBatch(bucket, model.device, model.config.distances, has_types, has_tasks)
    before = {"words": 2, "positions": 2, "types": max(0, model.config.type_vocab_size - 1)}
    for name, value in before.items():  # as an earlier batch left it
        static.ids.get(name, torch.empty(0)).fill_(value)
    static.fill(inputs)
    tokens, empty = inputs.batch.total_tokens, bucket.batch_size - inputs.batch.batch_size
    assert static.cu_seqlens.tolist() == [*inputs.batch.cu_seqlens.tolist(), *[tokens] * empty]
    with torch.no_grad():
        found = model.encode(static.inputs()).packed[: inputs.batch.total_tokens]
        plain, oracle = (m.encode(inputs).packed for m in (model, copy.deepcopy(model).double()))
        assert_close_to_reference(found, oracle, plain, GRADIENT_FACTOR)
        for name, value in {"words": 5, "positions": 5, "types": 0}.items():
            static.ids.get(name, torch.empty(0))[tokens:] = value
        assert torch.equal(found, model.encode(static.inputs()).packed[: inputs.batch.total_tokens])


@of_few_kinds()
@families_axis
def test_padded_and_packed_calls(graphs, model_type):
    model = make_model(model_type)
    graphed = graphs(model)
    with torch.no_grad():
        for seed, pattern in enumerate(("right", "holes", "none", "right")):
            batch = make_batch(model.config, pattern, seed=seed)
            arguments = to_device(batch.inputs)
            found = graphed(**arguments)
            if is_relative(model) and pattern == "holes":
                assert "a mask has padding between its tokens" in graphed.why_eager
            else:
                assert graphed.why_eager is None
            compare(found, model, arguments)
            packed = to_device(batch.packed())
            compare(graphed(**packed), model, packed)
            if "token_type_ids" not in packed:
                out = graphed.encode_packed(**packed)
                assert torch.equal(out, graphed(**packed).last_hidden_state) and graphed.why_eager is None
    assert graphed(**arguments, return_dict=False)[0].shape == found.last_hidden_state.shape
    assert graphed.buckets and (ON_GPU or len(graphed.eager.captured) == len(graphed.buckets))


def test_an_output_survives_the_next_batch(graphs):
    model = make_model()
    graphed = graphs(model)
    with torch.inference_mode():
        first = to_device(make_batch(model.config, "none").inputs)
        out = graphed(**first).last_hidden_state
        kept = out.clone()
        graphed(**to_device(make_batch(model.config, "none", seed=5).inputs))
        assert torch.equal(out, kept) and graphed.why_eager is None
    with torch.no_grad():  # buffers made in inference mode serve outside of it, too
        assert torch.equal(graphed(**first).last_hidden_state, kept)


def test_bounds_drop_the_least_recently_used(graphs):
    model = make_model()
    ids = [torch.randint(1, 40, (batch, 8), device=DEVICE) for batch in (1, 3, 6, 12)]
    graphed = graphs(model, max_graphs=2)
    with torch.no_grad():
        for i in (0, 1, 0, 2, 0, 3):
            graphed(ids[i])
    assert [bucket.total_tokens for bucket in graphed.buckets] == [8, 96]
    by_memory = graphs(model, max_memory=1)
    with torch.no_grad():
        for batch in ids:
            compare(by_memory(batch), model, {"input_ids": batch})
            assert len(by_memory.buckets) == 1  # the newest stays, whatever it holds
    by_memory.clear()
    assert by_memory.buckets == [] and by_memory.nbytes == 0
    assert ON_GPU or (graphed.eager.freed, by_memory.eager.freed) == (2, 3 + 1)


def test_weights_may_change(graphs):
    model = make_model()
    graphed, ids = graphs(model), torch.randint(1, 40, (2, 8), device=DEVICE)
    norm = model.encoder.layer[0].output.LayerNorm
    with torch.no_grad():
        graphed(ids)
        norm.weight.mul_(2)  # in place: the graph reads the same memory
        compare(graphed(ids), model, {"input_ids": ids})
        count = 0 if ON_GPU else len(graphed.eager.captured)
        norm.weight = torch.nn.Parameter(norm.weight * 3)  # replaced
        compare(graphed(ids), model, {"input_ids": ids})
        norm.weight.data = norm.weight.data.clone() / 2  # replaced behind the parameter, as model.to() does
        compare(graphed(ids), model, {"input_ids": ids})
        captured_from = graphed._captured_from
        assert captured_from.is_same()
        norm.weight.data = norm.weight.data.view(torch.float16)  # the same address, another dtype
        assert not captured_from.is_same()
        norm.weight.data = norm.weight.data.view(torch.float32)
        model.encoder.layer[0] = copy.deepcopy(model.encoder.layer[1])
        compare(graphed(ids), model, {"input_ids": ids})
    assert ON_GPU or len(graphed.eager.captured) == count + 3


def test_what_cannot_go_through_a_graph_runs_as_the_model_does(graphs):
    model = make_model()
    graphed = graphs(model, max_tokens=32)
    ids = torch.randint(1, 40, (2, 8), device=DEVICE)

    def reason(*args, **kwargs) -> str:
        with torch.no_grad():
            compare(graphed(*args, **kwargs), model, {**dict(zip(("input_ids",), args, strict=False)), **kwargs})
        return graphed.why_eager

    assert reason(ids) is None
    assert "output_attentions" in reason(ids, output_attentions=True)
    assert "output_hidden_states" in reason(ids, output_hidden_states=True)
    assert "40 tokens are not within 1 to 32" in reason(torch.randint(1, 40, (5, 8), device=DEVICE))
    mask = torch.zeros_like(ids)
    assert "0 tokens" in reason(ids, attention_mask=mask)
    assert "inputs_embeds" in reason(inputs_embeds=torch.randn(2, 8, 64, device=DEVICE))
    out = graphed(ids)
    assert "gradients" in graphed.why_eager and out.last_hidden_state.requires_grad
    model.train()
    with torch.no_grad():
        graphed(ids)
    assert "training" in graphed.why_eager
    model.eval()
    for leaf, expected in ((model, "the model has hooks"), (model.encoder.layer[0].output.dense, "inside")):
        handle = leaf.register_forward_hook(lambda module, args, out: None)
        assert expected in reason(ids)
        handle.remove()
    model.encoder.layer[0].train()
    assert "in training mode" in reason(ids)
    model.eval()
    assert reason(ids) is None


@pytest.mark.skipif(ON_GPU, reason="it is about machines without a GPU")
def test_without_a_gpu_everything_is_the_plain_model():
    model = make_model()
    graphed, ids = fastbert.graphs(model), torch.randint(1, 40, (3, 9))
    with torch.no_grad():
        for arguments in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": (ids > 5).long()}):
            found, plain = graphed(**arguments), model(**arguments)
            assert list(found) == list(plain) and all(torch.equal(found[name], plain[name]) for name in plain)
        cu_seqlens = torch.tensor([0, 9, 27], dtype=torch.int32)
        arguments = (ids.flatten(), cu_seqlens, 18)
        assert torch.equal(graphed.encode_packed(*arguments), model.encode_packed(*arguments))
    assert graphed.why_eager == "the model is on cpu" and graphed.buckets == []


def test_bad_input_is_refused_before_anything_is_copied(graphs):
    model = make_model()
    graphed = graphs(model)
    ids = torch.randint(1, 40, (2, 8), device=DEVICE)
    with torch.no_grad():
        before = graphed(ids).last_hidden_state
        with pytest.raises(InputError, match="input_ids holds 43; valid values are 0 to 42"):
            graphed(torch.full_like(ids, 43))
        assert torch.equal(graphed(ids).last_hidden_state, before)
    with pytest.raises(TypeError, match="not BertForMaskedLM"):
        fastbert.graphs(fastbert.BertForMaskedLM(model.config))
    with pytest.raises(ValueError, match="max_graphs 0"):
        fastbert.graphs(model, max_graphs=0)
