"""The chunks of lightning attention's rows, in batches: powers of the decay, masks of documents, and products.

Names of shapes: B rows, T tokens, H heads, K key width, V value width, F width of the features: 2K with angles, else K.
A row is cut into chunks of C tokens, the last one shorter; L is the number of tokens of the current chunk. G
neighbours, a chunk batch, are computed at once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, Phases, features, features_bwd, phases_of
from lightscale.kernels.common.chunks import ChunkMasks, Chunks, cut_rows, pass_on
from lightscale.kernels.common.documents import numbers_or_none
from lightscale.kernels.common.states import state_dtype

# Elements of one operand of a chunk batch: 0.5 MiB in fp32, so that the operands stay in the second-level cache
# (docs/reference/operators/lightning.md, "What was tried").
_BATCH_ELEMENTS = 2**17


class LightningDecays:
    """Powers of λ by integer distance, computed in fp64 and rounded once; no exponent is above 0."""

    def __init__(self, log_decay: Tensor | None, *, num_heads: int, chunk_size: int, like: Tensor) -> None:
        self.dtype = state_dtype(like.dtype)
        self.log_decay = torch.zeros(num_heads, device=like.device) if log_decay is None else log_decay.detach()
        distance = torch.arange(chunk_size + 1, device=like.device)
        self.powers = self.power(distance)  # (H, C+1)
        pairs = distance[:-1, None] - distance[None, :-1]
        self.pairs = self.power(pairs.clamp(min=0)).tril_()  # (H, C, C): λ^(i-j) for i ≥ j, else 0

    def power(self, steps: Tensor) -> Tensor:
        """λ^steps, shape (H, *steps.shape); also correct for λ = 0, where 0 · (-inf) would be NaN."""
        log_decay = self.log_decay.double().view(-1, *[1] * steps.dim())
        return torch.where(steps > 0, steps * log_decay, 0.0).exp().to(self.dtype)

    def of_queries(self, num_tokens: int) -> Tensor:
        """(H, L, 1): λ^(i+1), the decay of the state that enters a chunk up to its i-th token."""
        return self.powers[:, 1 : num_tokens + 1, None]

    def of_keys(self, num_tokens: int) -> Tensor:
        """(H, L, 1): λ^(L-1-i), the decay from the i-th token's k vᵀ to the chunk's end."""
        return self.powers[:, :num_tokens].flip(1)[:, :, None]

    def through(self, num_tokens: int) -> Tensor:
        """(H, 1, 1): λ^L, the decay through a chunk."""
        return self.powers[:, num_tokens, None, None]


@dataclass(frozen=True, kw_only=True)
class LightningChunkBatch(Chunks):
    """Neighbouring chunks of equal length of every row, and the operations on them.

    Tensors of a batch are (B, G, H, L, width), contiguous. Resets select instead of multiplying by zero: a state that
    overflowed in one document gives no NaN in the next.
    """

    decays: LightningDecays
    masks: ChunkMasks | None

    def load(self, x: Tensor, phases: Phases | None = None) -> Tensor:
        """A copy (never a view) of this batch's tokens of x (B, T, H, width), or of their features, in its dtype."""
        if phases is None:
            return self.copied(x, self.decays.dtype)
        return features(self.tokens(x).to(self.decays.dtype), phases).transpose(2, 3).contiguous()

    def phases(self, angles: Angles | None) -> Phases | None:
        """The phases of this batch's tokens, (B, G, L, H, K) each."""
        if angles is None:
            return None
        return phases_of(Angles(angles.theta.detach(), self.tokens(angles.positions)), self.decays.dtype)

    def narrow(
        self, x: Tensor, dx: Tensor, angles: Angles | None, phases: Phases | None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of this batch's x and of theta, from the gradients (B, G, H, L, F) of its features."""
        if angles is None or phases is None:
            return dx, None
        here = Angles(angles.theta, self.tokens(angles.positions))
        of_x, dtheta = features_bwd(self.tokens(x).to(dx.dtype), dx.transpose(2, 3), here, phases)
        return of_x.transpose(2, 3), dtheta

    def causal_(self, scores: Tensor) -> Tensor:
        """Decay scores (B, G, H, L, L) in place; 0 for pairs of later tokens or of other documents."""
        scores.mul_(self.decays.pairs[:, : self.chunk_tokens, : self.chunk_tokens])
        return scores if self.masks is None else scores.masked_fill_(~self.masks.pairs, 0.0)

    def weigh_incoming_(self, x: Tensor) -> Tensor:
        """Multiply rows of queries, or of their outputs' cotangents (B, G, H, L, width), by the state's decay."""
        x.mul_(self.decays.of_queries(self.chunk_tokens))
        return x if self.masks is None else x.masked_fill_(~self.masks.incoming, 0.0)

    def weigh_outgoing_(self, x: Tensor) -> Tensor:
        """Multiply rows of keys or values (B, G, H, L, width) by their decay in the outgoing state."""
        x.mul_(self.decays.of_keys(self.chunk_tokens))
        return x if self.masks is None else x.masked_fill_(~self.masks.outgoing, 0.0)

    def add_incoming_(self, out: Tensor, x: Tensor, state: Tensor) -> None:
        """out += x (B, G, H, L, width) @ state, for rows weighted by ``weigh_incoming_``."""
        _add_product_(out, x, state, None if self.masks is None else self.masks.incoming)

    def add_outgoing_(self, out: Tensor, x: Tensor, state: Tensor) -> None:
        """out += x (B, G, H, L, width) @ state, for rows weighted by ``weigh_outgoing_``."""
        _add_product_(out, x, state, None if self.masks is None else self.masks.outgoing)

    def scan_(self, shares: Tensor, running: Tensor, order: Iterable[int]) -> Tensor:
        """Pass a state through the chunks in ``order``.

        The call overwrites each chunk's share in ``shares`` (B, G, H, F, V). Forward it writes the state that enters
        the chunk, in reverse the cotangent of the state that leaves it. Returns the state behind the last chunk in
        ``order``.
        """
        decay = self.decays.through(self.chunk_tokens)
        for chunk in order:
            through = None if self.masks is None else self.masks.through[:, chunk]
            running = pass_on(running, shares[:, chunk], decay, through)
        return running

    def scan_states(self, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The state (B, G, H, F, V) that enters each chunk, and the one that leaves the last. Overwrites k."""
        states = self.weigh_outgoing_(k).mT @ v
        return states, self.scan_(states, state, range(self.num_chunks))

    def states_between(self, k_out: Tensor, v: Tensor, state: Tensor) -> Tensor:
        """The state (B, G, H, F, V) that enters each chunk, from keys of ``weigh_outgoing_``; none that leaves."""
        if self.num_chunks == 1:
            return state.unsqueeze(1)
        states = k_out.mT @ v
        self.scan_(states, state, range(self.num_chunks))
        return states

    def decay_gradient_of_pairs(self, products: Tensor) -> Tensor:
        """The part (H,) of dlog_decay, fp64, by the pairs of the batch's chunks.

        ``products`` (B, G, H, L, L) is a pair's decayed score times its cotangent do_i · v_j.
        """
        token = torch.arange(self.chunk_tokens, device=products.device)
        distance = token[:, None] - token
        return torch.einsum("hij,ij->h", products.sum((0, 1)).double(), distance.double())

    def decay_gradient_of_states(self, reads: Tensor, writes: Tensor, states: Tensor, dstates: Tensor) -> Tensor:
        """The part (H,) of dlog_decay, fp64, by the states that enter and leave the chunks.

        reads (B, G, H, L, F) are q ⊙ dq by the entering states, writes k ⊙ dk by the leaving states. The states (B, G,
        H, F, V) enter the chunks; dstates are the cotangents of the leaving ones.
        """
        passing = (states * dstates).sum((-2, -1), keepdim=True).mul_(self.decays.through(self.chunk_tokens))
        if self.masks is not None:
            passing.masked_fill_(~self.masks.through, 0.0)
        # Number of the chunk's decays on a read, on a write and on the passing state: sums of positive counts.
        upto = torch.arange(1.0, self.chunk_tokens + 1, dtype=torch.float64, device=reads.device)
        by_token = reads.sum((0, 1, 4)).double() @ upto + writes.sum((0, 1, 4)).double() @ (upto - 1).flip(0)
        return by_token + self.chunk_tokens * passing.double().sum((0, 1, 3, 4))


def _add_product_(out: Tensor, x: Tensor, state: Tensor, kept: Tensor | None) -> None:
    if kept is None:
        out.flatten(0, 2).baddbmm_(x.flatten(0, 2), state.flatten(0, 2))
    else:
        out.add_((x @ state).masked_fill_(~kept, 0.0))


def chunk_batches(
    v: Tensor, width: int, decays: LightningDecays, cu_seqlens: Tensor | None, chunk_size: int
) -> Iterator[LightningChunkBatch]:
    """Cut the rows of v (B, T, H, V), and of features of ``width``, into batches of whole chunks.

    The rest of T / C is one shorter chunk.
    """
    num_rows, num_tokens, num_heads, value_width = v.shape
    batch_chunks = max(1, _BATCH_ELEMENTS // (num_rows * num_heads * chunk_size * max(width, value_width)))
    documents = numbers_or_none(cu_seqlens, v)
    for cut in cut_rows(num_tokens, chunk_size, batch_chunks):
        yield LightningChunkBatch(**vars(cut), decays=decays, masks=cut.masks_by(documents))
