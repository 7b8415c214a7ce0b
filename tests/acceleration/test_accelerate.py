"""fastbert.accelerate against the same transformers model left alone: outputs, losses, gradients, fallbacks.

The oracle is transformers' eager model in float64, the baseline the same in the tested dtype; real tokens are compared.
"""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from batches import make_batch
from family_configs import config_for, head_of
from full import halved, left_to_full
from hf import FAMILIES, MODELS, families_axis, is_left_out, make_hf, make_oracle, random_like
from kinds import of_every_kind, of_few_kinds
from seeds import manual_seed
from theirs import by_choice, mend
from torch import nn

import fastbert
from fastbert.testing.cases import DTYPES, MASKS
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

dtype_axis = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
CHOICES = 2


@pytest.fixture(autouse=True)
def one_thread():
    """For models this small a second thread only waits, and on a busy machine it waits long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastbert: ")
        yield


def assert_as_transformers(model, **inputs) -> torch.Tensor:
    """The first output of an accelerated model, compared with that of its own restored copy; returns it."""
    plain, mask = fastbert.restore(copy.deepcopy(model)), inputs.get("attention_mask")
    exact = {**inputs, "inputs_embeds": inputs["inputs_embeds"].double()} if "inputs_embeds" in inputs else inputs
    near, actual, oracle = plain(**inputs)[0], model(**inputs)[0], make_oracle(plain)(**exact)[0]
    real = slice(None) if mask is None or actual.shape[:2] != mask.shape else mask.bool()
    assert_close_to_reference(actual[real], oracle[real].double(), near[real], GRADIENT_FACTOR)
    return actual


def make_labels(config, head: str, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Labels of one head; -100 at padding and for rows without a token."""
    rows, empty = len(real), ~real.any(1)
    per_row, per_token = torch.randint(2, (rows,)).where(~empty, -100), torch.randint(2, real.shape).where(real, -100)
    if head == "Model":
        return {}
    if head == "QuestionAnswering":
        return {"start_positions": torch.zeros(rows).long(), "end_positions": real.sum(1).sub(1).clamp(min=0)}
    if head == "MultipleChoice":
        return {"labels": per_row.view(-1, CHOICES)[:, 0].where(~empty.view(-1, CHOICES).any(1), -100)}
    if head == "PreTraining" and config.model_type != "electra":
        pair = config.family.heads["PreTraining"].pair_label
        return {"labels": per_token, pair: per_row}
    if head == "PreTraining":
        return {"labels": per_token.clamp(min=0)}
    return {"labels": per_row if head in ("SequenceClassification", "NextSentencePrediction") else per_token}


def run(model, head: str, batch, labels, **options):
    """({name: what can be compared of an output}, {name: gradient}) of one call and its backward."""
    inputs = dict(batch.inputs)
    if head == "MultipleChoice":
        inputs = by_choice(model.config.model_type, inputs, CHOICES)
    model.zero_grad()
    out, real = model(**inputs, **labels, **options), batch.real
    rows = real.any(1).view(-1, CHOICES).all(1) if head == "MultipleChoice" else real.any(1)
    pick = lambda t: t if t.dim() == 0 else t[real] if t.shape[:2] == real.shape else t[rows]  # noqa: E731
    found = {name: pick(t) for name, t in out.items() if isinstance(t, torch.Tensor)}
    for name in ("hidden_states", "attentions"):
        found |= {f"{name}.{i}": pick(t) for i, t in enumerate(out.get(name) or ())}
    # A random sum of all outputs: a loss alone has gradients that are zero but for noise, such as a span head's bias.
    sum((t * random_like(t.shape, seed).to(t.dtype)).sum() for seed, t in enumerate(found.values())).backward()
    return out, found, {name: p.grad for name, p in model.named_parameters()}


def in_units_of_the_largest(grads, oracle) -> torch.Tensor:
    """All gradients in a row, each in units of the largest of its layer, so that the rule is asked once a model.

    Of hundreds of tensors a few are beyond any factor by chance: a query's gradient is a small difference of what is
    large in its layer, and a key's bias has none at all, since softmax cannot see it."""
    largest: dict[str, float] = {}
    layer = {name: re.sub(r"(\.\d+)\..*|\.[^.]*\.[^.]*$", r"\1", name) for name in oracle}
    for name, grad in oracle.items():
        assert (grad is None) == (grads[name] is None), name
        if grad is not None:
            largest[layer[name]] = max(largest.get(layer[name], 0.0), grad.abs().max().item())
    return torch.cat([g.double().flatten() / largest[layer[n]] for n, g in grads.items() if g is not None])


def check(config, head: str, batch, dtype, **options):
    """One call of the accelerated model by the error rule, and its backward."""
    baseline = make_hf(config, head, dtype)
    accelerated, labels = fastbert.accelerate(copy.deepcopy(baseline)), make_labels(config, head, batch.real)
    mend(baseline)
    oracle = make_oracle(baseline)
    theirs, expected, expected_grads = run(oracle, head, batch, labels, **options)
    _, near, near_grads = run(baseline, head, batch, labels, **options)
    ours, actual, grads = run(accelerated, head, batch, labels, **options)
    assert type(ours) is type(theirs) and list(ours) == list(theirs) and actual.keys() == expected.keys()
    for name in actual:  # a loss counts in the model's dtype, as in test_parity: its fp32 is made of those logits
        tensors = actual[name].to(dtype), expected[name].double(), near[name].to(dtype)
        assert_close_to_reference(*tensors, GRADIENT_FACTOR, name)
    assert grads.keys() == expected_grads.keys()
    all_grads, near, oracle = (in_units_of_the_largest(g, expected_grads) for g in (grads, near_grads, expected_grads))
    assert_close_to_reference(all_grads.to(dtype), oracle, near.to(dtype), GRADIENT_FACTOR, "gradients")


# Every eighth head of a family, in a dtype in turn: what a dtype changes, it changes for all of them.
@left_to_full(lambda p: is_left_out(p, 8 * DTYPES.index(p["dtype"]), of=16))
@dtype_axis
@pytest.mark.parametrize(("model_type", "head"), MODELS, ids=[f"{m}-{h}" for m, h in MODELS])
def test_every_head(model_type, head, dtype, packed_layers, no_fallback):
    config = config_for(model_type, head, 0, num_labels=2)
    # The softmax of transformers' span head runs over padding, and RoFormer's choice reads the last column.
    reads_padding = head == "QuestionAnswering" or getattr(config.family.heads.get(head), "pooling", None) == "last"
    batch = make_batch(config, "none" if reads_padding else "right")
    check(config, head, batch, dtype)
    assert len(packed_layers) == config.num_hidden_layers


@of_every_kind()
@left_to_full(
    lambda p: (FAMILIES.index(p["model_type"]) + MASKS.index(p["pattern"])) % 12 != 6 * DTYPES.index(p["dtype"])
)
@dtype_axis
@pytest.mark.parametrize("pattern", MASKS)
@families_axis
def test_every_mask(model_type, pattern, dtype, packed_layers, no_fallback):
    head = head_of(model_type, other="Model")
    config = config_for(model_type, head, 1)
    check(config, head, make_batch(config, pattern), dtype, output_hidden_states=True)
    assert packed_layers


@of_few_kinds()
@families_axis
def test_attentions(model_type, packed_layers, no_fallback):
    head = head_of(model_type, other="Model")
    config = config_for(model_type, head, 3)
    batch = make_batch(config, "holes")
    baseline = make_hf(config, head).eval()
    accelerated = fastbert.accelerate(copy.deepcopy(baseline))
    theirs = make_oracle(baseline)(**batch.inputs, output_attentions=True)
    near, ours = (model(**batch.inputs, output_attentions=True) for model in (baseline, accelerated))
    assert list(ours) == list(theirs) and len(ours.attentions) == len(theirs.attentions) == len(packed_layers)
    for actual, oracle, other in zip(ours.attentions, theirs.attentions, near.attentions, strict=True):
        real = batch.real[:, None, :, None]
        assert_close_to_reference(actual, oracle * real, other * real, OUTPUT_FACTOR)


@halved
@pytest.mark.parametrize("options", ({}, {"output_hidden_states": True, "output_attentions": True}))
@of_few_kinds()
@families_axis
def test_tuples_and_config_defaults(model_type, options, no_fallback):
    config = config_for(model_type, "Model", 3)
    model = make_hf(config, "Model").eval()
    ids = make_batch(config, "none").inputs["input_ids"]
    if not options and hasattr(model, "pooler"):
        model.pooler = None  # of which the older kind of forward keeps the place in its tuple
    options = options | ({"token_type_ids": torch.ones_like(ids)} if model_type == "distilbert" else {})  # swallowed
    expected = model(ids, return_dict=False, **options)
    actual = fastbert.accelerate(model)(ids, return_dict=False, **options)
    assert [type(a) for a in actual] == [type(e) for e in expected]
    assert_as_transformers(model, input_ids=ids, **options)
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == len(fastbert.restore(model)(ids).hidden_states)


def test_inputs_embeds_positions_and_dropped_layers(packed_layers, no_fallback):
    """Layers cut off, and embeddings resized, after the call: what transformers would run is what runs."""
    for model_type in ("bert", "roberta"):
        config = config_for(model_type, "Model", 0)
        model = make_hf(config, "Model").eval()
        model.config.pad_token_id = 7  # the embeddings count positions from the one that they were built with
        fastbert.accelerate(model)
        model.resize_token_embeddings(config.vocab_size + 7)
        model.encoder.layer = model.encoder.layer[:2]
        ids = torch.randint(config.vocab_size, config.vocab_size + 7, (2, 5))
        positions = torch.arange(5, 10)[None]
        assert_as_transformers(model, input_ids=ids)
        assert_as_transformers(model, input_ids=ids, position_ids=positions)
        assert_as_transformers(model, inputs_embeds=model.get_input_embeddings()(ids))
        with pytest.raises(fastbert.InputError, match=f"valid values are 0 to {config.vocab_size + 6}"):
            model(ids + 7)
    assert len(packed_layers) == 2 * 3 * 2


def test_dropout_is_the_configs(no_fallback):
    model = make_hf(config_for("bert", "Model", 0, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5), "Model")
    model = fastbert.accelerate(model)
    ids = torch.ones(1, 8).long()
    embedded = model.train()(ids, output_hidden_states=True).hidden_states[0]
    assert 0.3 < (embedded == 0).float().mean() < 0.7
    assert not torch.equal(model(ids)[0], model(ids)[0]) and torch.equal(model.eval()(ids)[0], model(ids)[0])


@of_few_kinds()
@families_axis
def test_autocast(model_type, no_fallback):
    config = config_for(model_type, "SequenceClassification", 0)
    batch = make_batch(config, "right")
    baseline = make_hf(config, "SequenceClassification")
    oracle = make_oracle(baseline)(**batch.inputs).logits
    accelerated = fastbert.accelerate(copy.deepcopy(baseline))
    with torch.autocast("cpu", torch.bfloat16):
        actual = accelerated(**batch.inputs).logits
        if model_type != "deberta":
            near = baseline(**batch.inputs).logits
    if model_type == "deberta":  # whose mask of transformers has float32's least number, which bfloat16 has not
        near = baseline.bfloat16()(**batch.inputs).logits
    assert_close_to_reference(actual, oracle, near, GRADIENT_FACTOR)
    actual.sum().backward()


def small(head: str = "Model", model_type: str = "bert") -> nn.Module:
    return make_hf(config_for(model_type, head, 3), head).eval()


IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
MASK = (IDS != 0).long()


def record(module, *_):
    module.seen = True


def forward_on_the_instance(model):
    model.pooler.forward = lambda x: x[:, 0]


def another_activation(model):
    model.encoder.layer[0].intermediate.intermediate_act_fn = nn.GELU()


def dropout_in_eval(model):
    model.encoder.layer[0].output.dropout = nn.Dropout(0.2)


FALLBACKS = {
    "mask-4d": ({"attention_mask": torch.zeros(2, 1, 4, 4)}, None, "attention_mask is not of shape"),
    "argument": ({"encoder_hidden_states": torch.zeros(2, 3, 64)}, None, "the argument encoder_hidden_states"),
    "head_mask": ({"head_mask": torch.ones(3, 2)}, None, "the argument head_mask"),
    "selection": ({"output_hidden_states": [-1]}, None, "output_hidden_states selects"),
    "left": ({"attention_mask": MASK.flip(1)}, None, "padding on the left"),
    "layer-hook": ({}, lambda m: m.encoder.layer[1].register_forward_hook(record), "encoder.layer.1 has hooks"),
    "pre-hook": ({}, lambda m: m.encoder.register_forward_pre_hook(record), "encoder has hooks"),
    "causal": ({}, lambda m: setattr(m.config, "is_decoder", True), "its config asks for causal attention"),
    "forward": ({}, forward_on_the_instance, "pooler has a forward of its own"),
    "activation": ({}, another_activation, "encoder.layer.0.intermediate.intermediate_act_fn is a GELU"),
    "dropout": ({}, dropout_in_eval, "encoder.layer.0.output.dropout has p=0.2, training=True; what it is in"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback(name, packed_layers):
    arguments, change, reason = FALLBACKS[name]
    model = fastbert.accelerate(small())
    model(IDS)
    assert len(packed_layers) == 3
    if change is not None:
        change(model)
    plain = fastbert.restore(copy.deepcopy(model))
    manual_seed(1)
    expected = plain(IDS, **arguments)
    with pytest.warns(UserWarning, match=f"BertModel runs transformers' own forward: {reason}"):
        manual_seed(1)
        actual = model(IDS, **arguments)
    assert torch.equal(actual[0], expected[0]) and len(packed_layers) == 3
    assert "hook" not in name or any(hasattr(module, "seen") for module in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        model(IDS, **arguments)
