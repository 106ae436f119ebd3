"""The loss of pairs of answers (``task.name = "preference"``): the engine's objective in place of a sum over tokens.

    begin     before a step: losses of the frozen reference for all micro-batches, through the pipeline; nothing
              where the store has them, which batches then bring (``label_values``)
    __call__  of a micro-batch: from the losses of its tokens to the loss of its pairs

The reference is a second engine on the same ranks, or with adapters the model itself without them. A row holds whole
pairs: its documents are the chosen and the rejected answer in turn, which tokens tell by their positions. Sums over a
document that sequence ranks share are sums over these ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.schema import RunConfig
from lightscale.models.low_rank import without_adapters
from lightscale.parallel.engine import Engine, MicroBatch, MicroBatchSums, Objective
from lightscale.parallel.mesh import Mesh
from lightscale.tasks.preference import PreferenceConfig
from lightscale.training.build import build_engine

_FEWEST_TOKENS = 2
"""Of a document: end of text, and one that counts."""


def build_reference(
    config: RunConfig, mesh: Mesh, *, vocab_size: int, dtype: torch.dtype | None = None
) -> Engine | None:
    """The frozen model that ``config`` compares answers with, its weights still to be read; None: it needs none, or
    has it as its own without adapters."""
    if not config.has_reference or config.adapters is not None:
        return None
    train = config.train.model_copy(update={"recompute": "none", "recompute_layers": None})
    frozen = config.model_copy(update={"train": train})
    return build_engine(frozen, mesh, vocab_size=vocab_size, trainable=False, dtype=dtype)


class PairSums(NamedTuple):
    """Of the pairs of each row, (b, pairs, 2): the chosen answer, then the rejected one. fp64."""

    log_probabilities: Tensor
    """Of the counted tokens, summed."""
    tokens: Tensor
    """Counted; 0: no such pair."""


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks of a group; every rank has the whole result and differentiates its own part of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def pair_sums(batch: MicroBatch, losses: Tensor, mesh: Mesh) -> PairSums:
    """Sums of the masked ``losses`` of this rank's tokens, (b, n), over the sequence ranks; collective over these."""
    group, size = mesh.groups.cp, mesh.sequence
    starts = batch.positions == 0
    # The number of each token's document in its row; sequence ranks go on counting.
    number = starts.cumsum(dim=1) - 1
    if size > 1:
        begun = starts.sum(dim=1)
        of_ranks = [torch.empty_like(begun) for _ in range(size)]
        dist.all_gather(of_ranks, begun, group=group)
        number = number + torch.stack(of_ranks)[: mesh.sequence_rank].sum(dim=0)[:, None]
    b, n = losses.shape
    tokens = n * size if batch.lengths is None else sum(batch.lengths)
    # As many pairs as fit a row at most: the host need not ask how many there are. Padding is a document too.
    pairs = tokens // (2 * _FEWEST_TOKENS) + 1
    number = number.clamp(max=2 * pairs - 1)

    def sums(values: Tensor) -> Tensor:
        own = values.new_zeros(b, 2 * pairs, dtype=torch.float64).scatter_add(1, number, values.double())
        return (own if size == 1 else _SumOverRanks.apply(own, group)).view(b, pairs, 2)

    return PairSums(-sums(losses), sums(batch.loss_mask))


def pair_losses(task: PreferenceConfig, policy: PairSums, reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """The loss of each pair, (b, pairs), and how much more the chosen answer gained than the rejected one.

    ``reference``: ``PairSums.log_probabilities`` of the reference; None: ``task`` has none.
    """
    gained = policy.log_probabilities if reference is None else policy.log_probabilities - reference
    if task.loss != "dpo":
        gained = gained / policy.tokens.clamp_min(1)
    margin = gained[..., 0] - gained[..., 1]
    if task.loss == "ipo":
        return (margin - 1 / (2 * task.beta)).square(), margin
    return -F.logsigmoid(task.beta * margin - (task.gamma if task.loss == "simpo" else 0.0)), margin


class Recorder(Objective):
    """Keeps the losses of the tokens of every micro-batch, (b, n), in place of a loss."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def __call__(self, batch: MicroBatch, losses: Tensor, *, top: bool) -> MicroBatchSums:
        """See ``Objective``."""
        self.found[id(batch)] = losses
        nothing = losses.new_zeros(losses.size(0), dtype=torch.float64)
        return MicroBatchSums(losses.sum(), losses.new_zeros((), dtype=torch.int32), (nothing, nothing))


class PreferenceObjective(Objective):
    """The losses of ``task``.

    Args:
        reference: the frozen model; None: the model itself without its adapters, or no reference at all.
    """

    def __init__(self, task: PreferenceConfig, mesh: Mesh, reference: Engine | None) -> None:
        self.task, self.mesh, self.reference = task, mesh, reference
        self._of_reference: dict[int, Tensor] = {}

    def begin(self, engine: Engine, batches: Sequence[MicroBatch], advance: Callable[[], None] = lambda: None) -> None:
        """Ask the reference about ``batches``; collective over all ranks of a stage's pipeline."""
        self._of_reference = {}
        if not self.task.has_reference:
            return
        recorder = Recorder()
        asked = engine if self.reference is None else self.reference
        with _asks(asked, recorder), nullcontext() if self.reference else without_adapters(engine.chunks):
            asked.forward_only(batches, advance=advance)
        self._of_reference = recorder.found

    def __call__(self, batch: MicroBatch, losses: Tensor, *, top: bool) -> MicroBatchSums:
        """See ``Objective``: sums over pairs, which the first sequence rank reports; ``top``: those with a margin."""
        policy, others = pair_sums(batch, losses, self.mesh), self._of_reference.get(id(batch))
        if self.task.stored_reference:
            assert batch.label_values is not None, "the loader reads them"
            others = -batch.label_values
        reference = None if others is None else pair_sums(batch, others, self.mesh).log_probabilities
        found, margin = pair_losses(self.task, policy, reference)
        is_pair = policy.tokens.gt(0).all(dim=-1)
        found = torch.where(is_pair, found, 0.0)
        is_first = float(self.mesh.sequence_rank == 0)
        rows = [found.detach().sum(dim=1), is_pair.sum(dim=1)]
        if top:
            rows.append((is_pair & (margin > 0)).sum(dim=1))
        shown = tuple(row.double() * is_first for row in rows)
        return MicroBatchSums(found.sum(), shown[1].sum().int(), shown)


@contextmanager
def _asks(engine: Engine, objective: Objective) -> Iterator[None]:
    """Within, ``engine`` has another objective."""
    before, engine.objective = engine.objective, objective
    try:
        yield
    finally:
        engine.objective = before
