"""Operations of a forward pass, beside what is counted by hand."""

from __future__ import annotations

import fastbert
from fastbert.config.operations import operations, seen_keys

SHAPE = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 5}
WEIGHTS = 4 * 8 * 8 + 2 * 8 * 16  # of a layer of this shape


def of(model_type: str, lengths: tuple[int, ...], **fields):
    return operations(fastbert.EncoderConfig.of_family(model_type, vocab_size=20, **{**SHAPE, **fields}), lengths)


def test_padding_and_shared_layers():
    """ALBERT's weights count each time that they run."""
    for model_type in ("bert", "albert"):
        found = of(model_type, (3, 7))
        assert found.products == 5 * 2 * WEIGHTS * 10 and found.attention == 5 * 4 * 8 * (9 + 49)
        assert found.transformers == 5 * (2 * WEIGHTS * 14 + 4 * 8 * 2 * 49) and found.tables == 0
        assert found.executed == found.products + found.attention
    assert of("bert", ()) == (0, 0, 0, 0)


def test_windows_grouped_keys_and_gates():
    assert seen_keys(5, (-1, -1)) == 25 and seen_keys(5, (1, 1)) == 13 and seen_keys(5, (0, 2)) == 12
    types = ["sliding_attention", "full_attention"]
    found = of("modernbert", (5,), num_hidden_layers=2, layer_types=types, local_attention=2, pad_token_id=0)
    assert found.attention == 4 * 8 * (13 + 25) and found.products == 2 * 2 * 5 * (4 * 8 * 8 + 3 * 8 * 16)
    assert found.transformers == found.products + 2 * 4 * 8 * 25
    grouped = of("eurobert", (5,), num_key_value_heads=1, pad_token_id=0)
    assert grouped.products == 5 * 2 * 5 * (3 * 8 * 8 + 3 * 8 * 16) and grouped.attention == 5 * 4 * 8 * 25


def test_relative_terms():
    """A product more for each term; transformers has one with each row of the table, for each token."""
    both = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 50}
    found = of("deberta-v2", (3, 7), **both, position_buckets=6)
    tables = 5 * 2 * 12 * 2 * 8 * 8
    assert found.attention == 5 * 8 * 8 * (9 + 49) and found.tables == tables
    assert found.transformers == 5 * (2 * WEIGHTS * 14 + 4 * 8 * 2 * 49 + 2 * 2 * 8 * 14 * 12) + tables
    one = of("deberta", (3, 7), **{**both, "pos_att_type": ["p2c"]})
    assert one.attention == 5 * 6 * 8 * (9 + 49) and one.tables == 5 * 100 * 2 * 8 * 8
    convolved = of("deberta-v2", (3, 7), **both, conv_kernel_size=3, conv_groups=2)
    assert convolved.products == found.products + 2 * 10 * 3 * 8 * 8 // 2
    assert of("mpnet", (3, 7)) == of("bert", (3, 7))
