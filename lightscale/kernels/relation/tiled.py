"""Relations of all pairs in tiles of tokens by tokens, and the gradients by hand: memory linear in T.

With ã and b̃, a and b less the means of their channels, LN(a_i + b_j) = (ã_i + b̃_j) r_ij, and

    1 / r_ij² = var a_i + var b_j + 2 ã_i·b̃_j / D + ε

so that the statistics of a tile take one product. The gradients, from recomputed s_ij = LN(a_i + b_j), are

    ds_ij = ψ'(s_ij) ⊙ do_i    dc_ij = r_ij (ds_ij - s_ij mean(ds_ij ⊙ s_ij))    dã_i = Σ_j dc_ij    db̃_j = Σ_i dc_ij

Only tiles that some range covers are computed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.attention import to_device
from lightscale.kernels.common.states import state_dtype, without_autocast
from lightscale.kernels.relation.activations import activation_of

TILE_ELEMENTS = 2**20
"""Most elements of a tile, over all rows and channels, on a CPU: its caches hold a few copies of a tile."""
_ON_GPU = 4
"""Factor of the elements on a GPU, where every tile takes some launches."""
_MOST_TOKENS, _LEAST_TOKENS = 64, 4


class Form(NamedTuple):
    """Function of each pair; see ``relation``."""

    activation: str
    norm: bool
    eps: float


class _Tile(NamedTuple):
    queries: slice
    keys: slice
    seen: Tensor
    """(B, q, k) of the dtype of the sums, 1 where a token is read."""


def _tiles(first: Tensor, end: Tensor, like: Tensor, num_keys: int) -> Iterator[_Tile]:
    """Tiles of the ranges (B, T) on the host, for inputs ``like`` (B, T, D)."""
    rows, num_queries, width = like.shape
    if not like.numel():
        return
    size, most = _MOST_TOKENS, TILE_ELEMENTS * (1 if like.device.type == "cpu" else _ON_GPU)
    while size > _LEAST_TOKENS and rows * size * size * width > most:
        size //= 2
    # A few queries, as in generation, read many keys at once.
    at_once = size if num_queries >= size else max(size, most // (rows * width * max(1, num_queries)))
    on_device = to_device(first, like.device), to_device(end, like.device)
    number = torch.arange(num_keys, device=like.device)
    for q in range(0, num_queries, size):
        queries = slice(q, min(q + size, num_queries))
        low, high = int(first[:, queries].min()), int(end[:, queries].max())
        for k in range(low, high, at_once):
            keys = slice(k, min(k + at_once, high))
            of_queries = [x[:, queries, None] for x in on_device]
            seen = (number[keys] >= of_queries[0]) & (number[keys] < of_queries[1])
            yield _Tile(queries, keys, seen.to(like.dtype))


def _centered(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, T, D) less the mean of its channels, and their variance (B, T)."""
    found = x - x.mean(-1, keepdim=True)
    return found, (found * found).mean(-1)


class _Sides(NamedTuple):
    """Inputs of the pairs: both sides in the dtype of the sums, centered if there is a norm, and their variances."""

    a: Tensor
    b: Tensor
    variance_a: Tensor | None
    variance_b: Tensor | None

    @staticmethod
    def of(a: Tensor, b: Tensor, form: Form) -> "_Sides":
        dtype = state_dtype(a.dtype)
        a, b = a.to(dtype), b.to(dtype)
        if not form.norm:
            return _Sides(a, b, None, None)
        (a, variance_a), (b, variance_b) = _centered(a), _centered(b)
        return _Sides(a, b, variance_a, variance_b)

    def pairs(self, tile: _Tile, eps: float) -> tuple[Tensor, Tensor | None]:
        """s (B, q, k, D) of a tile, and r (B, q, k) if there is a norm."""
        a, b = self.a[:, tile.queries], self.b[:, tile.keys]
        s = a[:, :, None] + b[:, None]
        if self.variance_a is None or self.variance_b is None:
            return s, None
        variance = torch.baddbmm(
            self.variance_a[:, tile.queries, None] + self.variance_b[:, None, tile.keys], a, b.mT, alpha=2 / a.shape[2]
        )
        # Where b_j is almost -a_i, rounding could make it negative.
        r = variance.clamp_min_(0.0).add_(eps).rsqrt_()
        return s.mul_(r[..., None]), r


@without_autocast
def relation_fwd(a: Tensor, b: Tensor, first: Tensor, end: Tensor, form: Form) -> Tensor:
    """The sums (B, T, D), fp32 (fp64 for fp64 inputs), of a (B, T, D) and b (B, S, D); see ``relation``."""
    activation, sides = activation_of(form.activation), _Sides.of(a, b, form)
    o = torch.zeros_like(sides.a)
    for tile in _tiles(first, end, sides.a, b.shape[1]):
        s, _ = sides.pairs(tile, form.eps)
        # A pair outside the ranges may overflow without a norm: 0 · ∞ is NaN.
        found = (
            activation.in_place(s) if form.norm else activation.in_place(s).masked_fill_((tile.seen == 0)[..., None], 0)
        )
        o[:, tile.queries] += (tile.seen[:, :, None] @ found)[:, :, 0]
    return o


@without_autocast
def relation_bwd(a: Tensor, b: Tensor, do: Tensor, first: Tensor, end: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """The gradients of a (B, T, D) and b (B, S, D) from the cotangent do (B, T, D)."""
    activation, sides = activation_of(form.activation), _Sides.of(a, b, form)
    da, db = torch.zeros_like(sides.a), torch.zeros_like(sides.b)
    do = do.to(da.dtype)
    for tile in _tiles(first, end, sides.a, b.shape[1]):
        s, r = sides.pairs(tile, form.eps)
        ds = activation.slope(s).mul_(do[:, tile.queries, None])
        weight = tile.seen
        if r is None:
            ds.masked_fill_((tile.seen == 0)[..., None], 0)
        else:
            shared = torch.einsum("bqkd,bqkd->bqk", ds, s) / s.shape[-1]
            ds.sub_(s.mul_(shared[..., None]))
            weight = weight * r
        da[:, tile.queries] += (weight[:, :, None] @ ds)[:, :, 0]
        db[:, tile.keys] += torch.einsum("bqk,bqkd->bkd", weight, ds)
    if form.norm:
        da, db = (x - x.mean(-1, keepdim=True) for x in (da, db))
    return da.to(a.dtype), db.to(b.dtype)


class TiledRelation(torch.autograd.Function):
    """The operator with its gradients; saves the inputs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, first: Tensor, end: Tensor, form: Form) -> Tensor:
        """See ``relation``."""
        ctx.save_for_backward(a, b, first, end)
        ctx.form = form
        return relation_fwd(a, b, first, end, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of a and b."""
        a, b, first, end = ctx.saved_tensors
        return *relation_bwd(a, b, do, first, end, ctx.form), None, None, None
