"""Relations of all pairs in Triton: the operator of ``tiled.py``, forward and backward.

Bands of pairs follow one another. The statistics of a band's pairs are their deviation and, in the backward pass, their
share of the norm's gradient. They are kept until the next band: memory is linear in the tokens. One program adds all of
a band's terms of one number: results do not depend on the order of programs.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lightscale.kernels.attention import to_device
from lightscale.kernels.common.triton.launch import LAUNCH, dense_last, on_device_of, power_of_two
from lightscale.kernels.relation.tiled import Form
from lightscale.kernels.relation.triton import tiling
from lightscale.kernels.relation.triton.cases import COMPILE_CASES
from lightscale.kernels.relation.triton.gradients import key_gradients, query_gradients, shares
from lightscale.kernels.relation.triton.kernels import center, deviations, sums
from lightscale.kernels.relation.triton.tiling import Band, bands

__all__ = ["COMPILE_CASES", "triton_relation"]


def _centered(x: Tensor, dtype: torch.dtype, *, with_variance: bool) -> tuple[Tensor, Tensor | None]:
    """x (B, T, D) less the mean of its channels, and their variance (B, T)."""
    x, (B, T, D) = dense_last(x), x.shape
    out = x.new_empty(B, T, D, dtype=dtype)
    variance = x.new_empty(B, T, dtype=torch.float32) if with_variance else None
    block_t, block_d = tiling.CENTER_BLOCK_T, power_of_two(D, most=tiling.MOST_CENTER_BLOCK_D)
    given = x, out, variance, B * T, T, D, *x.stride()[:2]
    center[(triton.cdiv(B * T, block_t),)](*given, BLOCK_T=block_t, BLOCK_D=block_d, **LAUNCH)
    return out, variance


class _Pairs(NamedTuple):
    """Both sides, centered if there is a norm, and the ranges on their device."""

    a: Tensor
    b: Tensor
    variance_a: Tensor | None
    variance_b: Tensor | None
    edges: Tensor  # (2, B, T) int32
    eps: float

    @staticmethod
    def of(a: Tensor, b: Tensor, first: Tensor, end: Tensor, *, norm: bool, eps: float) -> "_Pairs":
        edges = to_device(torch.stack([first, end]).int(), a.device)
        if not norm:
            return _Pairs(dense_last(a), dense_last(b), None, None, edges, eps)
        (a, variance_a), (b, variance_b) = (_centered(x, torch.float32, with_variance=True) for x in (a, b))
        return _Pairs(a, b, variance_a, variance_b, edges, eps)

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.a.stride()[:2], *self.b.stride()[:2]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, T, S, D."""
        return *self.a.shape[:2], self.b.shape[1], self.a.shape[2]

    def deviations(self, band: Band) -> Tensor | None:
        """r (B, keys, queries) of a band's pairs inside the ranges; None without a norm."""
        if self.variance_a is None:
            return None
        B, T, S, D = self.sizes
        r = self.a.new_empty(B, band.num_keys, band.num_queries, dtype=torch.float32)
        block_k = tiling.PRODUCT_BLOCK
        block_q = power_of_two(band.num_queries, most=block_k)
        grid = B, triton.cdiv(band.num_keys, block_k), triton.cdiv(band.num_queries, block_q)
        given = self.a, self.b, self.variance_a, self.variance_b, *self.edges, r
        blocks = {"BLOCK_Q": block_q, "BLOCK_K": block_k, "BLOCK_D": tiling.PRODUCT_BLOCK_D}
        deviations[grid](*given, T, S, D, *band, self.eps, **blocks, **LAUNCH)
        return r

    def shares(self, do: Tensor, r: Tensor, band: Band, activation: str) -> Tensor:
        """w (B, keys, queries) of a band's pairs."""
        B, T, S, D = self.sizes
        w = torch.empty_like(r)
        block_q, block_k = tiling.SHARE_BLOCK_Q, tiling.SHARE_BLOCK_K
        grid = B, triton.cdiv(band.num_keys, block_k), triton.cdiv(band.num_queries, block_q)
        blocks = {"BLOCK_Q": block_q, "BLOCK_K": block_k, "BLOCK_D": tiling.SHARE_BLOCK_D}
        given = self.a, self.b, do, r, *self.edges, w, T, S, D, *band, *do.stride()[:2], activation
        shares[grid](*given, **blocks, **LAUNCH)
        return w


@torch.library.custom_op("lightscale::relation_fwd", mutates_args=())
def _fwd(a: Tensor, b: Tensor, first: Tensor, end: Tensor, activation: str, norm: bool, eps: float) -> Tensor:
    o = a.new_zeros(a.shape, dtype=torch.float32)
    if not o.numel():
        return o
    with on_device_of(a):
        pairs = _Pairs.of(a, b, first, end, norm=norm, eps=eps)
        B, T, _, D = pairs.sizes
        for band in bands(first, end):
            r, block_q = pairs.deviations(band), power_of_two(band.num_queries, most=tiling.BLOCK)
            grid = B, triton.cdiv(band.num_queries, block_q), triton.cdiv(D, tiling.BLOCK_D)
            given = pairs.a, pairs.b, r, *pairs.edges, o, T, D, *band, *pairs.strides, activation
            sums[grid](*given, **_blocks(block_q), **LAUNCH)
    return o


@_fwd.register_fake
def _(a: Tensor, *_: Any) -> Tensor:
    return a.new_empty(a.shape, dtype=torch.float32)


@torch.library.custom_op("lightscale::relation_bwd", mutates_args=())
def _bwd(
    a: Tensor, b: Tensor, do: Tensor, first: Tensor, end: Tensor, activation: str, norm: bool, eps: float
) -> tuple[Tensor, Tensor]:
    da, db = (x.new_zeros(x.shape, dtype=torch.float32) for x in (a, b))
    if da.numel():
        with on_device_of(a):
            pairs, do = _Pairs.of(a, b, first, end, norm=norm, eps=eps), dense_last(do)
            for band in bands(first, end):
                _add_gradients(pairs, do, band, activation, da, db)
            if norm:
                da, db = (
                    _centered(x, like.dtype, with_variance=False)[0] if x.numel() else x
                    for x, like in ((da, a), (db, b))
                )
    return da.to(a.dtype), db.to(b.dtype)


def _add_gradients(pairs: _Pairs, do: Tensor, band: Band, activation: str, da: Tensor, db: Tensor) -> None:
    """Add a band's terms to both gradients."""
    (B, T, S, D), block_q = pairs.sizes, power_of_two(band.num_queries, most=tiling.BLOCK)
    r = pairs.deviations(band)
    w = None if r is None else pairs.shares(do, r, band, activation)
    given = pairs.a, pairs.b, do, r, w, *pairs.edges
    rest = *band, *pairs.strides, *do.stride()[:2], activation
    blocks, channels = _blocks(block_q), triton.cdiv(D, tiling.BLOCK_D)
    query_gradients[(B * triton.cdiv(band.num_queries, block_q), channels)](*given, da, T, D, *rest, **blocks, **LAUNCH)
    grid = B, triton.cdiv(band.num_keys, tiling.BLOCK), channels
    key_gradients[grid](*given, db, T, S, D, *rest, **blocks, **LAUNCH)


def _blocks(block_q: int) -> dict[str, int]:
    """Extents of the kernels that sum pairs."""
    return {"BLOCK_Q": block_q, "BLOCK_K": tiling.BLOCK, "BLOCK_D": tiling.BLOCK_D, "UNROLL": tiling.UNROLL}


@_bwd.register_fake
def _(a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), b.new_empty(b.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, activation, norm, eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.form = Form(activation, norm, eps)


def _backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    a, b, first, end = ctx.saved_tensors
    return *_bwd(a, b, do, first, end, *ctx.form), None, None, None, None, None


_fwd.register_autograd(_backward, setup_context=_save)


def triton_relation(a: Tensor, b: Tensor, first: Tensor, end: Tensor, form: Form) -> Tensor:
    """The operator o (B, T, D) of ``relation``, differentiable in a and b."""
    o: Tensor = _fwd(a, b, first, end, *form)
    return o
