"""What a layer must know about the tokens it sees, besides their activations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightscale.parallel.sequence import Replay, Scan, StateExchange, begin

MixerState = dict[str, Tensor]
"""The tensors that a mixer keeps from one call to the next, by name; each has the batch as its first dim."""

Finish = Callable[[Tensor], Tensor]
"""The second half of an operator: queries (b, n, h, k) to outputs (b, n, h, v)."""


@dataclass(frozen=True, kw_only=True)
class SequenceContext:
    """Positions, document boundaries, and where states come from and go to. Shared by all layers of a forward pass.

    It reaches the mixers through the argument that Megatron calls ``packed_seq_params``.

    positions: (b, n) int64, tokens since the document's start; 0 exactly where a document starts.
    cu_seqlens: (N + 1,) int64, boundaries over the flattened b·n tokens, every row start included; None when no
        document starts inside a row, so that kernels do no work for boundaries.
    continues: (b,) bool, whether a row's first token continues a document of the sequence rank before.
    exchange: the ranks that hold the other segments of these rows; None when every row is whole.
    replay: where layers that are recomputed keep their incoming states; None when none is.
    lengths: n of every sequence rank where they differ; None when they are equal.
    states: layer name to state, in generation: read as the incoming state, then replaced by the outgoing one.
    shared: what the model's parts for all layers gave (``StagePart.forward``), by the name of the part.
    """

    positions: Tensor
    cu_seqlens: Tensor | None
    continues: Tensor
    exchange: StateExchange | None = None
    replay: Replay | None = None
    lengths: Sequence[int] | None = None
    states: dict[str, MixerState] | None = None
    shared: Mapping[str, Tensor] = field(default_factory=dict)

    def begin(self, scan: type[Scan], *written: Tensor | None, layer: str | None) -> Callable[..., Tensor]:
        """Start passing states along the sequence ranks; see ``parallel.sequence.begin``.

        ``layer`` is the name of a layer whose activations may be recomputed, None for what is not in the layers.
        """
        assert self.exchange is not None, "rows are whole here"
        own = scan(continues=self.continues, cu_seqlens=self.cu_seqlens)
        replay = None if layer is None else self.replay
        return begin(own, self.exchange, *written, name=layer or "", replay=replay)

    @staticmethod
    def of(
        positions: Tensor,
        *,
        exchange: StateExchange | None = None,
        replay: Replay | None = None,
        lengths: Sequence[int] | None = None,
        states: dict[str, MixerState] | None = None,
        shared: Mapping[str, Tensor] | None = None,
    ) -> "SequenceContext":
        """The context of rows with these ``positions`` (b, n)."""
        b, n = positions.shape
        # Asked here once for all layers: on a GPU, the host waits for the answer.
        starts = positions == 0
        if n == 0 or not bool(starts[:, 1:].any()):
            cu_seqlens = None
        else:
            starts = starts.clone()
            # Operators see the rows as one sequence: a row that continues a document must not continue the row above.
            starts[:, 0] = True
            edges = starts.flatten().nonzero().squeeze(-1)
            cu_seqlens = torch.cat([edges, edges.new_tensor([b * n])])
        # An empty segment begins no document: what came in goes on to the next rank unchanged.
        continues = positions[:, 0] != 0 if n else positions.new_ones(b, dtype=torch.bool)
        return SequenceContext(
            positions=positions,
            cu_seqlens=cu_seqlens,
            continues=continues,
            exchange=exchange,
            replay=replay,
            lengths=lengths,
            states=states,
            shared=shared or {},
        )
