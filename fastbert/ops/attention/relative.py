"""Terms of attention's scores that go by the distance of two tokens: disentangled attention and relative bias."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastbert.ops._common import check_devices


class Relative(NamedTuple):
    """Tables with a row for each kind of distance, and which row a distance has.

    With r = rows[longest - 1 + (place of the query - place of the key)], the score of a query and a key is

        (q k + q key[r] + k query[r]) * softmax_scale + bias[r]

    where the second term is DeBERTa's content-to-position, the third its position-to-content (He et al. 2021,
    "DeBERTa", section 3.1), and the last the bias of T5 and MPNet (Raffel et al. 2020, section 2.1; Song et al. 2020).

    Args:
        rows: int32 (2 * longest - 1,), `longest` at least the longest sequence.
        key, query: (num_rows, num_heads, head_dim), the projected tables, in q's dtype; None: there is no such term.
        bias: (num_rows, num_heads), or None.
        positions: int32 (total_tokens,), the places of tokens, ascending in each sequence, and in none of them
            `longest` apart; default 0, 1, 2... in each sequence. Padded columns, by which transformers counts, are
            others where a mask has holes.
    """

    rows: torch.Tensor
    key: torch.Tensor | None = None
    query: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    @property
    def longest(self) -> int:
        """The sequences that `rows` serves have at most so many places."""
        return (self.rows.shape[0] + 1) // 2

    def to(self, dtype: torch.dtype) -> Relative:
        """With key and query in another dtype, as autocast casts q and k."""
        key, query = (None if t is None else t.to(dtype) for t in (self.key, self.query))
        return self._replace(key=key, query=query)


def check_relative(op: str, q: torch.Tensor, k: torch.Tensor, relative: Relative, max_seqlen: int) -> None:
    """Raises ValueError where the tables do not fit q (total_tokens, num_heads, head_dim), k or max_seqlen."""
    rows, key, query, bias, positions = relative
    total_tokens, num_heads, head_dim = q.shape
    check_devices(op, q=q, rows=rows, key=key, query=query, bias=bias, positions=positions)
    if k.shape[1] != num_heads:
        raise ValueError(f"{op}: relative terms are of as many heads as q has, {num_heads}; k has {k.shape[1]}")
    if rows.dtype is not torch.int32 or rows.dim() != 1 or rows.shape[0] % 2 == 0:
        raise ValueError(
            f"{op}: relative.rows is {rows.dtype} of shape {tuple(rows.shape)}; it must be torch.int32 of shape"
            " (2 * longest - 1,)"
        )
    tables = {"key": key, "query": query, "bias": bias}
    present = {name: t for name, t in tables.items() if t is not None}
    if not present:
        raise ValueError(f"{op}: relative has neither key nor query nor bias")
    num_rows = next(iter(present.values())).shape[0]
    for name, t in present.items():
        shape = (num_rows, num_heads) if name == "bias" else (num_rows, num_heads, head_dim)
        if t.shape != shape:
            expected = "(num_rows, num_heads)" if name == "bias" else "(num_rows, num_heads, head_dim)"
            raise ValueError(f"{op}: relative.{name} has shape {tuple(t.shape)}; it must be {expected} = {shape}")
        if t.dtype != q.dtype and not (name == "bias" and t.is_floating_point()):  # which is added up in fp32
            raise ValueError(f"{op}: relative.{name} is {t.dtype}, q is {q.dtype}")
    if positions is None:
        if relative.longest < max_seqlen:
            raise ValueError(f"{op}: relative.rows serves {relative.longest} places, max_seqlen is {max_seqlen}")
    elif positions.dtype is not torch.int32 or positions.shape != q.shape[:1]:
        raise ValueError(
            f"{op}: relative.positions is {positions.dtype} of shape {tuple(positions.shape)}; it must be torch.int32"
            f" of shape (total_tokens,) = ({total_tokens},)"
        )


def reached(relative: Relative, width: int) -> Relative:
    """The same for sequences of at most `width` tokens, whose tables have only the rows that some distance has."""
    if relative.positions is not None or torch.compiler.is_compiling():
        return relative  # which distances there are depends on data
    width = min(width, relative.longest)
    used = relative.rows[relative.longest - width : relative.longest + width - 1]
    kept, rows = used.unique(return_inverse=True)
    tables = (None if t is None else t.index_select(0, kept) for t in relative[1:4])
    return Relative(rows.int(), *tables)


def row_of_each_pair(relative: Relative, places: torch.Tensor) -> torch.Tensor:
    """int64 (..., width, width): the row of each query (rows) and key (columns) at places (..., width)."""
    distance = places[..., :, None] - places[..., None, :]
    return relative.rows.long()[distance + (relative.longest - 1)]
