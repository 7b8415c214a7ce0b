"""What layers on a GPU launch: Triton's kernels bound to a batch, which write what the caller has made.

A launch of layers that are alike differs from that of the next layer in its tensors only. So what a kernel is compiled
for, its grid and its numbers are looked up once for all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from fastbert.ops.layers.layer_numbers import LayerNumbers

Launch = Callable[..., Any]


def _module(name: str) -> Any:
    return importlib.import_module(f"fastbert.kernels.{name}")


def project(x: torch.Tensor, weight_t: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """weight_t: (in, out)."""
    if bias is None:
        torch.mm(x, weight_t, out=out)
    else:
        torch.addmm(bias, x, weight_t, out=out)


class LayerKernels:
    """For matrices of as many rows as x (total_tokens, hidden_size) has, in its dtype."""

    def __init__(self, x: torch.Tensor, rms: bool):
        self.x, self.rms = x, rms
        self.total_tokens, self.hidden_size = x.shape
        self.norms = _module("layer_norm")
        self.ends = _module("feed_forward")
        self._bound: dict[tuple, Launch] = {}
        self._shares: torch.Tensor | None = None

    def dropout(self, width: int, dropout_p: float) -> Launch:
        """Of rows; called with x, philox, and out, which may be x."""
        key = ("dropout", width, dropout_p)
        launch = self._bound.get(key)
        if launch is None:
            launch = _module("dropout").dropout_launch(self.total_tokens, width, dropout_p)
            self._bound[key] = launch
        return launch

    # ----------------------------------------------------------------------------------------------------------------
    # Norms

    def norm_fwd(self, *key: Any) -> Launch:
        """key: dropout_p, eps, and whether there are a bias of x, a residual, a bias of the norm, a sum and statistics.

        Called with x, x_bias, residual, weight, bias, philox, out, summed, mean, rstd. There are seeds where there is a
        residual.
        """
        launch = self._bound.get(key)
        if launch is None:
            launch = self.norms.fwd_launch(self.total_tokens, self.hidden_size, *key, self.rms)
            self._bound[key] = launch
        return launch

    def norm_bwd(self, dropout_p: float, has_dsum: bool, has_x_bias: bool) -> Launch:
        """Called with dout, dsum, summed, mean, rstd, weight, philox, dx, dsummed, dx_bias, dweight, dbias."""
        key = (dropout_p, has_dsum, has_x_bias)
        launch = self._bound.get(key)
        if launch is None:
            launch = self._bound[key] = self._norm_bwd(*key)
        return launch

    def _norm_bwd(self, dropout_p: float, has_dsum: bool, has_x_bias: bool) -> Launch:
        if self._shares is None:
            self._shares = self.norms.bwd_shares(self.x, self.hidden_size)
        shares, hidden_size = self._shares, self.hidden_size
        launch = self.norms.bwd_launch(
            self.total_tokens, shares, hidden_size, dropout_p, has_dsum, has_x_bias, self.rms
        )
        add_shares = self.norms.shares_launch(shares, hidden_size, has_x_bias, self.rms)

        def norm_bwd(dout, dsum, summed, mean, rstd, weight, philox, dx, dsummed, dx_bias, dweight, dbias):
            launch(dout, dsum, summed, mean, rstd, weight, philox, dx, dsummed, shares)
            add_shares(shares, dweight, dbias, dx_bias)

        return norm_bwd

    # ----------------------------------------------------------------------------------------------------------------
    # Attention, of rows with the heads of query, key and value beside each other

    def attention_fwd(
        self, layer: LayerNumbers, tiles: torch.Tensor, tile: int, positions: torch.Tensor | None
    ) -> Launch:
        """Called with q, k, v, out, the rows of softmax_stats, tiles, philox, positions."""
        heads, size = layer.num_heads, layer.head_dim
        strides = ((heads + 2 * layer.num_kv_heads) * size, size) * 3
        return _module("attention_fwd").fwd_launch(  # type: ignore[no-any-return]
            tiles.shape[0],
            self.total_tokens,
            strides,
            True,
            *self._element(),
            tile,
            heads,
            size,
            heads // layer.num_kv_heads,
            *_options(layer, positions),
        )

    def attention_bwd(
        self, layer: LayerNumbers, tiles: torch.Tensor, tile: int, positions: torch.Tensor | None
    ) -> Launch:
        """Called with dout, q, k, v, out, the rows of softmax_stats, dq, dk, dv, tiles, philox, positions."""
        module = _module("attention_bwd")
        heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
        width, total_tokens = (heads + 2 * kv_heads) * size, self.total_tokens
        whole, own = (width, size) * 3, (heads * size, size)
        scale, _ = _module("attention").scale_and_sign(layer.softmax_scale)
        make_dkdv, make_dq = module.bwd_launches(
            tiles.shape[0],
            total_tokens,
            (*whole, *own),
            width,
            *self._element(),
            tile,
            heads,
            kv_heads,
            size,
            *_options(layer, positions),
        )
        make_records = module.records_launch(total_tokens, heads, own * 2, size, scale)
        records = self.x.new_empty((heads, total_tokens, 4), dtype=torch.float32)

        def attention_bwd(dout, q, k, v, out, row_max, row_sum, dq, dk, dv, tiles, philox, positions):
            make_records(dout, out, row_max, row_sum, records)
            make_dkdv(q, k, v, dout, records, dk, dv, tiles, philox, positions)
            make_dq(q, k, v, dout, records, dq, tiles, philox, positions)

        return attention_bwd

    def rotate(self, layer: LayerNumbers, tiles: torch.Tensor, tile: int, table: tuple, inverse: bool) -> Launch:
        """In place; called with q, k, q, k, cos, sin, tiles. table: cos, sin, interleaved, by_token."""
        cos, sin, interleaved, by_token = table
        heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
        width = (heads + 2 * kv_heads) * size
        strides = (width, size, width, size, width, width, cos.stride(0), sin.stride(0))
        return _module("rotary").rotary_launch(  # type: ignore[no-any-return]
            tiles.shape[0], cos.shape[0], tile, heads, kv_heads, size // 2, strides, interleaved, by_token, inverse
        )

    def _element(self) -> tuple[int, int]:
        return _module("blocks").major_of(self.x.device), self.x.element_size()

    # ----------------------------------------------------------------------------------------------------------------
    # Feed-forward

    def feed_forward(self, activation: str, layer: LayerNumbers, inner_size: int) -> Launch:
        """Called with h, up_t, up_bias, down_t, pre, inner, out, philox."""
        act = self.ends.activation_fwd_launch(self.total_tokens, inner_size, activation, layer.gated)
        drop = self._inner_dropout(layer, inner_size)

        def feed_forward(h, up_t, up_bias, down_t, pre, inner, out, philox):
            project(h, up_t, up_bias, pre)
            act(pre, inner)
            if drop is not None:
                drop(inner, philox, inner)
            torch.mm(inner, down_t, out=out)

        return feed_forward

    def _inner_dropout(self, layer: LayerNumbers, inner_size: int) -> Launch | None:
        return self.dropout(inner_size, layer.inner_dropout) if layer.inner_dropout > 0 else None

    def feed_forward_bwd(self, activation: str, layer: LayerNumbers, inner_size: int, has_bias: bool) -> Launch:
        """Called with dout, h, pre, up, down, narrow and wide (memory of inner's and of pre's widths), dup, ddown,
        dup_bias, dh, whether dh is added to what it has, and philox.
        """
        total_tokens, drop, gated = self.total_tokens, self._inner_dropout(layer, inner_size), layer.gated
        act = self.ends.activation_bwd_launch(total_tokens, inner_size, activation, gated, has_bias)
        shares = self.ends.dbias_shares(self.x, inner_size * (1 + gated) if has_bias else 0)

        def feed_forward_bwd(dout, h, pre, up, down, narrow, wide, dup, ddown, dup_bias, dh, is_added, philox):
            torch.mm(dout, down, out=narrow)
            if drop is not None:
                drop(narrow, philox, narrow)
            dpre, inner = (wide, narrow) if gated else (narrow, wide)
            act(narrow, pre, dpre, inner, shares)
            if drop is not None:
                drop(inner, philox, inner)
            torch.mm(dout.t(), inner, out=ddown)
            torch.mm(dpre.t(), h, out=dup)
            if has_bias:
                torch.sum(shares, 0, dtype=dup_bias.dtype, out=dup_bias)
            project_back(dpre, up, dh, is_added)

        return feed_forward_bwd


def project_back(dout: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor, is_added: bool) -> None:
    """dx, which is added to inside of the product, or written."""
    if is_added:
        dx.addmm_(dout, weight)
    else:
        torch.mm(dout, weight, out=dx)


def _options(layer: LayerNumbers, positions: torch.Tensor | None) -> tuple:
    return layer.softmax_scale, layer.attention_dropout, (layer.window_left, layer.window_right), positions is not None
