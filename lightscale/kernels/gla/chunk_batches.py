"""The chunks of gated linear attention's rows, in batches: loads, masks of documents, and states.

Names of shapes: B rows, T tokens, H heads, K key width, V value width. A row is cut into chunks of C tokens, the last
one shorter; L is the number of tokens of the current chunk. G neighbours, a chunk batch, are computed at once.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightscale.kernels.common.chunks import Chunks, cut_rows
from lightscale.kernels.common.documents import numbers_or_none
from lightscale.kernels.gla.decays import LOG_ZERO, GLADecays, Sums, chunk_sums

# Elements of one operand of a chunk batch: 0.25 MiB in fp32. The states of the batch, K / C times as large, must stay
# in the cache too (docs/reference/operators/gla.md, "What was tried").
_BATCH_ELEMENTS = 2**16

# A batch has at least this many tokens of each row, because the backward keeps one state per batch.
_BATCH_TOKENS = 128


class GLAMasks(NamedTuple):
    """Masks of the tokens of one document in a chunk batch, for batches in which a document begins."""

    begins: Tensor  # (G, B, 1, L, 1): a document begins at the token
    incoming: Tensor  # (G, B, 1, L, 1): the token continues the document of the state that enters its chunk
    outgoing: Tensor  # (G, B, 1, L, 1): the token belongs to the document of the state that leaves its chunk
    through: Tensor  # (G, B, 1, 1, 1): one document goes through the whole chunk
    pairs: Tensor  # (G, B, 1, L, L): both tokens belong to one document
    first: Tensor  # (B, 1, G·L, 1): the token continues the document of the state that enters the batch
    last: Tensor  # (B, 1, G·L, 1): the token belongs to the document of the state that leaves the batch


@dataclass(frozen=True, kw_only=True)
class GLAChunkBatch(Chunks):
    """Neighbouring chunks of equal length of every row, and the operations on them.

    Tensors of a batch are (G, B, H, L, width), contiguous. Resets select instead of multiplying by zero: a state that
    overflowed in one document gives no NaN in the next.
    """

    sums: Sums
    masks: GLAMasks | None

    def load(self, x: Tensor) -> Tensor:
        """A copy (never a view) of this batch's tokens of x (B, T, H, width), in the arithmetic's dtype."""
        # Chunks first: states pass from chunk to chunk, and each state must be contiguous.
        return self._copy(self.tokens(x).permute(1, 0, 3, 2, 4))

    def store(self, out: Tensor, x: Tensor) -> None:
        """Write x into this batch's tokens of out (B, T, H, width)."""
        self.tokens(out).permute(1, 0, 3, 2, 4).copy_(x)

    def _load_rows(self, x: Tensor) -> Tensor:
        """``load`` in the order (B, H, G, L, width), in which the tokens of a row stay together."""
        return self._copy(self.tokens(x).permute(0, 3, 1, 2, 4))

    def _copy(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=self.sums.upto.dtype, device=x.device).copy_(x)

    def decays(self, log_decay: Tensor) -> GLADecays:
        """The decays of this batch's tokens, from log_decay (B, T, H, K)."""
        return GLADecays.of(self.load(log_decay).clamp_(min=LOG_ZERO), self.sums)

    def causal_(self, scores: Tensor, diagonal: int = 0) -> Tensor:
        """Clear scores (G, B, H, L, L) of later tokens and of other documents, in place."""
        scores.tril_(diagonal)
        return scores if self.masks is None else scores.masked_fill_(~self.masks.pairs, 0.0)

    def incoming_(self, x: Tensor) -> Tensor:
        """Zero the rows of x (G, B, H, L, width) that do not read the state that enters their chunk, in place."""
        return x if self.masks is None else x.masked_fill_(~self.masks.incoming, 0.0)

    def outgoing_(self, x: Tensor) -> Tensor:
        """Zero the rows of x (G, B, H, L, width) that have no part in the state that leaves their chunk, in place."""
        return x if self.masks is None else x.masked_fill_(~self.masks.outgoing, 0.0)

    def scan(self, k_out: Tensor, v: Tensor, through: Tensor, state: Tensor) -> Tensor:
        """States (G+1, B, H, K, V), from the entering state: chunk c turns state c into state c+1.

        The keys are decayed to their chunk's end and cleared by ``outgoing_``.
        """
        states = state.new_empty(self.num_chunks + 1, *state.shape)
        states[0] = state
        torch.bmm(k_out.flatten(0, 2).mT, v.flatten(0, 2), out=states[1:].flatten(0, 2))
        before, *behind = states.unbind(0)
        for chunk, (state_behind, decay) in enumerate(zip(behind, through.unbind(0), strict=True)):
            self._add_passed_(state_behind, before, decay, chunk)
            before = state_behind
        return states

    def scan_back(self, q_in: Tensor, do: Tensor, through: Tensor, dstate: Tensor) -> Tensor:
        """Cotangents (G+1, B, H, K, V) of the states of ``scan``, from the cotangent of the batch's leaving state.

        The queries are decayed from their chunk's start and cleared by ``incoming_``.
        """
        dstates = dstate.new_empty(self.num_chunks + 1, *dstate.shape)
        dstates[-1] = dstate
        torch.bmm(q_in.flatten(0, 2).mT, do.flatten(0, 2), out=dstates[:-1].flatten(0, 2))
        *before, behind = dstates.unbind(0)
        for chunk, (dstate_before, decay) in reversed([*enumerate(zip(before, through.unbind(0), strict=True))]):
            self._add_passed_(dstate_before, behind, decay, chunk)
            behind = dstate_before
        return dstates

    def _add_passed_(self, share: Tensor, running: Tensor, decay: Tensor, chunk: int) -> None:
        if self.masks is None:
            share.addcmul_(running, decay)
        else:
            share.add_((running * decay).masked_fill_(~self.masks.through[chunk], 0.0))

    def decay_gradient(
        self, inside: Tensor, leaving: Tensor, through: Tensor, states: Tensor, dstates: Tensor
    ) -> Tensor:
        """dlog_decay (G, B, H, L, K) of the batch's tokens; overwrites ``inside``.

        Args:
            inside: (G, B, H, L, K), q ⊙ dq - k ⊙ dk without the part of dk in ``leaving``.
            leaving: k ⊙ dk by the states that leave the chunks.
            through: the decays through the chunks (G, B, H, K, 1).
            states: the states that enter the chunks (G, B, H, K, V).
            dstates: the cotangents of the states that leave the chunks (G, B, H, K, V).
        """
        # All decays of the chunk act on the part through the whole chunk.
        passing = (states * dstates).sum(-1, keepdim=True).mul_(through).mT
        earlier = self.outgoing_(self.sums.after.mT @ leaving)
        if self.masks is None:
            return (self.sums.upto.mT @ inside).add_(passing).add_(earlier)
        # Not a product with zeros: another document's tokens may be Inf.
        for t in range(self.chunk_tokens - 2, -1, -1):
            inside[..., t, :] += inside[..., t + 1, :].masked_fill(self.masks.begins[..., t + 1, :], 0.0)
        inside.add_(passing.masked_fill_(~self.masks.through, 0.0)).add_(earlier)
        return inside.masked_fill_(self.masks.begins, 0.0)

    def leave(self, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
        """The state that leaves the batch when ``state`` (B, H, K, V) enters it, without the states between chunks.

        k, v and log_decay are whole rows (B, T, H, width).
        """
        logs = self._load_rows(log_decay).clamp_(min=LOG_ZERO)
        sums = self.sums.after @ logs
        later = logs.sum(-2).flip(2).cumsum(2).flip(2)  # over each chunk and those behind it, (B, H, G, K)
        sums[:, :, :-1] += later[:, :, 1:, None]
        return self._pass_on(sums.exp_(), later[:, :, 0], k, v, state, to_end=True)

    def leave_back(self, q: Tensor, do: Tensor, log_decay: Tensor, dstate: Tensor) -> Tensor:
        """The cotangent of the state that enters the batch, from the cotangent ``dstate`` of the state that leaves it.

        q, do and log_decay are whole rows (B, T, H, width).
        """
        logs = self._load_rows(log_decay).clamp_(min=LOG_ZERO)
        sums = self.sums.upto @ logs
        earlier = logs.sum(-2).cumsum(2)  # over each chunk and those before it, (B, H, G, K)
        sums[:, :, 1:] += earlier[:, :, :-1, None]
        return self._pass_on(sums.exp_(), earlier[:, :, -1], q, do, dstate, to_end=False)

    def _pass_on(self, decays: Tensor, total: Tensor, x: Tensor, y: Tensor, running: Tensor, *, to_end: bool) -> Tensor:
        """Σ_t decay_t x_t y_tᵀ over the kept tokens, plus the state that one document passes through the batch."""
        x = decays.mul_(self._load_rows(x)).flatten(2, 3)
        y = self._load_rows(y).flatten(2, 3)
        # One decay from each token to the border of the batch: a sum of terms of one sign for any number of terms.
        through = total.exp().unsqueeze(-1)
        if self.masks is None:
            return torch.addcmul(x.mT @ y, running, through)
        kept = self.masks.last if to_end else self.masks.first
        one_document = self.masks.first[:, :, -1:]
        return x.masked_fill_(~kept, 0.0).mT @ y + (running * through).masked_fill_(~one_document, 0.0)


def chunk_batches(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> list[GLAChunkBatch]:
    """Cut the rows of q (B, T, H, K) and v (B, T, H, V) into batches of whole chunks, and one shorter chunk."""
    num_rows, num_tokens, num_heads, key_width = q.shape
    chunk_elements = num_rows * num_heads * chunk_size * max(key_width, v.shape[3])
    batch_chunks = max(-(-_BATCH_TOKENS // chunk_size), _BATCH_ELEMENTS // max(1, chunk_elements))
    documents = numbers_or_none(cu_seqlens, q)
    sums = chunk_sums(chunk_size, q)
    return [
        GLAChunkBatch(
            **vars(cut),
            sums=sums if cut.chunk_tokens == chunk_size else chunk_sums(cut.chunk_tokens, q),
            masks=_masks(cut, documents),
        )
        for cut in cut_rows(num_tokens, chunk_size, batch_chunks)
    ]


def _masks(cut: Chunks, documents: Tensor | None) -> GLAMasks | None:
    """The masks of a batch, or None when no document begins in it."""
    found = cut.masks_by(documents)
    if documents is None or found is None:
        return None
    here = documents.narrow(1, cut.start, cut.num_chunks * cut.chunk_tokens)
    before = documents[:, cut.start - 1, None] if cut.start else torch.zeros_like(documents[:, :1])
    begins = (here.diff(dim=1, prepend=before) > 0).unflatten(1, (cut.num_chunks, cut.chunk_tokens))
    return GLAMasks(
        begins=begins.transpose(0, 1)[:, :, None, :, None],
        incoming=found.incoming.transpose(0, 1),
        outgoing=found.outgoing.transpose(0, 1),
        through=found.through.transpose(0, 1),
        pairs=found.pairs.transpose(0, 1),
        first=(here == before)[:, None, :, None],
        last=(here == here[:, -1:])[:, None, :, None],
    )
