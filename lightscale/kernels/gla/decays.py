"""Decays between the tokens of a chunk, per key channel, in forms whose exponents are safe.

With g_i the sum of a chunk's log decays through token i, the decay from token j to token i > j is
exp(g_i - g_j). Names of shapes: G chunks, B rows, H heads, L tokens of a chunk, K key width, V value width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightscale.kernels.common.states import state_dtype

# A chunk is "steep" if its log decays sum to less than this in some channel: exp(g_i) / exp(g_j) could overflow in
# fp32, or lose small keys.
STEEP_LOG_DECAY = -60.0

# Its exp is 0 in fp32 and fp64. It replaces -inf, which would turn 0 · log f in a sum into NaN.
LOG_ZERO = -1e4


class Sums(NamedTuple):
    """0/1 matrices that sum the log decays of a chunk; the terms of a sum have one sign and do not cancel."""

    upto: Tensor  # (L, L): over the tokens from the chunk's start through i
    after: Tensor  # (L, L): over the tokens behind j, to the chunk's end
    halves: Tensor  # (levels, L, L): sums inside halves of 1, 2, 4, … tokens, see `Steep`
    pairs: Tensor  # (levels, L, L): the pairs (i, j) of each level


def chunk_sums(num_tokens: int, like: Tensor) -> Sums:
    """The sums of chunks of ``num_tokens``, in the arithmetic's dtype and on the device of ``like``."""
    index = torch.arange(num_tokens, device=like.device)
    upto, after = index[:, None] >= index, index[:, None] < index
    levels = torch.arange((num_tokens - 1).bit_length(), device=like.device)
    half = index // 2 ** levels[:, None]
    second = (half % 2 == 1)[:, :, None]
    same = half[:, :, None] == half[:, None, :]
    halves = same & torch.where(second, upto, after)
    pairs = second & (half[:, :, None] == half[:, None, :] + 1)
    dtype = state_dtype(like.dtype)
    return Sums(upto.to(dtype), after.to(dtype), halves.to(dtype), pairs)


@dataclass(frozen=True, kw_only=True)
class Steep:
    """The steep chunks of a batch, M of its G·B·H. Decays between tokens come from halves of the chunk.

    The tokens of a pair j < i are in two neighbouring halves, of 1, 2, 4, … tokens, at exactly one level. Their decay
    is decays[i] · decays[j]: from the border of the halves through i, and from behind j to the border. Both factors are
    at most 1, and no sums are subtracted.
    """

    chunks: Tensor  # (M,) of range(G·B·H)
    decays: Tensor  # (M, levels, L, K)
    pairs: Tensor  # (levels, L, L)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Causal scores (M, L, L) of the steep chunks; q and k (G, B, H, L, K) are the whole batch's."""
        q, k = self._of(q), self._of(k)
        by_level = (q[:, None] * self.decays) @ (k[:, None] * self.decays).mT
        return by_level.masked_fill_(~self.pairs, 0.0).sum(1) + torch.diag_embed((q * k).sum(-1))

    def query_gradient(self, dscores: Tensor, k: Tensor) -> Tensor:
        """dq (M, L, K) of the steep chunks, from the part of dscores (G, B, H, L, L) below the diagonal."""
        return (self._by_level(dscores) @ (self._of(k)[:, None] * self.decays)).mul_(self.decays).sum(1)

    def key_gradient(self, dscores: Tensor, q: Tensor) -> Tensor:
        """dk in the shape of dq, from the same dscores."""
        return (self._by_level(dscores).mT @ (self._of(q)[:, None] * self.decays)).mul_(self.decays).sum(1)

    def _by_level(self, dscores: Tensor) -> Tensor:
        return self._of(dscores)[:, None].masked_fill(~self.pairs, 0.0)

    def _of(self, x: Tensor) -> Tensor:
        return x.flatten(0, 2)[self.chunks]


@dataclass(frozen=True, kw_only=True)
class GLADecays:
    """The decays inside a batch's chunks; none is above 1."""

    upto: Tensor  # (G, B, H, L, K): from the chunk's start through token i
    after: Tensor  # (G, B, H, L, K): behind token j, to the chunk's end
    through: Tensor  # (G, B, H, K, 1): through the whole chunk
    steep: Steep | None  # None if no chunk is steep

    @classmethod
    def of(cls, logs: Tensor, sums: Sums) -> "GLADecays":
        """Decays from finite log decays (G, B, H, L, K). On a GPU the test for steep chunks waits for the device."""
        upto, after = sums.upto @ logs, sums.after @ logs
        total = upto[..., -1, :].clone()
        is_steep = total.amin(-1).flatten() < STEEP_LOG_DECAY
        steep = None
        if is_steep.any():
            chunks = is_steep.nonzero().squeeze(1)
            by_level = (sums.halves @ logs.flatten(0, 2)[chunks, None]).exp_()
            steep = Steep(chunks=chunks, decays=by_level, pairs=sums.pairs)
        return cls(upto=upto.exp_(), after=after.exp_(), through=total.exp_().unsqueeze(-1), steep=steep)

    def scores(self, q: Tensor, k: Tensor, q_in: Tensor, k_back: Tensor) -> Tensor:
        """q_i · (decay from j to i) · k_j (G, B, H, L, L) for j ≤ i; elements above the diagonal have no meaning.

        The arguments are q and k, q_in = q ⊙ upto and k_back = k / upto.
        """
        scores = q_in @ k_back.mT
        if self.steep is not None:
            scores.flatten(0, 2)[self.steep.chunks] = self.steep.scores(q, k)
        return scores

    def query_gradient(self, dscores: Tensor, k: Tensor, k_back: Tensor) -> Tensor:
        """dq (G, B, H, L, K) from dscores, which is 0 on and above the diagonal."""
        dq = (dscores @ k_back).mul_(self.upto)
        if self.steep is not None:
            dq.flatten(0, 2)[self.steep.chunks] = self.steep.query_gradient(dscores, k)
        return dq

    def key_gradient(self, dscores: Tensor, q: Tensor, q_in: Tensor) -> Tensor:
        """dk in the shape of dq, from the same dscores."""
        dk = (dscores.mT @ q_in).div_(self.upto)
        if self.steep is not None:
            dk.flatten(0, 2)[self.steep.chunks] = self.steep.key_gradient(dscores, q)
        return dk
