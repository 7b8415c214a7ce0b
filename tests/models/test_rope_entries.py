"""Every entry of config.json that rotary embedding may go by, at every place where it may stand: our own classes and
accelerated models compute what transformers makes of the same file, or one error names the entry.
"""

from __future__ import annotations

import copy

import pytest
import torch
from config_files import IDS, check, file_of, theirs_of
from family_configs import BY_LAYER_TYPE
from full import left_to_full, thinned
from hf import make_oracle
from test_family_configs import LLAMA3, ROPES, YARN

import fastbert
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA = {"rope_type": "llama3", **LLAMA3}
YARN = {"rope_type": "yarn", **YARN}
PROPORTIONAL = {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5}
TYPES = {"default": {"rope_type": "default"}, "linear": LINEAR, "llama3": LLAMA, "yarn": YARN}
TYPES["proportional"] = PROPORTIONAL
# What may stand in an object of rope parameters, of its own type or of another.
ENTRIES = {
    "nothing more": {},
    "theta": {"rope_theta": 77.0},
    "factor": {"factor": 1.5},
    "length": {"original_max_position_embeddings": 24},
    "fast": {"beta_fast": 4, "beta_slow": 2},
    "fast and slow exchanged": {"beta_fast": 1.5, "beta_slow": 20},
    "zeros": {"beta_fast": 0, "beta_slow": 0, "mscale": 0, "mscale_all_dim": 0.5},
    "one mscale": {"mscale": 0.5},
    "mscale": {"mscale": 0.8, "mscale_all_dim": 0.3},
    "attention_factor": {"attention_factor": 1.7, "mscale": 0.8, "mscale_all_dim": 0.3},
    "truncate": {"truncate": False},
    "no truncate": {"truncate": None},
    "high below low": {"low_freq_factor": 4.0, "high_freq_factor": 2.0},
    "high is low": {"low_freq_factor": 2.0, "high_freq_factor": 2.0},
    "whole heads": {"partial_rotary_factor": 1.0},
    "unknown": {"xyzzy": 5, "full_attention_factor": 7.0},
}


def in_layers(model_type: str, place: str, rope: dict) -> dict:
    """The entries of a config.json with `rope` at `place`: a type of layer, or "flat"."""
    if place == "flat":
        return {"rope_parameters": rope}
    window = {"local_attention": 12} if model_type == "modernbert" else {"sliding_window": 6}
    return {"rope_parameters": {"full_attention": {}, "sliding_attention": {}, place: rope}, **window}


PLACES = [(name, "flat") for name in ROPES if name not in BY_LAYER_TYPE]
PLACES += [(name, place) for name in BY_LAYER_TYPE for place in ("full_attention", "sliding_attention")]


# The places share the code that reads these: each has every twelfth, those that saw past faults among them.
@left_to_full(
    lambda p: (
        (PLACES.index((p["model_type"], p["place"])) + list(TYPES).index(p["kind"]) + list(ENTRIES).index(p["entry"]))
        % 12
        != 6
    )
)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("model_type", "place"), PLACES)
def test_entries(model_type, place, kind, entry):
    check(file_of(model_type, **in_layers(model_type, place, {**TYPES[kind], **ENTRIES[entry]})))


def without(rope: dict, *names: str, **others) -> dict:
    return {**{name: value for name, value in rope.items() if name not in names}, **others}


# What is left out, or stands elsewhere, or under another name.
ROPE_OF_ALL = (
    without(YARN, "original_max_position_embeddings"),
    without(LLAMA, "original_max_position_embeddings"),
    without(YARN, factor=None),
    {"type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0, "rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": None},
    without(PROPORTIONAL, "factor"),
    without(PROPORTIONAL, "partial_rotary_factor"),
    {},
)


@thinned(4)
@pytest.mark.parametrize("number", range(len(ROPE_OF_ALL)))
@pytest.mark.parametrize(("model_type", "place"), [each for each in PLACES if each[0] in ("eurobert", "modernbert")])
def test_entries_that_are_left_out(model_type, place, number):
    check(file_of(model_type, **in_layers(model_type, place, ROPE_OF_ALL[number])))


LENGTH = {"original_max_position_embeddings": 8}
BESIDE = (
    ("eurobert", {"rope_parameters": YARN, **LENGTH}),
    ("gte", {"rope_scaling": LLAMA, **LENGTH}),
    ("nomic_bert", {"rope_parameters": LINEAR, **LENGTH}),
    ("jina_embeddings_v3", {"rope_scaling": LINEAR, "rope_theta": 77.0, "rope_parameters": YARN}),
    ("gte", {"partial_rotary_factor": 0.5}),
    ("eurobert", {"rope_parameters": {"full_attention": LINEAR}}),
    ("eurobert", {"rope_parameters": YARN, "truncate": False, "global_rope_theta": 5.0}),
    ("modernbert", {"rope_scaling": without(YARN, truncate=False)}),
    ("modernbert", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    ("modernbert", {"rope_scaling": {"type": "linear", "factor": 3.0},
                    "rope_parameters": {"full_attention": {}, "sliding_attention": {}}}),
    ("modernbert", {"rope_parameters": {"full_attention": YARN, "sliding_attention": LLAMA}, **LENGTH}),
    ("modernbert", {"rope_theta": 33.0, "global_rope_theta": 50.0, "partial_rotary_factor": 0.5}),
    ("modernbert", {"sliding_window": 5}),
    ("modernbert", {"sliding_window": 3, "local_attention": 20}),
    ("modernbert", {"sliding_window": True}),
    ("modernbert", {"layer_norm_eps": 0.1, "hidden_act": "relu"}),
    ("modernbert", {"layer_norm_eps": 0.1, "norm_eps": 1e-3, "hidden_activation": "silu", "hidden_act": "relu"}),
    ("eurobert", {"layer_norm_eps": 0.1}),
    ("distilbert", {"hidden_size": 32, "num_hidden_layers": 1, "hidden_act": "relu", "intermediate_size": 48}),
    ("distilbert", {"dim": 64, "hidden_size": 32, "n_heads": 4, "num_attention_heads": 2}),
    ("esm", {"position_embedding_type": "rotary", "rope_theta": 50.0, "rope_scaling": LINEAR, "mask_token_id": 4}),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(BESIDE)))
def test_entries_beside_rope_parameters(number):
    model_type, entries = BESIDE[number]
    check(file_of(model_type, **entries))


@pytest.mark.parametrize("model_type", ROPES)
def test_an_accelerated_model_turns_by_what_it_was_built_with(model_type):
    """The frequencies and the factor of its tree, whatever its config says by now, or somebody has set there."""
    place = "full_attention" if model_type in BY_LAYER_TYPE else "flat"
    theirs = theirs_of(file_of(model_type, **in_layers(model_type, place, YARN)))
    rope = theirs.config.rope_parameters
    (rope if place == "flat" else rope[place])["attention_factor"] = 2.5
    setattr(theirs.rotary_emb, "attention_scaling" if place == "flat" else f"{place}_attention_scaling", 1.25)
    accelerated = fastbert.accelerate(copy.deepcopy(theirs))
    with torch.no_grad():
        live, baseline, oracle = (m(IDS)[0] for m in (accelerated, theirs, make_oracle(theirs)))
    assert_close_to_reference(live, oracle, baseline, GRADIENT_FACTOR)


REFUSED = (
    ("modernbert", {"rope_parameters": LINEAR}, r"rope_parameters.rope_type is 'linear'; it must be in the object of"),
    ("modernbert", {"rope_parameters": {"chunked_attention": LINEAR}}, r"rope_parameters.chunked_attention is .*in"),
    (
        "modernbert",
        {"rope_parameters": {"full_attention": LINEAR}, "partial_rotary_factor": 0.5},
        r"rope_parameters.full_attention.partial_rotary_factor is 0.5; it must be 1.0 with rope_type 'linear'",
    ),
    ("modernbert", {"rope_parameters": {"full_attention": YARN, "truncate": False}}, r"rope_parameters.truncate is"),
    ("modernbert", {"head_dim": 32}, r"head_dim is 32; it must be 16, hidden_size / num_attention_heads"),
    ("modernbert", {"sliding_window": "all"}, r"local_attention is 'all'"),
    ("gte", {"head_dim": 32}, r"head_dim is 32; it must be 16"),
    ("gte", {"rope_parameters": without(YARN, partial_rotary_factor=0.5)}, r"must be 1.0 with rope_type 'yarn'"),
    ("gte", {"rope_parameters": without(PROPORTIONAL, partial_rotary_factor=1.5)}, r"it must be a number from 0 to 1"),
    ("eurobert", {"rope_parameters": YARN, "original_max_position_embeddings": None}, r"position_embeddings is None"),
)


@pytest.mark.parametrize(("model_type", "entries", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_refused(model_type, entries, message):
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(file_of(model_type, **entries))
