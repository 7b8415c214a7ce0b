"""How many operations a forward pass of the layers takes: what is executed here, and what transformers executes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastbert.config import EncoderConfig
from fastbert.layer_spec import Disentangled, LayerSpec


class Operations(NamedTuple):
    """Additions and multiplications, both counted, of one forward pass of all layers over a batch.

    products: with the layers' weights. attention: of queries with keys and probabilities with values, for the pairs of
    a query and a key that it sees, and of the terms that go by distance, for the same pairs. tables: the projections of
    tables of distances, which inference keeps between calls. transformers: all of it as transformers' eager code has
    it: with padding, beyond windows, with each row of a table of distances, and the tables projected in each call.
    """

    products: int
    attention: int
    tables: int
    transformers: int

    @property
    def executed(self) -> int:
        """Those of a call in inference."""
        return self.products + self.attention


def operations(config: EncoderConfig, lengths: Sequence[int]) -> Operations:
    """Those of a batch of sequences with so many tokens each."""
    products = attention = tables = theirs = 0
    padded, longest = len(lengths) * max(lengths, default=0), max(lengths, default=0)
    for spec in config.layer_specs:
        attn, weights = spec.attention, weights_of_layer(spec, config.hidden_size)
        width = 2 * attn.num_heads * attn.head_dim  # of one product for one pair of a query and a key
        terms, projection = _terms(spec), 0
        products += 2 * weights * sum(lengths)
        attention += (2 + terms) * width * sum(seen_keys(n, attn.window_size) for n in lengths)
        rows = 0
        if isinstance(attn.position, Disentangled):
            rows = 2 * attn.position.span
            projection = terms * rows * width * config.hidden_size
        tables += projection
        theirs += 2 * weights * padded + 2 * width * padded * longest + terms * width * padded * rows + projection
    return Operations(products, attention, tables, theirs)


def weights_of_layer(spec: LayerSpec, hidden_size: int) -> int:
    """The weights that every token is multiplied by."""
    attn, inner = spec.attention, spec.feed_forward
    heads = attn.head_dim * (2 * attn.num_heads + 2 * attn.num_kv_heads)  # of q, k, v and the output
    convolved = 0 if spec.after is None else spec.after.kernel_size * hidden_size**2 // spec.after.groups
    return hidden_size * (heads + inner.intermediate_size * (3 if inner.gated else 2)) + convolved


def _terms(spec: LayerSpec) -> int:
    """How many products of a token and a distance the scores have."""
    if not isinstance(spec.attention.position, Disentangled):
        return 0
    return (spec.names.relative_key is not None) + (spec.names.relative_query is not None)


def seen_keys(length: int, window_size: tuple[int, int]) -> int:
    """How many pairs of a query and a key that it sees a sequence has."""
    left, right = (length if side < 0 else min(side, length) for side in window_size)
    return sum(min(length - 1, i + right) - max(0, i - left) + 1 for i in range(length))
