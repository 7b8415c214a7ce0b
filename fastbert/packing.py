"""Packing: a padded batch becomes 2-D tokens once, and is unpacked once. The only place that knows of padding.

What the host must know of a batch, its token count and whether its values are valid, comes over in one copy: on a GPU
that is the one time that a forward call waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from fastbert import ops
from fastbert.errors import InputError
from fastbert.ops.packing import attention_slots, token_positions, token_sequences

# What torch's aminmax takes of integers: the unsigned ones of more than 8 bits are not among them.
_WITH_ENDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# In `PackedBatch.bounds`: 0, and how many labels of tokens at padding are not -100.
PADDED_LABELS = "labels at padding"


class _Checks:
    """The process-wide choice. torch.compile guards on an object's attribute, while torch 2.11 bakes in a class's."""

    def __init__(self) -> None:
        self.enabled = True


_checks = _Checks()


def check_inputs(enabled: bool) -> None:
    """Turn on or off that models check the values of ids, offsets and labels before they use them. It is on at first.

    On a GPU the check makes the host wait, once a call. Without it the host never waits for packed input with its
    max_seqlen, or for padded input without a mask. Under torch.compile values are never checked. Shapes, dtypes,
    devices and masks always are. The choice holds for the whole process, like torch.set_num_threads.

    An id, an offset or a label out of bounds reads and writes no memory but the call's own, also without the check. On
    a CPU the ops raise IndexError, RuntimeError or ValueError; only torch's own operations, when compiled, give
    meaningless numbers for offsets. On a GPU fastbert's kernels give NaN for an id or a label, and meaningless numbers
    for offsets; torch's own operations fail an assertion.
    """
    _checks.enabled = enabled


def checks_values() -> bool:
    """Whether values are looked at in this call. Not in a traced one: a compiled graph cannot raise on data. Nor within
    a transform of torch.func: vmap's tensors have no values to look at.
    """
    if torch.compiler.is_compiling():
        return False
    return _checks.enabled and torch._C._functorch.maybe_current_level() is None


def _checked_mask(mask: torch.Tensor, batch_size: int, seqlen: int) -> torch.Tensor:
    if mask.shape != (batch_size, seqlen):
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}; it must be (batch, seqlen) = {(batch_size, seqlen)}"
        )
    _refuse_batched("attention_mask", mask)
    if mask.dtype.is_complex:
        raise InputError(f"attention_mask is {mask.dtype}; it must be bool, integer or float")
    return mask


def _refuse_batched(name: str, t: torch.Tensor) -> None:
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(t):
        raise InputError(
            f"{name} is batched by vmap; it says how many tokens are packed, so it must be the same for all samples"
        )


class IdRange(NamedTuple):
    """Ids for a table of `limit` rows: int64 (batch_size, seqlen), or (total_tokens,) if packed."""

    name: str
    ids: torch.Tensor
    limit: int


def _extremes(ranges: Sequence[IdRange], real: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The smallest ids and the largest ones, (len(ranges),) each; `real`, of their shape, says which tokens count."""
    if not ranges:
        return []
    if len(ranges) == 1 and real is None:
        return [end.view(1) for end in ranges[0].ids.aminmax()]  # over all dimensions: a third of the other's time
    ids = torch.stack([each.ids for each in ranges]) if len(ranges) > 1 else ranges[0].ids[None]
    if real is not None:
        ids = torch.where(real, ids, 0)  # which every table has
    return list(ids.flatten(1).aminmax(dim=1))


def _check_ranges(ranges: Sequence[IdRange], extremes: list[int]) -> None:
    for i, (name, _, limit) in enumerate(ranges):
        low, high = extremes[i], extremes[i + len(ranges)]
        if low < 0 or high >= limit:
            raise InputError(f"{name} holds {low if low < 0 else high}; valid values are 0 to {limit - 1}")


def _check_offsets(offsets: list[int], max_seqlen: int | None, total_tokens: int) -> int:
    """The longest length, whatever upper bound of it the caller gave: tables go by it."""
    if offsets[0] != 0:
        raise InputError(f"cu_seqlens starts at {offsets[0]}, not at 0")
    for i, (start, stop) in enumerate(pairwise(offsets)):
        if stop < start:
            raise InputError(f"cu_seqlens falls from {start} to {stop} at sequence {i}; it must never fall")
    if offsets[-1] != total_tokens:
        raise InputError(f"cu_seqlens ends at {offsets[-1]}, but there are {total_tokens} tokens")
    longest = max(stop - start for start, stop in pairwise(offsets))
    if max_seqlen is not None and max_seqlen < longest:
        raise InputError(f"max_seqlen is {max_seqlen}, but the longest sequence has {longest} tokens")
    return longest


def _is_on_host(t: torch.Tensor) -> bool:
    """Whether a look at its values costs no wait. tests/gpu/test_host_syncs.py says no for all, as on a GPU."""
    return t.is_cpu


def _to_host(tensors: list[torch.Tensor]) -> list[int]:
    """All values of 1-D integer tensors, one tensor after the other, in one copy if they are on a GPU."""
    if not tensors or _is_on_host(tensors[0]):
        return [value for t in tensors for value in t.tolist()]
    return torch.cat([t.long() for t in tensors]).tolist()


NOT_ONE_GRAPH = (
    "fastbert packs a padded batch, and how many of its tokens are real depends on the values of its mask: compile"
    " without fullgraph=True, or give fastbert's own classes packed input (fastbert.pack_inputs), which is one graph"
)


def is_all_ones(mask: torch.Tensor) -> bool:
    """Whether an integer mask is seen to have no padding; False where a look would cost a wait, or break a trace."""
    if not _is_on_host(mask) or mask.dtype not in _WITH_ENDS or torch.compiler.is_compiling():
        return False
    low, high = mask.aminmax()
    return int(low) == int(high) == 1


def key_behind_query(i: int) -> str:
    return (
        f"query_only_mask: in sequence {i} a token that is attended to stands behind one that is not; those that only"
        " attend must be its last ones"
    )


def _most_runs(real: torch.Tensor) -> torch.Tensor:
    """int64 (1,): into how many pieces padding cuts the sequence of a (batch_size, seqlen) mask that has most."""
    return (real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)).amax()[None]


class _Alone:
    """Of a (batch_size, seqlen) grid in which some tokens attend and nothing attends to them: which tokens there are,
    which of those that are attended to stand behind one that is not, and what the host must see of it.
    """

    def __init__(self, given: torch.Tensor, query_only: torch.Tensor):
        keys = given & ~query_only
        self.real, self.num_keys = given | query_only, keys.sum(1, dtype=torch.int32)
        self.late = keys & (query_only.cumsum(1) > 0)
        self.looks = [query_only.any()[None], self.late.any()[None]]

    def num_keys_by(self, values: list[int]) -> torch.Tensor | None:
        """None where there are no such tokens. Takes what the host has seen from `values`. Raises InputError."""
        there_are, are_late = values.pop(0), values.pop(0)
        if are_late:
            raise InputError(key_behind_query(int(self.late.any(1).nonzero()[0])))
        return self.num_keys if there_are else None


def _quarters(labelled: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """Which of total_tokens tokens have a label, and as often as a quarter of these, or two, three or four of them, ask
    for more, one that has none.
    """
    quarter = max(1, -(-total_tokens // 4))
    count = min(total_tokens, max(1, -(-len(labelled) // quarter)) * quarter)
    if count == len(labelled):
        return labelled
    has_none = torch.ones(total_tokens).index_fill(0, labelled, 0.0)
    return torch.cat([labelled, labelled.new_full((count - len(labelled),), int(has_none.nonzero()[-1]))])


@dataclass(frozen=True)
class PackedBatch:
    """Where the real tokens of a batch are.

    Args:
        indices: int64 (total_tokens,), flat positions of the real tokens in the (batch_size, seqlen) grid; None when
            there is no padding, or when the caller's input was packed already.
        cu_seqlens: int32 (batch_size + 1,), offsets of the sequences among the packed tokens.
        max_seqlen: an upper bound of the sequence lengths, on the host.
        seqlen: the width of the padded grid; None when the caller's input was packed already.
        total_tokens: the number of packed tokens, on the host.
        labelled: int64 (n,), the packed tokens that have a label, in order; None where that is unknown.
        bounds: the smallest and the largest of the ids and labels that belong to the batch, by name, as the host has
            seen them; None where it has not. `fastbert.pack_inputs` fills both in, so that no model has to wait
            for them.
        has_gaps: whether a sequence has padding between its tokens; None where the host does not know.
        num_keys: int32 (batch_size,): the first so many tokens of each sequence are attended to, and the others attend
            alone; None: all are.
        in_one_row: whether outputs of packed input are (1, total_tokens, ...), as its caller's input was.
        cache: what backends derive from cu_seqlens, kept for the layers of one forward pass.
    """

    indices: torch.Tensor | None
    cu_seqlens: torch.Tensor
    max_seqlen: int
    batch_size: int
    seqlen: int | None
    total_tokens: int
    labelled: torch.Tensor | None = None
    bounds: Mapping[str, tuple[int, int]] | None = None
    has_gaps: bool | None = None
    num_keys: torch.Tensor | None = None
    in_one_row: bool = False
    cache: dict = field(default_factory=dict, repr=False, compare=False)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch on another device, with a cache of its own."""
        return self._moved(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked memory, which a GPU copies from while the host goes on."""
        return self._moved(torch.Tensor.pin_memory)

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> PackedBatch:
        names = ("indices", "cu_seqlens", "labelled", "num_keys")
        moved: dict[str, Any] = {name: move(t) for name in names if (t := getattr(self, name)) is not None}
        return replace(self, **moved, cache={})

    def with_capacity(self, total_tokens: int, batch_size: int, max_seqlen: int) -> PackedBatch:
        """The same batch with padding rows behind it, as `PackedInputs.with_capacity` says; raises InputError."""
        if self.seqlen is not None or self.indices is not None:
            raise InputError(
                "a batch with padded outputs takes no padding rows behind it: make it from lists, or with"
                " padded_outputs=False"
            )
        sizes = {
            "total_tokens": (self.total_tokens, total_tokens),
            "batch_size": (self.batch_size, batch_size),
            "max_seqlen": (self.max_seqlen, max_seqlen),
        }
        for name, (size, limit) in sizes.items():
            if size > limit:
                raise InputError(f"the batch does not fit: its {name} is {size}, and it is to be padded to {limit}")
        kept = None if self.labelled is None else _quarters(self.labelled, total_tokens)
        ends = self.cu_seqlens[-1:].expand(batch_size - self.batch_size)
        num_keys = self.num_keys
        if num_keys is not None:
            num_keys = torch.nn.functional.pad(num_keys, (0, batch_size - self.batch_size))
        bounds = self.bounds and {name: (min(0, low), high) for name, (low, high) in self.bounds.items()}
        offsets = torch.cat([self.cu_seqlens, ends])
        sizes_now = (max_seqlen, batch_size, None, total_tokens)
        return PackedBatch(None, offsets, *sizes_now, kept, bounds, num_keys=num_keys)

    @classmethod
    def from_mask(
        cls,
        attention_mask: torch.Tensor | None,
        batch_size: int,
        seqlen: int,
        device: torch.device,
        ranges: Sequence[IdRange] = (),
        labels: torch.Tensor | None = None,
        has_padding: bool | None = None,
        query_only: torch.Tensor | None = None,
    ) -> PackedBatch:
        """From a (batch_size, seqlen) mask, nonzero = real, holes and any side allowed; None means no padding.

        `ranges`: ids on `device` that are checked by the way, where tokens are real. `labels` of tokens, of the mask's
        shape: the batch's bounds have how many at padding are not -100. `has_padding`: whether the mask is not all
        ones, where that is known. `query_only`, bool of the mask's shape: tokens that attend, whatever the mask says of
        them, and that nothing attends to. One host sync where the mask or ids are on a GPU. Raises InputError for a
        mask of another shape or a strange dtype, ids out of range, and a token that is attended to behind one that is
        not.
        """
        ranges = ranges if checks_values() else ()
        if query_only is not None and attention_mask is None:
            attention_mask = torch.ones_like(query_only)
        if attention_mask is not None:
            attention_mask = _checked_mask(attention_mask, batch_size, seqlen).to(device)
        if has_padding is None:
            has_padding = attention_mask is not None and not is_all_ones(attention_mask)
        if attention_mask is not None and has_padding:
            mask = attention_mask
            given = real = mask != 0
            alone = None if query_only is None else _Alone(given, query_only.to(device))
            real = given if alone is None else alone.real
            lengths = real.sum(1, dtype=torch.int32)
            # Integers have no other value than 0 and 1 if the smallest and the largest are that: quicker than to count.
            has_ends = mask.dtype in _WITH_ENDS
            ends = torch.stack(mask.aminmax()) if has_ends else (given & (mask != 1)).any()[None]
            stray = [] if labels is None else [((labels.to(device) != -100) & ~real).sum()[None]]
            # On a CPU columns_with_gaps looks by itself, where something goes by distances.
            runs = [] if _is_on_host(real) else [_most_runs(real)]
            looked_at = [
                lengths,
                ends,
                *([] if alone is None else alone.looks),
                *stray,
                *runs,
                *_extremes(ranges, real),
            ]
            if torch.compiler.is_dynamo_compiling():  # what comes next is in no graph: with fullgraph the error
                torch._dynamo.graph_break(msg=NOT_ONE_GRAPH)
            values = _to_host(looked_at)
            counts, after = values[:batch_size], batch_size + len(ends)
            (low, high), extremes = (min(values[batch_size:after]), max(values[batch_size:after])), values[after:]
            num_keys = None if alone is None else alone.num_keys_by(extremes)
            bounds = {PADDED_LABELS: (0, extremes.pop(0))} if stray else None
            has_gaps = extremes.pop(0) > 1 if runs else None
            if low < 0 or high > (1 if has_ends else 0):
                strange = int((given & (mask != 1)).sum())
                raise InputError(f"attention_mask has {strange} values that are neither 0 (padding) nor 1 (real)")
            total_tokens, max_seqlen = sum(counts), max(counts)
            _check_ranges(ranges, extremes)
            if total_tokens < batch_size * seqlen:
                indices = real.flatten().nonzero_static(size=total_tokens).flatten()
                cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
                known: dict[str, Any] = {"bounds": bounds, "has_gaps": has_gaps, "num_keys": num_keys}
                return cls(indices, cu_seqlens, max_seqlen, batch_size, seqlen, total_tokens, **known)
            if num_keys is not None:
                cu_seqlens = torch.arange(0, (batch_size + 1) * seqlen, seqlen, dtype=torch.int32, device=device)
                return cls(None, cu_seqlens, seqlen, batch_size, seqlen, total_tokens, num_keys=num_keys)
        else:
            _check_ranges(ranges, _to_host(_extremes(ranges)))
        cu_seqlens = torch.arange(0, (batch_size + 1) * seqlen, seqlen, dtype=torch.int32, device=device)
        return cls(None, cu_seqlens, seqlen, batch_size, seqlen, batch_size * seqlen)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: torch.Tensor, max_seqlen: int | None, total_tokens: int, ranges: Sequence[IdRange] = ()
    ) -> PackedBatch:
        """From a caller's own packed batch; one host sync, as in `from_mask`.

        Raises InputError when the offsets do not fit `total_tokens` tokens, or an id of `ranges` is out of range.
        """
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise InputError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (batch + 1,), batch >= 1")
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise InputError(f"cu_seqlens is {cu_seqlens.dtype}; it must be int32 (or int64)")
        _refuse_batched("cu_seqlens", cu_seqlens)
        batch_size = cu_seqlens.numel() - 1
        if checks_values():
            ranges = ranges if total_tokens else ()
            values = _to_host([cu_seqlens, *_extremes(ranges)])
            max_seqlen = _check_offsets(values[: batch_size + 1], max_seqlen, total_tokens)
            _check_ranges(ranges, values[batch_size + 1 :])
        elif max_seqlen is None:
            if torch.compiler.is_compiling():
                raise InputError("under torch.compile a packed batch needs max_seqlen, an int known on the host")
            max_seqlen = int(cu_seqlens.diff().max())
        elif not torch.compiler.is_compiling():
            max_seqlen = min(max_seqlen, total_tokens)
        return cls(None, cu_seqlens.int(), max_seqlen, batch_size, None, total_tokens)

    def has_tokens(self, num_choices: int = 1) -> torch.Tensor:
        """bool (batch_size // num_choices,): which sequences, or examples of so many, are not empty."""
        return self.cu_seqlens[::num_choices].diff() > 0

    def has_sequence(self) -> torch.Tensor:
        """bool (total_tokens,): which tokens are a sequence's; the others are padding."""
        return torch.arange(self.total_tokens, device=self.cu_seqlens.device) < self.cu_seqlens[-1]

    def check(self, ranges: Sequence[IdRange]) -> None:
        """Raise InputError for packed ids out of range: by `bounds`, or by a look at those that the host has not seen.

        The look is a wait where they are on a GPU.
        """
        if not checks_values() or not self.total_tokens:
            return
        bounds = self.bounds or {}
        if all(name in bounds for name, _, _ in ranges):
            lows, highs = ([bounds[name][end] for name, _, _ in ranges] for end in (0, 1))
            _check_ranges(ranges, [*lows, *highs])
        else:
            _check_ranges(ranges, _to_host(_extremes(ranges)))

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """(batch_size, seqlen, ...) -> (total_tokens, ...), what `unpack` took; a view where there is no padding."""
        if self.seqlen is None:
            return padded[0] if self.in_one_row else padded
        flat = padded.reshape(-1, *padded.shape[2:])
        if self.indices is None:
            return flat
        return ops.pack(flat, self.indices) if flat.is_floating_point() else flat.index_select(0, self.indices)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """(total_tokens, ...) -> (batch_size, seqlen, ...) with zeros at padding; packed input stays packed."""
        if self.seqlen is None:
            return packed[None] if self.in_one_row else packed
        if self.indices is None:
            return packed.view(self.batch_size, self.seqlen, *packed.shape[1:])
        padded = ops.unpack(packed, self.indices, self.batch_size * self.seqlen)
        return padded.view(self.batch_size, self.seqlen, *packed.shape[1:])

    def unpack_attentions(self, probs: torch.Tensor) -> torch.Tensor:
        """(batch, heads, max_seqlen, max_seqlen) over a sequence's own tokens -> (batch, heads, seqlen, seqlen)."""
        if self.seqlen is None or self.indices is None:
            return probs
        out = probs.new_zeros(*probs.shape[:2], self.seqlen + 1, self.seqlen + 1)
        slots = attention_slots(self.indices, self.cu_seqlens, self.max_seqlen, self.seqlen)
        out[slots] = probs.permute(0, 2, 3, 1)
        return out[:, :, :-1, :-1]

    def pack_attentions(self, padded: torch.Tensor) -> torch.Tensor:
        """What `unpack_attentions` took, of its result."""
        if self.seqlen is None or self.indices is None:
            return padded
        slots = attention_slots(self.indices, self.cu_seqlens, self.max_seqlen, self.seqlen)
        return torch.nn.functional.pad(padded, (0, 1, 0, 1))[slots].permute(0, 3, 1, 2)

    def local_positions(self) -> torch.Tensor:
        """int64 (total_tokens,): a token's column in the padded grid, or its place in its sequence if packed input.

        Padding rows, which may be more than there are positions, have 0.
        """
        if self.seqlen is not None:
            column = torch.arange(self.seqlen, device=self.cu_seqlens.device).expand(self.batch_size, -1).reshape(-1)
            return column if self.indices is None else column.index_select(0, self.indices)
        return token_positions(self.cu_seqlens, self.total_tokens)

    def columns_with_gaps(self, absolute: bool = False) -> torch.Tensor | None:
        """int64 (total_tokens,), each token's column in the padded grid; None where all tokens of a sequence are known
        to be neighbours there, so that their places in the sequence have the same distances; with `absolute`, where
        each sequence is known to begin in column 0, too, so that the places are the columns.
        """
        if self.seqlen is None or self.indices is None or (self.has_gaps is False and not absolute):
            return None
        columns = self.indices % self.seqlen
        if _is_on_host(self.indices) and not torch.compiler.is_compiling():
            begins = (self.indices // self.seqlen).diff() != 0
            is_whole = bool(((self.indices.diff() == 1) | begins).all())
            if is_whole and not (absolute and (bool(columns[:1].any()) or bool(columns[1:][begins].any()))):
                return None
        return columns

    def grid_slots(self) -> tuple[int, torch.Tensor]:
        """The columns of a grid that holds the batch, and int64 (total_tokens,): each token's slot in that grid, row by
        row; padding rows of a packed batch have the one behind it.
        """
        width = self.max_seqlen if self.seqlen is None else self.seqlen
        if self.seqlen is not None:
            tokens = torch.arange(self.total_tokens, device=self.cu_seqlens.device)
            return width, tokens if self.indices is None else self.indices
        sequence, inside = token_sequences(self.cu_seqlens, self.total_tokens)
        position = torch.arange(self.total_tokens, device=sequence.device) - self.cu_seqlens[sequence].long()
        slots = sequence * width + position
        return width, torch.where(inside, slots, self.batch_size * width)

    def local_targets(self, positions: torch.Tensor) -> torch.Tensor:
        """Columns of the padded grid (batch,) -> places among a sequence's real tokens; -1 where there is no token."""
        if self.indices is None or self.seqlen is None:
            return positions
        token_of = torch.full((self.batch_size * self.seqlen,), -1, device=positions.device)
        token_of[self.indices] = torch.arange(self.indices.numel(), device=positions.device)
        inside = (positions >= 0) & (positions < self.seqlen)
        rows = torch.arange(self.batch_size, device=positions.device) * self.seqlen
        token = token_of[rows + positions.clamp(0, self.seqlen - 1)]
        return torch.where(inside & (token >= 0), token - self.cu_seqlens[:-1], -1)
