"""What only some families have, against transformers' eager model in float64: distances and layers of other forms.

`test_parity.py` has every head, mask and dtype on short sequences. Here are lengths up to 8192, the fast path of
inference, packed input, positions of the caller's, hidden states and attention probabilities, for whatever families
there are.
"""

from __future__ import annotations

import pytest
import torch
from batches import Batch, make_batch
from family_configs import NUM_CONFIGS, has_rotary, make_config, measures_by_columns
from full import halved, left_to_full, thinned
from hf import FAMILIES, families_axis, make_trio
from kinds import of_every_kind
from parity import check

from fastbert.testing.cases import DTYPES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

dtype_axis = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
PATTERNS = ("none", "right", "left", "holes", "heavy")
LENGTHS = (1, 2, 31, 33, 64, 129, 200, 511)
TURNING = tuple(f for f in FAMILIES if has_rotary(make_config(f)))
turning_axis = pytest.mark.parametrize("model_type", TURNING)


def longer(model_type: str, index: int, seqlen: int, **changes):
    return make_config(model_type, index, max_position_embeddings=seqlen + 5, **changes)


def assert_same_tokens(ours, baseline, oracle, batch: Batch, name: str) -> None:
    real = batch.real
    assert_close_to_reference(ours[real], oracle[real], baseline[real], GRADIENT_FACTOR, name)


def is_left_to_full(p) -> bool:
    """A length a family, in one of the dtypes; every length is met by some families."""
    number, length = FAMILIES.index(p["model_type"]), LENGTHS.index(p["seqlen"])
    return p["seqlen"] > 200 or (number + length + 7 * DTYPES.index(p["dtype"])) % 14 != 0


@of_every_kind()
@left_to_full(is_left_to_full)
@dtype_axis
@pytest.mark.parametrize("seqlen", LENGTHS)
@families_axis
def test_lengths(model_type, seqlen, dtype):
    check_length(model_type, FAMILIES.index(model_type) + LENGTHS.index(seqlen), seqlen, dtype, batch_size=3)


@pytest.mark.full
@pytest.mark.parametrize(("seqlen", "dtype"), [(2048, torch.float32), (1024, torch.bfloat16)], ids=str)
@families_axis
def test_long_lengths(model_type, seqlen, dtype):
    """transformers takes minutes for 2048 tokens in bfloat16 where a CPU has no instructions for it."""
    check_length(model_type, FAMILIES.index(model_type), seqlen, dtype, batch_size=2)


def check_length(model_type: str, number: int, seqlen: int, dtype: torch.dtype, batch_size: int) -> None:
    """The last hidden state and every gradient in training, and the last hidden state of the fast path."""
    config = longer(model_type, number % NUM_CONFIGS, seqlen)
    batch = make_batch(config, PATTERNS[number % len(PATTERNS)] if seqlen > 1 else "none", batch_size, seqlen)
    trio = check(config, "Model", batch, {}, dtype)
    with torch.no_grad():
        ours, baseline, oracle = (m.eval()(**batch.inputs)[0] for m in (trio.ours, trio.baseline, trio.oracle))
    assert_same_tokens(ours, baseline, oracle, batch, "inference")


@pytest.mark.full
@dtype_axis
def test_modernbert_at_8192(dtype):
    """The length that it was made for: a global layer and a local one."""
    config = longer("modernbert", 1, 8192, local_attention=128)
    trio, batch = make_trio(config, "Model", dtype), make_batch(config, "none", 1, 8192)
    for theirs in (trio.baseline, trio.oracle):
        theirs.config._attn_implementation = "sdpa"
    with torch.no_grad():
        ours, baseline, oracle = (m.eval()(**batch.inputs)[0] for m in (trio.ours, trio.baseline, trio.oracle))
    assert_same_tokens(ours, baseline, oracle, batch, "inference")


def has_places(config) -> bool:
    """Whether more than the distance of two tokens matters: where each of them is."""
    return config.embeddings.position is not None or (config.distances is not None and config.distances.are_absolute)


def packed_cases() -> list[tuple[str, str]]:
    """Distances go by columns: holes are wider in a padded batch than in a packed one, which does not have them."""
    local = {f for f in FAMILIES if any(measures_by_columns(make_config(f, i)) for i in range(NUM_CONFIGS))}
    return [(f, p) for f in FAMILIES for p in PATTERNS if f not in local or p in ("none", "right", "left")]


@of_every_kind()
@left_to_full(lambda p: (FAMILIES.index(p["model_type"]) + PATTERNS.index(p["pattern"])) % 4 != 0)
@pytest.mark.parametrize(("model_type", "pattern"), packed_cases())
def test_packed_is_padded(model_type, pattern):
    """Bit for bit, in inference and in training."""
    number = FAMILIES.index(model_type) + PATTERNS.index(pattern)
    config, dtype = longer(model_type, number % NUM_CONFIGS, 40), DTYPES[number % 2]
    model, batch = make_trio(config, "Model", dtype).ours, make_batch(config, pattern, 4, 40)
    packed = batch.packed()
    counted = {name: t for name, t in packed.items() if name != "position_ids"}
    same = [packed, counted]
    if pattern in ("holes", "heavy") or (has_places(config) and config.family.positions_from_ids):
        same = [packed]
    elif pattern == "left":  # where only distances matter, these are counted from each sequence's first token
        same = [packed if has_places(config) else counted]
    for training in (False, True):
        model.train(training)
        padded = model(**batch.inputs)
        for inputs in same:
            out = model(**inputs)
            assert torch.equal(padded.last_hidden_state[batch.real], out.last_hidden_state)
            assert padded.pooler_output is None or torch.equal(padded.pooler_output, out.pooler_output)


@of_every_kind()
@halved
@pytest.mark.parametrize("pattern", ["none", "right", "holes"])
@turning_axis
def test_positions_that_start_again(model_type, pattern):
    """Rotary embedding goes by the caller's position_ids, windows by columns, as transformers has it."""
    number = TURNING.index(model_type)
    config, dtype = longer(model_type, number % NUM_CONFIGS, 30), DTYPES[number % 2]
    batch = make_batch(config, pattern, 3, 30)
    batch.inputs["position_ids"] = torch.arange(30).remainder(13).expand(3, -1)
    batch.inputs.setdefault("attention_mask", batch.real.long())  # without one, transformers takes them for documents
    trio = check(config, "Model", batch, {}, dtype)
    with torch.no_grad():
        ours, baseline, oracle = (m.eval()(**batch.inputs)[0] for m in (trio.ours, trio.baseline, trio.oracle))
    assert_same_tokens(ours, baseline, oracle, batch, "inference")


@of_every_kind()
@thinned(12)  # test_packed.py has them in other masks
@dtype_axis
@pytest.mark.parametrize("pattern", ["none", "right", "holes"])
@families_axis
def test_hidden_states_and_attentions(model_type, pattern, dtype):
    number = FAMILIES.index(model_type) + DTYPES.index(dtype)
    config = longer(model_type, number % NUM_CONFIGS, 20)
    trio, batch = make_trio(config, "Model", dtype), make_batch(config, pattern, 3, 20)
    options = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        outs = [m.eval()(**batch.inputs, **options) for m in (trio.ours, trio.baseline, trio.oracle)]
    for name, shown in (
        ("hidden_states", lambda t: t[batch.real]),
        ("attentions", lambda t: t.transpose(1, 2)[batch.real]),
    ):
        ours, baseline, oracle = (out[name] for out in outs)
        assert len(ours) == len(oracle) == len(baseline) and len(ours)
        for i, (a, b, c) in enumerate(zip(ours, baseline, oracle, strict=True)):
            assert_close_to_reference(shown(a), shown(c).double(), shown(b), GRADIENT_FACTOR, f"{name} {i}")
