"""DeBERTa and MPNet beside transformers: each switch of their attention, and what their heads do otherwise."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from batches import make_batch, make_labels
from family_configs import config_for, make_config
from full import halved, left_to_full
from hf import make_hf, make_oracle, make_ours, make_trio, random_like
from parity import check

import fastbert
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.layer_spec import Disentangled, RelativeBias
from fastbert.layers import relative
from fastbert.layers.relative import bias_rows, disentangled_rows
from fastbert.testing.cases import DTYPES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

TERMS = (("c2p",), ("p2c",), ("c2p", "p2c"), ())
SWITCHES = [*itertools.product(TERMS, (0, 6), (False, True), (0, 3), ("none", "layer_norm"))]
PATTERNS = ("none", "right", "left", "holes", "heavy")
BOTH = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}


def number_of(p: dict) -> int:
    return SWITCHES.index((p["terms"], p["buckets"], p["shared"], p["conv"], p["norm"]))


# Each switch has both of its values in every eighth of the grid, and both dtypes.
@left_to_full(lambda p: (number_of(p) // 2 + number_of(p) // 8 + 2 * (p["dtype"] is DTYPES[0])) % 4 != 0)
@left_to_full(lambda p: (number_of(p) + number_of(p) // 4 + number_of(p) // 16 + number_of(p) // 32) % 2 != 0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("terms", "buckets", "shared", "conv", "norm"), SWITCHES)
def test_switches(terms, buckets, shared, conv, norm, dtype):
    """Outputs and gradients of deberta-v2, with masks of every pattern, within the span and beyond it."""
    number = SWITCHES.index((terms, buckets, shared, conv, norm))
    config = config_for(
        "deberta-v2",
        "Model",
        number % 4,
        relative_attention=True,
        pos_att_type=list(terms),
        position_buckets=buckets,
        max_relative_positions=9,
        share_att_key=shared,
        conv_kernel_size=conv,
        norm_rel_ebd=norm,
        num_hidden_layers=2,
    )
    check(config, "Model", make_batch(config, PATTERNS[number % len(PATTERNS)]), {}, dtype)


@halved
@pytest.mark.parametrize("model_type", ("deberta", "deberta-v2"))
@pytest.mark.parametrize(
    "changes",
    (
        {"relative_attention": False, "norm_rel_ebd": "none"},
        {"position_biased_input": True, "type_vocab_size": 2},
        {"position_biased_input": False, "embedding_size": 24},
        {"pos_att_type": "c2p|p2c", "max_relative_positions": -1},
    ),
    ids=str,
)
def test_other_switches(model_type, changes):
    if model_type == "deberta":
        changes = {name: value for name, value in changes.items() if name != "norm_rel_ebd"}
    config = config_for(model_type, "Model", 0, **{**BOTH, **changes})
    check(config, "Model", make_batch(config, "holes"), {}, torch.float32)


@left_to_full(lambda p: p["length"] > 600 or (p["length"] == 600 and p["model_type"] == "deberta"))
@halved
@pytest.mark.parametrize("length", (1, 2, 15, 64, 65, 130, 600, 2048))
@pytest.mark.parametrize("model_type", ("deberta", "deberta-v2", "mpnet"))
def test_lengths(model_type, length):
    """The last bucket of v2 and MPNet begins within the longer ones, and so does v1's span."""
    changes = {"max_position_embeddings": 2060} if model_type == "mpnet" else {**BOTH, "position_biased_input": False}
    if model_type != "mpnet":
        changes |= {"max_relative_positions": 90, **({"position_buckets": 16} if model_type == "deberta-v2" else {})}
    config = config_for(model_type, "Model", 0, num_hidden_layers=1, **changes)
    trio, batch = make_trio(config, "Model", torch.float32), make_batch(config, "right", 2, length)
    with torch.no_grad():
        ours, baseline, oracle = (
            m.eval()(**batch.inputs).last_hidden_state[batch.real] for m in (trio.ours, trio.baseline, trio.oracle)
        )
    assert_close_to_reference(ours, oracle, baseline, GRADIENT_FACTOR)


@pytest.mark.parametrize("longest", (1, 5, 130, 2050))
def test_rows_are_those_of_transformers(longest):
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    x = torch.empty(1, longest, 1)
    ends = ((x[:, :1], x), (x, x[:, :1]))  # a query and all keys, and all queries and a key
    for buckets, most in ((256, 512), (4, 12), (32, 2048), (0, 300)):
        span = buckets or most
        theirs = (build_relative_position(*end, buckets, most).flatten() for end in ends)
        rows = [(places + span).clamp(0, 2 * span - 1).tolist() for places in theirs]
        ours = disentangled_rows(Disentangled("table", span, buckets=buckets, max_distance=most), longest)
        assert ours.tolist() == [*rows[0][::-1], *rows[1][1:]]
    distances = torch.arange(1 - longest, longest).flip(0)  # of a key from a query
    theirs = MPNetEncoder.relative_position_bucket(distances)
    ours = bias_rows(RelativeBias("table", 32), longest)
    assert ours.tolist() == theirs.tolist()


@halved
@pytest.mark.parametrize("model_type", ("deberta", "deberta-v2"))
@pytest.mark.parametrize("labels", ("shares", "some are negative", "all are negative", "a column"))
def test_losses_without_a_problem_type(model_type, labels):
    """DeBERTa's own: labels of several columns are shares of classes, and classes below 0 do not count."""
    config = config_for(model_type, "SequenceClassification", 0, num_hidden_layers=2)
    batch = make_batch(config, "right")
    given = make_labels(config, "SequenceClassification", batch, 0)["labels"]
    if labels == "shares":
        given = random_like((len(given), 3), 5).softmax(-1)
    elif labels == "some are negative":
        given[::2] = -1
    elif labels == "all are negative":
        given[:] = -100
    if labels == "a column":  # which transformers cannot index by
        model = fastbert.AutoModelForSequenceClassification.from_config(config)
        losses = [model(**batch.inputs, labels=each).loss for each in (given, given[:, None])]
        assert torch.equal(*losses)
        return
    check(config, "SequenceClassification", batch, {"labels": given}, torch.float32)


def test_the_word_table_scores_words():
    """Without `legacy` there is no decoder: nothing to resize by itself, nothing to put in its place."""
    config = make_config("deberta-v2", 3)
    model = fastbert.DebertaV2ForMaskedLM(config)
    assert model.get_output_embeddings() is model.get_input_embeddings()
    with pytest.raises(TypeError, match="no decoder to resize: the word table scores the words"):
        model.resize_token_embeddings(50)
    with pytest.raises(TypeError, match="has no decoder"):
        model.set_output_embeddings(torch.nn.Linear(64, 43))


BAD = (
    ("deberta-v2", {"pos_att_type": ["p2p"], "relative_attention": True}, "pos_att_type is"),
    ("deberta", {"pos_att_type": 3}, "pos_att_type is 3"),
    ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size is 4; it must be odd"),
    ("deberta-v2", {"conv_kernel_size": 3, "conv_groups": 3}, "conv_groups is 3; it must be a divisor of hidden_size"),
    ("deberta-v2", {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd is 'batch_norm'"),
    ("deberta-v2", {"relative_attention": False}, "norm_rel_ebd is 'layer_norm'; it must be none where"),
    ("deberta-v2", {"legacy": False, "embedding_size": 32}, "embedding_size is 32; it must be hidden_size, 64"),
    ("deberta-v2", {"attention_head_size": 16}, "attention_head_size is 16; it must be 32"),
    ("deberta", {"pooler_hidden_size": 65}, "pooler_hidden_size is 65; it must be 64"),
    ("deberta", {"talking_head": True}, "talking_head=True is not supported"),
    ("mpnet", {"relative_attention_num_buckets": 31}, "relative_attention_num_buckets is 31"),
)


@pytest.mark.parametrize(("model_type", "changes", "said"), BAD)
def test_what_no_code_here_knows_is_refused(model_type, changes, said):
    entries = {**make_config(model_type, 0).to_dict(), **changes}
    with pytest.raises(ConfigError, match=said):
        EncoderConfig.from_dict(entries)


def test_a_table_of_another_span_is_refused(tmp_path):
    """By its name, and before anything is made of it."""
    fastbert.DebertaV2Model(make_config("deberta-v2", 0)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"encoder\.rel_embeddings\.weight"):
        fastbert.AutoModel.from_pretrained(tmp_path, position_buckets=6)


def test_lora_on_projections_that_words_and_distances_share():
    """Its gradients are the sum of both uses."""
    peft = pytest.importorskip("peft")
    config = config_for("deberta-v2", "TokenClassification", 0, **BOTH, share_att_key=True)
    options = {"target_modules": ["query_proj", "key_proj"], "r": 2, "lora_dropout": 0.0}
    theirs = peft.get_peft_model(make_hf(config, "TokenClassification"), peft.LoraConfig(**options))
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    fast, oracle = fastbert.accelerate(copy.deepcopy(theirs)), make_oracle(theirs)
    batch = make_batch(config, "right")
    found = []
    for model in (fast, oracle, theirs):
        out = model(**batch.inputs).logits[batch.real]
        out.square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if "lora_" in name})
    assert len(found[0]) == 4 * config.num_hidden_layers
    assert "1 of 1 calls ran packed" in str(fastbert.status(fast))
    for name, gradient in found[0].items():
        assert_close_to_reference(gradient, found[1][name], found[2][name], GRADIENT_FACTOR, name)


def test_int8_projects_the_table_in_floating_point():
    """A projection that tokens and distances share has int8 weights; the table is not rounded."""
    config = config_for("deberta-v2", "Model", 0, **BOTH, share_att_key=True, norm_rel_ebd="none")
    theirs = make_hf(config, "Model").eval()
    ours = make_ours(config, "Model", theirs).eval()
    layer = fastbert.quantize(ours).encoder.layer[0].attention.self
    table = ours.encoder.rel_embeddings.weight
    exact = theirs.encoder.layer[0].attention.self.key_proj.double()(table.double())
    near = (layer.key_proj.in_floating_point(table) - exact).abs().mean()
    assert 0 < near < (layer.key_proj(table) - exact).abs().mean()


def test_projections_are_kept_in_inference_mode(monkeypatch):
    """For texts of any length, until a weight that they are made of changes, and not by a copy of the model."""
    calls = []
    projected = relative._projected
    monkeypatch.setattr(relative, "_projected", lambda *given: calls.append(0) or projected(*given))
    model = fastbert.DebertaV2Model(make_config("deberta-v2", 0)).eval()
    oracle = copy.deepcopy(model).double()
    texts = [make_batch(model.config, "right", 3, length) for length in (5, 17, 9)]
    layer = model.encoder.layer[1].attention.self

    def run(how_many: int) -> None:
        before = len(calls)
        for text in texts:
            with torch.inference_mode():
                out = model(**text.inputs).last_hidden_state
            assert len(calls) == before + how_many
            with torch.no_grad():
                expected = [m(**text.inputs).last_hidden_state for m in (oracle, model)]
            assert_close_to_reference(out, *expected, GRADIENT_FACTOR)
            before, how_many = len(calls), 0  # no_grad makes them anew

    layers = model.config.num_hidden_layers
    run(2 * layers)
    run(0)
    with torch.no_grad():
        for each in (layer, oracle.encoder.layer[1].attention.self):
            each.key_proj.weight.mul_(1.5)
    run(2)
    for each in (model, oracle):
        each.encoder.rel_embeddings.weight.data[3:] *= -1
    fastbert.repack(model)
    run(2 * layers)
    model = copy.deepcopy(model)
    run(2 * layers)
    model.encoder.layer[0].attention.self.key_proj.register_forward_hook(lambda *_: None)  # which waits for each call
    before = len(calls)
    with torch.inference_mode():
        model(**texts[0].inputs), model(**texts[1].inputs)
    assert len(calls) == before + 4


@pytest.mark.parametrize("model_type", ["deberta", "deberta-v2"])
@pytest.mark.parametrize("named", ["None", "c2p|none"])
def test_names_of_terms_without_relative_attention(model_type, named):
    """Nothing reads them but DeBERTa's first version, whose scores are scaled by how many there are."""
    others = {} if model_type == "deberta" else {"norm_rel_ebd": "none"}
    config = config_for(model_type, "Model", relative_attention=False, pos_att_type=named, **others)
    check(config, "Model", make_batch(config, "right"), {}, torch.float32)
