"""The tables of rotary embedding (Su et al. 2021, section 3.4.2), and those that stretch it to longer texts."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fastbert import ops
from fastbert.layer_spec import RotarySpec
from fastbert.layers.leaves import get_leaf, in_use, set_module
from fastbert.layers.sharded import whole_beside


def inverse_frequencies(rotary: RotarySpec) -> tuple[torch.Tensor, float]:
    """fp32 (dim / 2,): by how much each pair of dimensions turns from one position to the next; and a factor of the
    cosines and sines.
    """
    exponents = torch.arange(0, rotary.dim, 2, dtype=torch.float32) / rotary.dim
    plain = 1.0 / rotary.theta**exponents
    if not rotary.scaling:
        return plain, 1.0
    rope_type, parameters = rotary.scaling
    options = dict(parameters)
    return _SCALED[rope_type](rotary, plain, options)


def _linear(rotary: RotarySpec, plain: torch.Tensor, options: dict) -> tuple[torch.Tensor, float]:
    """Positions are nearer to each other by `factor` (Chen et al. 2023)."""
    return plain / options["factor"], 1.0


def _proportional(rotary: RotarySpec, plain: torch.Tensor, options: dict) -> tuple[torch.Tensor, float]:
    """A share of the frequencies, the fast ones, and no turning by the others."""
    kept = int(options["partial_rotary_factor"] * rotary.dim // 2)
    return torch.cat((plain[:kept], torch.zeros_like(plain[kept:]))) / options["factor"], 1.0


def _llama3(rotary: RotarySpec, plain: torch.Tensor, options: dict) -> tuple[torch.Tensor, float]:
    """Long waves are stretched by `factor`, short ones left alone, those between in proportion (Llama 3.1)."""
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] * plain / (2 * math.pi)  # over the original length
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0) if high > low else (turns >= low).float()
    return (1 - smooth) * plain / factor + smooth * plain, 1.0


def _yarn(rotary: RotarySpec, plain: torch.Tensor, options: dict) -> tuple[torch.Tensor, float]:
    """Peng et al. 2023, "YaRN", sections 3.2 and 3.4."""
    factor, length = options["factor"], options["original_max_position_embeddings"]

    def scale_of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    attention = options.get("attention_factor")
    if attention is None and "mscale" in options and "mscale_all_dim" in options:
        attention = scale_of(options["mscale"]) / scale_of(options["mscale_all_dim"])
    attention = scale_of(1.0) if attention is None else attention

    def dimension_that_turns(times: float) -> float:
        return rotary.dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low, high = dimension_that_turns(options.get("beta_fast", 32)), dimension_that_turns(options.get("beta_slow", 1))
    if options["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    high = high + 0.001 if high == low else high
    ramp = ((torch.arange(rotary.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), attention


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "proportional": _proportional}


class RotaryTable(nn.Embedding):
    """Sines and then cosines by position, (rows, dim), which a family's files hold. No gradient changes them."""

    def __init__(self, rotary: RotarySpec, rows: int):
        super().__init__(rows, rotary.dim, _freeze=True)
        self.rotary = rotary

    @torch.no_grad()
    def fill(self) -> None:
        if self.weight.is_meta:
            return  # torch would import its compiler for what has no values
        exponents = torch.arange(0, self.rotary.dim, 2, dtype=torch.float64, device=self.weight.device)
        positions = torch.arange(self.num_embeddings, dtype=torch.float64, device=self.weight.device)
        angles = positions[:, None] / self.rotary.theta ** (exponents / self.rotary.dim)
        self.weight.copy_(whole_beside(self.weight, torch.cat((angles.sin(), angles.cos()), 1)))


class RotaryFrequencies(nn.Module):
    """Inverse frequencies, (dim / 2,), which a family's files hold, in a buffer `name`."""

    def __init__(self, rotary: RotarySpec, name: str):
        super().__init__()
        self.rotary, self.buffer_name = rotary, name
        self.register_buffer(name, torch.empty(rotary.dim // 2))

    @torch.no_grad()
    def fill(self) -> None:
        buffer = self._buffers[self.buffer_name]
        assert buffer is not None
        if buffer.is_meta:
            return
        buffer.copy_(inverse_frequencies(self.rotary)[0])

    def _apply(self, fn, recurse=True):
        """Another device, never another dtype: rounded frequencies turn far positions by another angle."""
        before = self._buffers[self.buffer_name]
        super()._apply(fn, recurse)
        after = self._buffers[self.buffer_name]
        if before is not None and after is not None and after.dtype is not before.dtype:
            self._buffers[self.buffer_name] = before.to(after.device)
        return self


def place_rotary(root: nn.Module, rotaries: Iterable[RotarySpec], rows: int) -> None:
    """The leaves below `root` that hold what a family saves of these; `rows`: the positions of a table."""
    for rotary in rotaries:
        if rotary.table is not None:
            set_module(root, rotary.table, RotaryTable(rotary, rows))
        if rotary.frequencies is not None:
            path, _, name = rotary.frequencies.rpartition(".")
            set_module(root, path, RotaryFrequencies(rotary, name))


Table = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, a row for each position

# Tables of positions, made once and again where a text is longer. Only eager calls may ask here: see TreeCache.
_table_cache: dict[tuple[RotarySpec, torch.device], Table] = {}
_MOST_TABLES = 64
_buffer_tables: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # buffer of frequencies -> (what it held, the factor, table)


def rotary_tables(
    root: nn.Module, rotary: RotarySpec, positions: torch.Tensor | None, max_seqlen: int, device
) -> ops.Rotary:
    """The tables that attention takes: by a token's place in its sequence, or, with `positions` (total_tokens,), by
    token. What `root` holds of them counts: transformers' frequencies are bf16 after `model.bfloat16()`, and they and
    the factor are what its tree was built with, whatever its config says by now.
    """
    if rotary.table is not None:
        table = get_leaf(root, rotary.table)._parameters["weight"]
        assert table is not None
        rows = table.detach().float()
        rows = rows if positions is None else rows.index_select(0, positions)
        sin, cos = rows.chunk(2, -1)
        return ops.Rotary(cos, sin, rotary.interleaved, positions is not None)
    held, factor = _held_in(root, rotary.frequencies or rotary.hf_frequencies)
    is_remembered = positions is None and not torch.compiler.is_compiling()
    if is_remembered and held is None:
        cos, sin = _remembered(rotary, max_seqlen, device)
    elif is_remembered and held is not None and not held.is_inference():  # which has no version
        cos, sin = _remembered_of(held, factor, rotary, max_seqlen)
    else:
        rows = _all_positions(max_seqlen, device) if positions is None else positions
        cos, sin = _rotated(rotary, held, factor, rows)
    return ops.Rotary(cos, sin, rotary.interleaved, positions is not None)


def _held_in(root: nn.Module, path: str | None) -> tuple[torch.Tensor | None, float | None]:
    """The buffer at `path` below `root`, and the factor of cosines and sines that transformers keeps beside it; None
    where there is none.
    """
    parents, _, name = (path or "").rpartition(".")
    for parent in parents.split("."):
        if parent not in root._modules:
            return None, None
        root = in_use(root._modules[parent])  # type: ignore[arg-type]
    return root._buffers[name], root.__dict__.get(f"{name.removesuffix('inv_freq')}attention_scaling")


def _remembered(rotary: RotarySpec, max_seqlen: int, device) -> Table:
    table = _table_cache.get((rotary, device))
    if table is None or table[0].shape[0] < max_seqlen:
        table = _long_table(rotary, None, None, max_seqlen, device)
        if len(_table_cache) >= _MOST_TABLES:
            _table_cache.clear()
        _table_cache[rotary, device] = table
    return table


def _remembered_of(held: torch.Tensor, factor: float | None, rotary: RotarySpec, max_seqlen: int) -> Table:
    # Not every write is counted, and these are few numbers. A GPU would be waited for: there the count must do.
    holds = held.tolist() if held.device.type == "cpu" else held._version
    *made_from, table = _buffer_tables.get(held, (None, None, None))
    if table is None or made_from != [holds, factor] or table[0].shape[0] < max_seqlen:
        table = _long_table(rotary, held, factor, max_seqlen, held.device)
        _buffer_tables[held] = holds, factor, table
    return table


def _long_table(rotary: RotarySpec, held: torch.Tensor | None, factor: float | None, max_seqlen: int, device) -> Table:
    with torch.inference_mode(False), torch.no_grad():
        return _rotated(rotary, held, factor, _all_positions(1 << max(max_seqlen - 1, 127).bit_length(), device))


def _all_positions(length: int, device) -> torch.Tensor:
    return torch.arange(length, device=device)


def _rotated(rotary: RotarySpec, held: torch.Tensor | None, factor: float | None, positions: torch.Tensor) -> Table:
    """cos and sin, fp32 (positions, dim / 2), by the frequencies and the factor that a tree holds, or else by those of
    `rotary`.
    """
    frequencies, own_factor = inverse_frequencies(rotary)
    factor = own_factor if factor is None else factor
    angles = positions[:, None].float() * (frequencies if held is None else held.float()).to(positions.device)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)
