"""embed_layer_norm: word + position + type lookups, LayerNorm, dropout (Devlin et al. 2018, section 3, figure 2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fastbert.backend import Backend, register, select
from fastbert.native.availability import extension_error
from fastbert.ops._common import (
    Differentiable,
    Rule,
    check_devices,
    cuda_unsupported,
    define,
    define_triton,
    needs_grad,
    triton_unsupported,
)
from fastbert.ops.dropout import drop, dropout, dropout_torch
from fastbert.ops.layer_norm import add_layer_norm, norm_alone, norm_alone_backward, norm_dtype
from fastbert.ops.seeds import draw_seeds

# out, (total_tokens, width): word[input_ids] + token_type[token_type_ids] + position[position_ids]
#
# rounded once, and its LayerNorm where weight is given (inference; autograd has add_layer_norm for that). Without
# input_ids `word` holds the tokens' own rows; without token_type_ids every token is of type 0; without a table nothing
# is added, and position_ids come with their table only.
# Backward, which CUDA has not, gives one table's gradient, dense; row padding_idx takes none (-1: every row does).

_FWD_SCHEMA = (
    "(Tensor? input_ids, Tensor? position_ids, Tensor? token_type_ids, Tensor word, Tensor? position,"
    " Tensor? token_type, Tensor? weight, Tensor? bias, float eps) -> Tensor"
)
_BWD_SCHEMA = "(Tensor dout, Tensor ids, Tensor table, int padding_idx) -> Tensor"


def _fwd_fake(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, eps):
    return word.new_empty((word if input_ids is None else input_ids).shape[0], word.shape[1])


def _bwd_fake(dout, ids, table, padding_idx):
    return torch.empty_like(table)


_FWD = {
    Backend.CPU: define("embed_fwd_cpu", _FWD_SCHEMA, _fwd_fake),
    Backend.TRITON: define_triton("embed_fwd", _FWD_SCHEMA, "embedding", _fwd_fake),
    Backend.CUDA: define("embed_fwd_cuda", _FWD_SCHEMA, _fwd_fake),
}
_BWD = {
    Backend.CPU: define("embed_bwd_cpu", _BWD_SCHEMA, _bwd_fake),
    Backend.TRITON: define_triton("embed_bwd", _BWD_SCHEMA, "embedding", _bwd_fake),
}


class EmbedLayerNormOptions(NamedTuple):
    padding_idx: int | None
    position_padding_idx: int | None
    dropout_p: float
    eps: float
    sparse: bool


def _embed_layer_norm_torch(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, options):
    x = word
    if input_ids is not None:
        x = F.embedding(input_ids, word, options.padding_idx, sparse=options.sparse)
    if token_type is not None:
        # Types are few and mostly 0: one row when none were given, as transformers does with its zero buffer.
        x = x + (token_type[0] if token_type_ids is None else F.embedding(token_type_ids, token_type))
    if position is not None:
        x = x + F.embedding(position_ids, position, options.position_padding_idx)
    if weight is not None:
        x = F.layer_norm(x, x.shape[-1:], weight, bias, options.eps)
    return dropout_torch(x, options.dropout_p)


def _supports_common(x, *others) -> str | None:
    for t in others:
        if t is not None and t.dtype != x.dtype:
            return f"the tables or the LayerNorm are {x.dtype} and {t.dtype}"
    return None


def _supports_cpu(x, *others) -> str | None:
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    return _supports_common(x, *others) or extension_error()


def _supports_cuda(x, *others) -> str | None:
    if needs_grad(x, *others):
        return "it has no backward"
    return cuda_unsupported(x) or _supports_common(x, *others)


def _supports_triton(x, *others) -> str | None:
    if x.shape[-1] > 8192:
        return f"embedding_size {x.shape[-1]} is above 8192, that of add_layer_norm"
    return triton_unsupported(x) or _supports_common(x, *others)


register("embed_layer_norm", Backend.CPU, _supports_cpu)
register("embed_layer_norm", Backend.TRITON, _supports_triton)
register("embed_layer_norm", Backend.CUDA, _supports_cuda)


def _check_padding(name: str, padding_idx: int | None, table: torch.Tensor | None) -> None:
    if padding_idx is not None and table is not None and not 0 <= padding_idx < table.shape[0]:
        raise ValueError(f"embed_layer_norm: {name} is {padding_idx}; the table has {table.shape[0]} rows")


def _check_shapes(ids, tables, vectors) -> None:
    """Raise ValueError where a kernel would read beyond a tensor, whatever the ids' values: it takes one number of
    tokens and one width for all of them. The C++ operators look for themselves."""
    first = next((name for name, t in ids.items() if t is not None), "inputs_embeds")
    present = [t for t in tables.values() if t is not None]
    count, width = (tables if first == "inputs_embeds" else ids)[first].shape[:1], present[0].shape[-1]
    for name, t in ids.items():
        if t is not None and (t.dtype is not torch.int64 or t.dim() != 1 or t.shape != count):
            raise ValueError(
                f"embed_layer_norm: {name} is {t.dtype} of shape {tuple(t.shape)}; it must be torch.int64 of shape"
                f" (total_tokens,), that of {first}"
            )
    tokens = count[0]
    for name, t in tables.items():
        if t is None:
            continue
        if t.dim() != 2 or t.shape[1] != width:
            raise ValueError(f"embed_layer_norm: {name} has shape {tuple(t.shape)}; it must be (rows, {width})")
        if t.shape[0] != tokens if name == "inputs_embeds" else t.shape[0] == 0 < tokens:
            raise ValueError(f"embed_layer_norm: {name} has {t.shape[0]} rows for {tokens} tokens")
    for name, t in vectors.items():
        if t is not None and t.shape != (width,):
            raise ValueError(f"embed_layer_norm: {name} has shape {tuple(t.shape)}; it must be ({width},)")


def _check_rows(ids, tables) -> None:
    """Raise IndexError, naming the value and the limit, for the first id that is no row of its table."""
    for (name, t), table in zip(ids.items(), tables.values(), strict=True):
        if t is not None and t.numel():
            low, high = torch.stack(t.aminmax()).tolist()
            if low < 0 or high >= table.shape[0]:
                value, last = low if low < 0 else high, table.shape[0] - 1
                raise IndexError(f"embed_layer_norm: {name} holds {value}; valid values are 0 to {last}")


def _forward(backend, options, *operands):
    return _FWD[backend](*operands, None, None, 0.0), operands


def _backward(backend, options, needed, saved, dout):
    """One sorted, deterministic sum a table."""
    input_ids, position_ids, token_type_ids, word, position, token_type = saved
    _, _, _, needs_word, needs_position, needs_type = needed
    embed_bwd = _BWD[backend]
    padding_idx, position_padding = (-1 if p is None else p for p in options[:2])
    dword = dposition = dtype = None
    if needs_word and input_ids is None:
        dword = dout
    elif needs_word and options.sparse:
        dword = _rows_of(embed_bwd, dout, input_ids, word, padding_idx)
    elif needs_word:
        dword = embed_bwd(dout, input_ids, word, padding_idx)
    if needs_position:
        dposition = embed_bwd(dout, position_ids, position, position_padding)
    if needs_type and token_type_ids is None and backend is Backend.TRITON:  # all are of type 0: nothing to sort
        dtype = torch.zeros_like(token_type)
        torch.sum(dout, 0, out=dtype[0])
    elif needs_type:
        types = token_type_ids
        if types is None:
            types = torch.zeros(dout.shape[0], dtype=torch.int64, device=dout.device)
        dtype = embed_bwd(dout, types, token_type, -1)
    return None, None, None, dword, dposition, dtype


def _rows_of(embed_bwd, dout, ids, table, padding_idx):
    """The gradient of a table as torch has it where nn.Embedding is sparse: of the rows that were looked up."""
    rows, places = torch.unique(ids, return_inverse=True)
    values = embed_bwd(dout, places, table.new_empty(rows.shape[0], table.shape[1]), -1)
    kept = rows != padding_idx
    if not kept.all():
        rows, values = rows[kept], values[kept]
    return torch.sparse_coo_tensor(rows[None], values, table.shape, is_coalesced=True, check_invariants=False)


_RULE = Rule(_forward, _backward)


def _forward_with_norm(backend, options, *operands):
    """The sum, its norm in `dtype`, and dropout: one step of autograd for three ops."""
    *of_sum, weight, bias, philox = operands
    options, dtype = options
    x = _FWD[backend](*of_sum, None, None, 0.0).to(dtype)
    out, mean, rstd = norm_alone(backend, x, weight, bias, options.eps)
    if philox is not None:
        out = drop(backend, options.dropout_p, out, philox)
    return out, (*of_sum, x, mean, rstd, weight, philox)


def _backward_with_norm(backend, options, needed, saved, dout):
    *of_sum, x, mean, rstd, weight, philox = saved
    options, _ = options
    if philox is not None:
        dout = drop(backend, options.dropout_p, dout, philox)
    dsum, dweight, dbias = norm_alone_backward(backend, dout, x, mean, rstd, weight)
    dsum = dsum.to(of_sum[3].dtype)
    return *_backward(backend, options, needed[:6], of_sum, dsum), dweight, dbias, None


_RULE_WITH_NORM = Rule(_forward_with_norm, _backward_with_norm)


def _serves_norm(chosen: Backend, dropout_p: float, table, weight, bias, backend: str | None) -> bool:
    """Whether the backend has the norm of the sum, and dropout, of these parameters as they are."""
    dtype = norm_dtype(table, backend)
    if torch.is_autocast_enabled(table.device.type) and weight.dtype is not torch.float32:
        return False  # they are cast
    x = table if dtype is table.dtype else table.detach()[:0].to(dtype)
    serves_dropout = dropout_p == 0 or select("dropout", backend, x) is chosen
    return serves_dropout and select("add_layer_norm", backend, x, None, weight, bias, None) is chosen


def embed_layer_norm(
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    token_type_ids: torch.Tensor | None,
    word: torch.Tensor,
    position: torch.Tensor | None,
    token_type: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    inputs_embeds: torch.Tensor | None = None,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    sparse: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """dropout(LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids])).

    Args:
        input_ids, position_ids, token_type_ids: int64 (total_tokens,); `token_type_ids` None means type 0.
        word (vocab_size, embedding_size), position, token_type: the tables; `position` or `token_type` None: the
            family has none. Without a table its ids are not looked at.
        weight, bias: (embedding_size,); `weight` None skips the LayerNorm (pre-norm families).
        inputs_embeds: (total_tokens, embedding_size) in place of word[input_ids].
        padding_idx, position_padding_idx: rows of the word and position table that take no gradient.
        sparse: the gradient of `word` is a sparse tensor of the rows in input_ids, as nn.Embedding(sparse=True) has it.

    Returns:
        (total_tokens, embedding_size). An id that is no row of its table never reads or writes memory beyond it. On a
        GPU, which nothing here waits for, the kernels make that token's row NaN, and its gradient goes to no table;
        torch's backend has torch's own assertion there.

    Raises:
        IndexError: on a CPU, an id that is no row of its table, with its value and the limit; compiled, too.
        ValueError: tensors on two devices, ids or tables that do not fit each other, a padding row that there is not.
        BackendError: the backend that was asked for cannot serve the call.
    """
    check_devices(
        "embed_layer_norm",
        word=word,
        position=position,
        token_type=token_type,
        weight=weight,
        bias=bias,
        input_ids=input_ids,
        position_ids=position_ids,
        token_type_ids=token_type_ids,
        inputs_embeds=inputs_embeds,
    )
    if input_ids is None and inputs_embeds is None:
        raise ValueError("embed_layer_norm: give input_ids or inputs_embeds")
    if position is None:
        position_ids = None
    elif position_ids is None:
        raise ValueError("embed_layer_norm: there is a position table, give position_ids")
    if inputs_embeds is None:
        table, ids = word, input_ids
        _check_padding("padding_idx", padding_idx, word)
    else:
        table, ids = inputs_embeds, None
    _check_padding("position_padding_idx", position_padding_idx, position)
    options = EmbedLayerNormOptions(padding_idx, position_padding_idx, dropout_p, eps, sparse)
    chosen = select("embed_layer_norm", backend, table, position, token_type, weight, bias)
    if chosen in (Backend.TORCH, Backend.TRITON):
        ids_by_name = {"position_ids": position_ids, "input_ids": ids, "token_type_ids": token_type_ids}
        name = "word" if inputs_embeds is None else "inputs_embeds"
        tables = {"position": position, name: table, "token_type": token_type}
        _check_shapes(ids_by_name, tables, {"weight": weight, "bias": bias})
    operands = (ids, position_ids, token_type_ids, table, position, token_type)
    if chosen is Backend.TORCH:
        try:
            return _embed_layer_norm_torch(*operands, weight, bias, options)
        except IndexError:  # on a CPU; it names neither the value nor the limit
            _check_rows(ids_by_name, tables)
            raise
    return _by_kernels(chosen, operands, weight, bias, options, backend)


def _by_kernels(chosen, operands, weight, bias, options: EmbedLayerNormOptions, backend: str | None) -> torch.Tensor:
    *_, table, position, token_type = operands
    dropout_p, eps = options.dropout_p, options.eps
    if chosen is Backend.CUDA:
        return dropout(_FWD[chosen](*operands, weight, bias, eps), dropout_p)
    if needs_grad(table, position, token_type):
        if weight is not None and _serves_norm(chosen, dropout_p, table, weight, bias, backend):
            philox = draw_seeds(table.device) if dropout_p > 0 else None
            both = options, norm_dtype(table, backend)
            return Differentiable.apply(_RULE_WITH_NORM, chosen, both, *operands, weight, bias, philox)
        x = Differentiable.apply(_RULE, chosen, options, *operands)
    elif not needs_grad(weight, bias):
        return dropout(_FWD[chosen](*operands, weight, bias, eps), dropout_p, backend=backend)
    else:
        x = _FWD[chosen](*operands, None, None, 0.0)
    if weight is not None:
        x = add_layer_norm(x, None, weight, bias, eps=eps, backend=backend)
    return dropout(x, dropout_p, backend=backend)
