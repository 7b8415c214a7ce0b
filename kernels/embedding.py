"""embed_layer_norm: the lookups and their LayerNorm in one pass; the gradient of one table.

    summed = word[input_ids] + token_type[token_type_ids] + position[position_ids], rounded to the tables' dtype;
             without the tables that are not given
    out    = LayerNorm(summed) where a weight is given, else summed      (Devlin et al. 2018, section 3, figure 2)
    dtable[id] = sum of dout[t] over the tokens t with ids[t] = id; 0 in row padding_idx

Tables are row-major (rows, hidden_size) without gaps, in bf16, fp16 or fp32; sums and statistics are fp32. A token
with an id that is no row of its table reads nothing there and comes out as NaN, and its gradient is written nowhere:
the host, which waits for nothing, cannot raise.

Forward: one program a token, its row whole in registers. Backward: tokens are sorted by id, so that each id's are a
run of neighbours, and then added up in two levels, because one id (token type 0) may have every token of the batch. A
program takes a chunk of sorted tokens and writes the runs that lie inside of it; what a run that crosses chunks has in
this one goes to an fp32 buffer, whose rows a second kernel joins. No atomics: every run gives the same bits. No chain
of additions is longer than CHUNK in the first level, and than 128 in the second up to 128 k tokens of one id. Nothing
waits for the host. Both directions are bound by memory: forward reads 3 rows and writes 1, backward reads dout and
writes the table.

Legend: T sorted tokens, N columns (hidden_size), C chunks.
"""

import torch
import triton
import triton.language as tl

from .layer_norm import centre, row_tile
from .sizes import cdiv, next_power_of_2

# Sorted tokens of a program: 64 k tokens are programs enough for the largest GPUs, and their partial sums a sixteenth
# of dout where they are one id. GROUP of them are on the way from memory at once.
CHUNK = 32
GROUP = 8


@triton.jit
def _is_row(id, num_rows):
    return (id >= 0) & (id < num_rows)


@triton.jit(do_not_specialize=["word_rows", "position_rows", "token_type_rows"])
def _embed_fwd_kernel(
    input_ids_ptr, position_ids_ptr, token_type_ids_ptr, word_ptr, position_ptr, token_type_ptr, weight_ptr, bias_ptr,
    out_ptr, word_rows, position_rows, token_type_rows, hidden_size, eps,
    HAS_INPUT_IDS: tl.constexpr, HAS_TYPE: tl.constexpr, HAS_TYPE_IDS: tl.constexpr, HAS_POSITION: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_N)
    inside = columns < hidden_size

    at = token
    if HAS_INPUT_IDS:
        at = tl.load(input_ids_ptr + token).to(tl.int64)
    known = _is_row(at, word_rows)
    summed = tl.load(word_ptr + at * hidden_size + columns, mask=inside & known, other=0.0).to(tl.float32)  # [BLOCK_N]
    if HAS_TYPE:
        at = token * 0
        if HAS_TYPE_IDS:
            at = tl.load(token_type_ids_ptr + token).to(tl.int64)
        is_type = _is_row(at, token_type_rows)
        summed += tl.load(token_type_ptr + at * hidden_size + columns, mask=inside & is_type, other=0.0).to(tl.float32)
        known &= is_type
    if HAS_POSITION:
        at = tl.load(position_ids_ptr + token).to(tl.int64)
        is_position = _is_row(at, position_rows)
        row = tl.load(position_ptr + at * hidden_size + columns, mask=inside & is_position, other=0.0)
        summed += row.to(tl.float32)
        known &= is_position
    summed = tl.where(known, summed, float("nan"))

    out = summed.to(out_ptr.dtype.element_ty)
    if HAS_NORM:  # of the rounded sum, as add_layer_norm has it in training
        centred, _, rstd = centre(out.to(tl.float32), inside, hidden_size, eps, False)
        normed = centred * rstd * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            normed += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        out = normed.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden_size + columns, out, mask=inside)


def embed_fwd(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, eps):
    """-> out (total_tokens, hidden_size); the schema in fastbert/ops/embedding.py."""
    operands = (input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias)
    operands = [None if t is None else t.contiguous() for t in operands]
    out = word.new_empty((word if input_ids is None else input_ids).shape[0], word.shape[1])
    total_tokens, hidden_size = out.shape
    rows = [0 if table is None else table.shape[0] for table in (word, position, token_type)]
    if out.numel() == 0:
        return out
    block_n, num_warps = row_tile(hidden_size)
    with torch.cuda.device_of(out):
        _embed_fwd_kernel[(total_tokens,)](
            *operands, out, *rows, hidden_size, eps,
            HAS_INPUT_IDS=input_ids is not None, HAS_TYPE=token_type is not None,
            HAS_TYPE_IDS=token_type_ids is not None, HAS_POSITION=position is not None, HAS_NORM=weight is not None,
            HAS_BIAS=bias is not None, BLOCK_N=block_n, num_warps=num_warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["total_tokens", "num_rows", "padding_idx"])
def _sum_runs_kernel(
    dout_ptr, ids_ptr, order_ptr, dtable_ptr, parts_ptr, total_tokens, num_rows, hidden_size, padding_idx,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """ids (T,) ascending, order (T,): token of each -> the rows of dtable whose runs lie inside of a chunk, and parts.

    ids are from -1 to num_rows, both of which are no rows; -1 has always come in, since it is `before` the first chunk.
    parts (C, 2, N): of the run that came in from the chunk before, and of the one that goes on from here.
    """
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < hidden_size
    parts_ptr += chunk.to(tl.int64) * 2 * hidden_size + columns
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1).to(tl.int64)

    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(first, first + CHUNK, GROUP):
        # Everything is loaded before the first store, across which the compiler moves no load.
        rows, ids = (), ()
        for i in tl.static_range(GROUP):
            exists = start + i < total_tokens
            token = tl.load(order_ptr + start + i, mask=exists, other=0)
            row = tl.load(dout_ptr + token * hidden_size + columns, mask=inside & exists, other=0.0)  # [BLOCK_N]
            rows += (row,)
        for i in tl.static_range(GROUP + 1):
            ids += (tl.load(ids_ptr + start + i, mask=start + i < total_tokens, other=-1).to(tl.int64),)
        for i in tl.static_range(GROUP):
            total += rows[i].to(tl.float32)
            ends = ids[i] != ids[i + 1]  # never beyond the last token, where both are -1
            came_in = ids[i] == before
            tl.store(parts_ptr, total, mask=inside & (ends & came_in))
            row = total.to(dtable_ptr.dtype.element_ty)
            is_row = ends & (ids[i] != before) & (ids[i] != padding_idx) & (ids[i] < num_rows)
            tl.store(dtable_ptr + ids[i] * hidden_size + columns, row, mask=inside & is_row)
            total = tl.where(ends, 0.0, total)

    last = tl.load(ids_ptr + first + CHUNK - 1, mask=first + CHUNK < total_tokens, other=-1).to(tl.int64)
    after = tl.load(ids_ptr + first + CHUNK, mask=first + CHUNK < total_tokens, other=-2).to(tl.int64)
    which = tl.where(last == before, 0, 1)
    tl.store(parts_ptr + which * hidden_size, total, mask=inside & (last == after))


@triton.jit(do_not_specialize=["num_rows", "padding_idx"])
def _join_runs_kernel(
    ids_ptr, ends_ptr, parts_ptr, dtable_ptr, num_rows, hidden_size, padding_idx,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program for each chunk but the last: if a run begins in it that goes on into the next, its row of dtable.

    ends (C - 1,): where the run of a chunk's last token ends.
    """
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    id = tl.load(ids_ptr + first + CHUNK - 1).to(tl.int64)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1).to(tl.int64)
    end = tl.load(ends_ptr + chunk)
    if (end == first + CHUNK) | (id == before) | (id == padding_idx) | (id >= num_rows):
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_parts = tl.cdiv(end, CHUNK) - chunk
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_parts, BLOCK_M):
        part = start + tl.arange(0, BLOCK_M)
        inside = (part < num_parts)[:, None] & (columns < hidden_size)[None, :]
        row = 2 * (chunk + part).to(tl.int64) + tl.where(part == 0, 1, 0)
        total += tl.load(parts_ptr + row[:, None] * hidden_size + columns[None, :], mask=inside, other=0.0)
    row = tl.sum(total, axis=0)  # [BLOCK_N]
    tl.store(dtable_ptr + id * hidden_size + columns, row.to(dtable_ptr.dtype.element_ty), mask=columns < hidden_size)


def sum_block(hidden_size: int) -> int:
    """BLOCK_N of one warp: 8 columns a thread, which is one 16-byte load of bf16."""
    return min(256, max(16, next_power_of_2(hidden_size)))


def embed_bwd(dout, ids, table, padding_idx):
    """dout (total_tokens, hidden_size), ids (total_tokens,) -> dtable; the schema in fastbert/ops/embedding.py."""
    dout = dout.contiguous()
    total_tokens, hidden_size = dout.shape
    dtable = torch.zeros(table.shape, dtype=table.dtype, device=table.device)
    if dout.numel() == 0:
        return dtable
    num_rows = table.shape[0]
    ids = ids.clamp(-1, num_rows)  # what is no row; none of them comes back into the table as an int32
    # Half the passes of a radix sort over int64.
    ids, order = torch.sort(ids.int() if num_rows < 2**31 else ids, stable=True)
    num_chunks = cdiv(total_tokens, CHUNK)
    parts = dout.new_empty(num_chunks, 2, hidden_size, dtype=torch.float32)
    block_n = sum_block(hidden_size)
    with torch.cuda.device_of(dout):
        _sum_runs_kernel[(num_chunks, cdiv(hidden_size, block_n))](
            dout, ids, order, dtable, parts, total_tokens, num_rows, hidden_size, padding_idx,
            CHUNK=CHUNK, GROUP=GROUP, BLOCK_N=block_n, num_warps=1,
        )  # fmt: skip
        if num_chunks > 1:
            lasts = ids[CHUNK - 1 : total_tokens - 1 : CHUNK].contiguous()
            ends = torch.searchsorted(ids, lasts, right=True)
            _join_runs_kernel[(num_chunks - 1, cdiv(hidden_size, 64))](
                ids, ends, parts, dtable, num_rows, hidden_size, padding_idx, CHUNK=CHUNK, BLOCK_M=32, BLOCK_N=64
            )
    return dtable
