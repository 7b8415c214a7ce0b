"""A whole encoder in one call: embeddings, layers, and one vector a text, for inference.

What it stands for takes 25 operators and a thousand steps of Python for each batch, which are most of a short text's
time. A fused op: `try_fused("encoder", word, find_operands)`, where `word` is the table of words and `find_operands()`
gives EncoderOperands. What it answers is called with

    input_ids, token_type_ids (or None), position_ids (or None, and they are counted): int64 (total_tokens,)
    cu_seqlens: int32 (batch + 1,)
    pooling: "mean" or "cls", as of `pooling`; "none" is the last hidden state, (total_tokens, hidden_size)
    normalizes: whether `normalize` comes behind it
    pools: whether what the model's pooler makes of each text's first token is wanted, too

and gives the result, and the pooler's (batch, hidden_size), or None where that was not wanted or is not for this op.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from fastbert.backend import Backend, register_fused
from fastbert.ops._common import define, for_kernels, needs_grad
from fastbert.ops.layers.encoder_layers import LayerOperands, supports, versions_of
from fastbert.ops.normalize import EPS


class HeldEncoder:
    """The tensors of an encoder, which the kernels hold for as long as this lives: handing over a hundred of them with
    each text would take as long as some of the layers.

    Of the tensors themselves nothing is kept: a call reads their memory, sizes and dtypes anew.

    Args:
        embeddings: the tables of words, positions and token types, (rows, hidden_size), and the weight and bias of the
            norm of their sum, (hidden_size,); None where there is none.
        eps: that norm's.
        first_position: of a text's first token, where padding's id is that less 1, and has this position itself; None:
            0, and no id is special. Without a position table none is counted.
        layers: the layers.
        pooler: weight, bias, weight_scale and input_scale, as of `linear`, of the Linear before a pooler's tanh.
    """

    def __init__(
        self,
        embeddings: Sequence[torch.Tensor | None],
        eps: float,
        first_position: int | None,
        layers: LayerOperands,
        pooler: Sequence[torch.Tensor | None] = (),
    ):
        _, *of_layers, _, self.unsupported = layers
        self.tensors = [t for t in (*embeddings, *layers.weights, *layers.biases, *layers.norms) if t is not None]
        self.weights, self.layers = layers.weights, layers.layers
        self.pooler = [t for t in pooler[:2] if t is not None]  # what may want a gradient
        self.number = 0  # of none, until somebody runs it
        self._to_hold = (
            list(embeddings),
            eps,
            -1 if first_position is None else first_position,
            for_kernels(layers.weights),
            *of_layers,
            [*for_kernels(pooler[:1]), *pooler[1:]],
        )

    def hold(self) -> int:
        """The number by which the kernels know it."""
        if not self.number:
            from fastbert._C import forget_encoder

            self._forget = forget_encoder  # here: when the interpreter ends, nothing can be imported
            with _holding:  # two threads may be first
                self.number = self.number or _HOLD(*self._to_hold)
        return self.number

    def __del__(self) -> None:
        if self.number:
            self._forget(self.number)


_holding = threading.Lock()


class EncoderOperands:
    """infers: no gradients are wanted, whatever the mode."""

    __slots__ = ("held", "infers")

    def __init__(self, held: HeldEncoder, infers: bool):
        self.held, self.infers = held, infers


# encoder: what hold_encoder_cpu gave, of a HeldEncoder's tensors. versions: the weights', or
# none, and the kernels ask for each. infers: as in inference mode, a share of each weight is compared with its packed
# copy, not all of it. No trace meets them.
_HOLD = define(
    "hold_encoder_cpu",
    "(Tensor?[] embeddings, float eps, int first_position, Tensor[] weights, Tensor[] biases, Tensor[] weight_scales,"
    " Tensor[] input_scales, Tensor[] norms, str activation, int[] layers, int[] ints, float[] floats,"
    " float? final_eps, Tensor?[] pooler) -> int",
    None,
)
_RUN = define(
    "encoder_cpu",
    "(Tensor input_ids, Tensor? token_type_ids, Tensor? position_ids, Tensor cu_seqlens, int encoder,"
    " int[] versions, bool infers, str pooling, float? normalize_eps, bool pools) -> Tensor[]",
    None,
)


def _supports(word: torch.Tensor) -> str | None:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "a trace records each op"
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses a dtype for each op"
    return supports(word)


def _accepts(word: torch.Tensor, operands: EncoderOperands) -> str | None:
    if not operands.infers and needs_grad(*operands.held.tensors):
        return "it is for inference: autograd records each op"
    return operands.held.unsupported


def _run(
    word: torch.Tensor,
    operands: EncoderOperands,
    input_ids: torch.Tensor,
    token_type_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    pooling: str,
    normalizes: bool,
    pools: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Raises IndexError where it cannot serve these ids, or tensors whose dtypes are not one any more: the ops that it
    stands for say what is wrong, or serve.
    """
    held = operands.held
    pools = pools and bool(held.pooler) and (operands.infers or not needs_grad(*held.pooler))
    result, *pooled = _RUN(
        input_ids,
        token_type_ids,
        position_ids,
        cu_seqlens,
        held.hold(),
        versions_of(held.weights),
        operands.infers,
        pooling,
        EPS if normalizes else None,
        pools,
    )
    return result, pooled[0] if pooled else None


register_fused("encoder", Backend.CPU, _supports, _accepts, _run)
