"""What a family's data do not allow is one error before anything is launched; rope types against transformers'."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch
from family_configs import BY_LAYER_TYPE, make_config
from full import halved, thinned
from hf import FAMILIES, cast, hf_class, hf_config, make_oracle, make_ours, randomise
from kinds import of_every_kind
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fastbert import families
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError, InputError
from fastbert.layers.rotary import inverse_frequencies
from fastbert.models.classes import CLASSES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

ROPES = tuple(name for name in FAMILIES if "rope_parameters" in families.FAMILIES[name].fields)
ropes_axis = pytest.mark.parametrize("model_type", ROPES)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


def in_rope(model_type: str, parameters) -> dict:
    """`parameters` as the family's config.json has them: some have a set for each type of layer."""
    others = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    return {"full_attention": parameters, **others} if model_type in BY_LAYER_TYPE else parameters


def short_of(model_type: str, parameters):
    """Of two layers, with these rope_parameters."""
    places = {"rope_parameters": parameters, "max_position_embeddings": 128}
    if model_type in BY_LAYER_TYPE:
        places["layer_types"] = ["sliding_attention", "full_attention"]
    return make_config(model_type, 0, num_hidden_layers=2, **places)


def entries(model_type: str, **changes) -> dict:
    return {**make_config(model_type).to_dict(), **changes}


LINEAR = {"rope_type": "linear", "factor": 3.0}
BAD_ROPES = (
    ({"rope_type": "dynamic", "factor": 2.0}, r"rope_type is 'dynamic'; .*longest sequence of a batch"),
    ({"rope_type": "longrope"}, r"rope_type is 'longrope'; .*longest sequence of a batch"),
    ({"rope_type": "su"}, r"rope_type is 'su'; it must be one of default, linear, llama3, yarn"),
    ({"rope_type": ["linear"]}, r"rope_type is \['linear'\]; it must be one of"),
    ({"rope_type": None}, r"rope_type is None; it must be one of"),
    ({"type": "dynamic"}, r"rope_type is 'dynamic'"),
    ({**LINEAR, "partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5; it must be 1.0"),
    ({"rope_theta": 0}, r"rope_theta is 0; it must be a number above 1"),
    ({"rope_theta": "many"}, r"rope_theta is 'many'"),
    ({"rope_theta": float("nan")}, r"rope_theta is nan"),
    ({"rope_type": "linear"}, r"factor is None; it must be a number above 0"),
    ({"rope_type": "linear", "factor": -1.0}, r"factor is -1.0"),
    ({"rope_type": "llama3", "factor": 2.0}, r"low_freq_factor is None"),
    ({"rope_type": "yarn", **YARN, "beta_fast": "x"}, r"beta_fast is 'x'"),
)


@halved
@pytest.mark.parametrize(("parameters", "message"), BAD_ROPES, ids=[message[:24] for _, message in BAD_ROPES])
@ropes_axis
def test_bad_rope_parameters(model_type, parameters, message):
    with pytest.raises(ConfigError, match=rf"rope_parameters.*{message}"):
        EncoderConfig.from_dict(entries(model_type, rope_parameters=in_rope(model_type, parameters)))


@pytest.mark.parametrize("value", [5, "default", [1], True])
@ropes_axis
def test_rope_parameters_that_are_no_object(model_type, value):
    with pytest.raises(ConfigError, match=r"rope_parameters is .*; it must be an object"):
        EncoderConfig.from_dict(entries(model_type, rope_parameters=value))


BAD = (
    ("modernbert", {"rope_scaling": 5}, r"rope_parameters is 5; it must be an object"),
    ("modernbert", {"rope_parameters": {"full_attention": 5}}, r"rope_parameters.full_attention is 5; it must be"),
    ("gte", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, r"rope_type is 'ntk'; it must be one of default"),
    ("gte", {"rope_parameters": {"rope_type": "yarn", **YARN, "truncate": [1]}}, r"rope_parameters.truncate is \[1\]"),
    ("modernbert", {"layer_types": ["full_attention"] * 3}, r"layer_types is .* it must be a list of 4 or more"),
    ("modernbert", {"layer_types": ["chunked_attention"] * 4}, r"layer_types is .*full_attention, sliding_attention"),
    ("modernbert", {"layer_types": [["full_attention"]] * 4}, r"layer_types is"),
    ("modernbert", {"layer_types": 5}, r"layer_types is 5"),
    ("modernbert", {"local_attention": -1}, r"local_attention is -1; it must be an integer from 0"),
    ("modernbert", {"global_attn_every_n_layers": 0}, r"global_attn_every_n_layers is 0; it must be an integer from 1"),
    ("modernbert", {"classifier_pooling": "max"}, r"classifier_pooling is 'max'; it must be one of: cls, mean"),
    ("modernbert", {"mlp_dropout": 1.0}, r"mlp_dropout is 1.0; it must be at least 0 and below 1"),
    ("modernbert", {"hidden_size": 66, "num_attention_heads": 22}, r"head_dim is 3; it must be .*even"),
    ("nomic_bert", {"head_dim": 3}, r"head_dim is 3; it must be .*even"),
    ("nomic_bert", {"hidden_size": 62, "num_attention_heads": 4}, r"hidden_size 62 is not a multiple of"),
    ("eurobert", {"num_key_value_heads": 3}, r"num_key_value_heads is 3; it must be a divisor of num_attention_heads"),
    ("eurobert", {"num_key_value_heads": 4}, r"num_key_value_heads is 4; it must be a divisor"),
    ("eurobert", {"classifier_pooling": "cls"}, r"classifier_pooling is 'cls'; it must be one of: late, bos, mean"),
    ("eurobert", {"head_dim": 0}, r"head_dim is 0; it must be an integer from 1"),
    ("rembert", {"output_embedding_size": 0}, r"output_embedding_size is 0; it must be an integer from 1"),
    ("gte", {"is_decoder": True}, r"is_decoder=True is not supported"),
)


@pytest.mark.parametrize(("model_type", "changes", "message"), BAD, ids=[f"{m}-{next(iter(c))}" for m, c, _ in BAD])
def test_bad_values(model_type, changes, message):
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(entries(model_type, **changes))


@of_every_kind()
@pytest.mark.parametrize("model_type", FAMILIES)
def test_texts_beyond_max_position_embeddings(model_type):
    """Where there is a table of positions, an error that names both; where positions are rotary, as transformers."""
    config = make_config(model_type, 0, max_position_embeddings=16, num_hidden_layers=2)
    theirs = cast(randomise(hf_class(model_type, "Model")(hf_config(config))), torch.float32).eval()
    ours = make_ours(config, "Model", theirs).eval()
    batch = make_batch(config, "none", 2, 40)
    saved = [spec.attention.rotary and spec.attention.rotary.table for spec in config.layer_specs]
    if config.embeddings.position is not None or any(saved):
        with pytest.raises(InputError, match=r"a sequence of 40 tokens is longer than the position table"):
            ours(**batch.inputs)
        return
    with torch.no_grad():
        found, baseline, oracle = (m(**batch.inputs)[0] for m in (ours, theirs, make_oracle(theirs)))
    assert_close_to_reference(found, oracle, baseline, GRADIENT_FACTOR)


@pytest.mark.parametrize("model_type", [f for f in FAMILIES if make_config(f).embeddings.token_type is None])
def test_token_types_where_there_are_none(model_type):
    config = make_config(model_type)
    ids = torch.ones(1, 3, dtype=torch.long)
    if config.family.ignores_types:  # as in transformers: its tokenizer makes them
        model = CLASSES[model_type, "Model"](config).eval()
        assert torch.equal(model(ids)[0], model(ids, token_type_ids=ids)[0])
        return
    with pytest.raises(InputError, match=rf"token_type_ids were given, but {model_type} has no token types"):
        CLASSES[model_type, "Model"](config)(ids, token_type_ids=ids)


SCALINGS = {
    "linear": ({"factor": 3.0},),
    "llama3": (LLAMA3, {**LLAMA3, "factor": 2.0, "high_freq_factor": 16.0}),
    "yarn": (
        YARN,
        {**YARN, "truncate": False},
        {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        {**YARN, "factor": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "number"), [(kind, i) for kind, given in SCALINGS.items() for i in range(len(given))])
def test_inverse_frequencies(kind, number):
    """The same float32 numbers as transformers', but for the order of operations."""
    rope = {"rope_type": kind, "rope_theta": 1000.0, **SCALINGS[kind][number]}
    config = make_config("eurobert", 0, rope_parameters=rope)
    (rotary,) = config.distances.rotaries
    found, factor = inverse_frequencies(rotary)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[kind](hf_config(config), "cpu")
    assert found.dtype == torch.float32 and found.shape == (config.head_dim // 2,)
    eps = torch.finfo(torch.float32).eps
    assert ((found - theirs).abs() <= 4 * eps * theirs.abs()).all()
    assert factor == pytest.approx(their_factor, rel=4 * torch.finfo(torch.float64).eps)


@thinned(4)
@pytest.mark.parametrize("kind", SCALINGS)
@ropes_axis
def test_whole_models_with_scaled_positions(model_type, kind):
    rope = {"rope_type": kind, "rope_theta": 1000.0, **SCALINGS[kind][0]}
    config = short_of(model_type, in_rope(model_type, rope))
    theirs = cast(randomise(hf_class(model_type, "Model")(hf_config(config))), torch.float32).eval()
    ours = make_ours(config, "Model", theirs).eval()
    batch = make_batch(config, "right", 2, 100)
    with torch.no_grad():
        found, baseline, oracle = (m(**batch.inputs)[0][batch.real] for m in (ours, theirs, make_oracle(theirs)))
    assert_close_to_reference(found, oracle, baseline, GRADIENT_FACTOR)
    plain = short_of(model_type, None)
    with torch.no_grad():
        other = make_ours(plain, "Model", theirs).eval()(**batch.inputs)[0][batch.real]
    assert (other - found).abs().max() > (found - oracle).abs().max() * 100  # the scaling is seen
