"""embed_layer_norm: word + position + type lookups, LayerNorm, dropout (Devlin et al. 2018, section 3, figure 2)."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops._checks import check_devices
from fastbert.ops._library import cuda_objection, extension_error, needs_grad, triton_objection
from fastbert.ops.dropout import dropout
from fastbert.ops.layer_norm import add_layer_norm

_FWD = {
    Backend.CPU: torch.ops.fastbert.embed_fwd_cpu,
    Backend.TRITON: torch.ops.fastbert.embed_fwd_triton,
}
_BWD = {
    Backend.CPU: torch.ops.fastbert.embed_bwd_cpu,
    Backend.TRITON: torch.ops.fastbert.embed_bwd_triton,
}


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
    return cuda_objection(x) or _supports_common(x, *others)


def _supports_triton(x, *others) -> str | None:
    if x.shape[-1] > 8192:
        return f"embedding_size {x.shape[-1]} is above 8192, that of add_layer_norm"
    return triton_objection(x) or _supports_common(x, *others)


register("embed_layer_norm", Backend.CPU, _supports_cpu)
register("embed_layer_norm", Backend.TRITON, _supports_triton)
register("embed_layer_norm", Backend.CUDA, _supports_cuda)


class _Embed(torch.autograd.Function):
    """Autograd around the registered forward and backward: one sorted, deterministic sum a table."""

    @staticmethod
    def forward(
        ctx, input_ids, position_ids, token_type_ids, word, position, token_type, padding_idx, position_padding, backend
    ):
        ctx.save_for_backward(input_ids, position_ids, token_type_ids, word, position, token_type)
        ctx.options = (padding_idx, position_padding, backend)
        operands = (input_ids, position_ids, token_type_ids, word, position, token_type)
        return _FWD[backend](*operands, None, None, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        input_ids, position_ids, token_type_ids, word, position, token_type = ctx.saved_tensors
        *paddings, backend = ctx.options
        padding_idx, position_padding = (-1 if p is None else p for p in paddings)
        _, _, _, needs_word, needs_position, needs_type, _, _, _ = ctx.needs_input_grad
        embed_bwd = _BWD[backend]
        dword = dposition = dtype = None
        if needs_word:
            dword = dout if input_ids is None else embed_bwd(dout, input_ids, word, padding_idx)
        if needs_position:
            dposition = embed_bwd(dout, position_ids, position, position_padding)
        if needs_type:
            types = torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids
            dtype = embed_bwd(dout, types, token_type, -1)
        return None, None, None, dword, dposition, dtype, None, None, None


def embed_layer_norm(
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor,
    token_type_ids: torch.Tensor | None,
    word: torch.Tensor,
    position: torch.Tensor,
    token_type: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    inputs_embeds: torch.Tensor | None = None,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    backend: str | None = None,
) -> torch.Tensor:
    """dropout(LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids])).

    Args:
        input_ids, position_ids, token_type_ids: int64 (total_tokens,); `token_type_ids` None means type 0.
        word (vocab_size, embedding_size), position, token_type: the tables; `token_type` None: the family has none.
        weight, bias: (embedding_size,); `weight` None skips the LayerNorm (pre-norm families).
        inputs_embeds: (total_tokens, embedding_size) in place of word[input_ids].
        padding_idx, position_padding_idx: rows of the word and position table that take no gradient.

    Returns:
        (total_tokens, embedding_size). Ids are not checked here: models check them at the API boundary.

    Raises:
        ValueError: tensors on two devices. BackendError: the backend that was asked for cannot serve the call.
    """
    check_devices(
        "embed_layer_norm", word=word, position=position, token_type=token_type, weight=weight, bias=bias,
        input_ids=input_ids, position_ids=position_ids, token_type_ids=token_type_ids, inputs_embeds=inputs_embeds,
    )  # fmt: skip
    table = word if inputs_embeds is None else inputs_embeds
    chosen = select("embed_layer_norm", backend, position, table, token_type, weight, bias)
    if chosen is Backend.TORCH:
        return _torch.embed_layer_norm(
            input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias,
            inputs_embeds, padding_idx, position_padding_idx, dropout_p, eps,
        )  # fmt: skip
    ids = input_ids if inputs_embeds is None else None
    operands = (ids, position_ids, token_type_ids, table, position, token_type)
    if chosen is Backend.CUDA:
        return dropout(torch.ops.fastbert.embed_fwd_cuda(*operands, weight, bias, eps), dropout_p)
    if needs_grad(table, position, token_type):
        x = _Embed.apply(*operands, padding_idx, position_padding_idx, chosen)
    elif not needs_grad(position, weight, bias):
        return dropout(_FWD[chosen](*operands, weight, bias, eps), dropout_p, backend=backend)
    else:
        x = _FWD[chosen](*operands, None, None, 0.0)
    if weight is not None:
        x = add_layer_norm(x, None, weight, bias, eps=eps, backend=backend)
    return dropout(x, dropout_p, backend=backend)
