"""Micro-batches as the engine reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor


class MicroBatch(Protocol):
    """One rank's part of a micro-batch; every tensor (b, n) or as described, n the tokens of its segment.

    Every pipeline and tensor rank of a segment gets the same one: the first stage reads the tokens, the last one the
    labels, and layers between them the documents from ``positions``.
    """

    @property
    def tokens(self) -> Tensor:
        """int64 inputs; of images (b, n, p) uint8, p bytes of each patch."""

    @property
    def labels(self) -> Tensor:
        """int64: label of each input, such as the next token."""

    @property
    def loss_mask(self) -> Tensor:
        """fp32: 1 where the label counts."""

    @property
    def positions(self) -> Tensor:
        """int64: tokens since the document's start."""

    @property
    def document_starts(self) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None] | None:
        """(m,) int64 each, on the host: the slots where documents start, over the rows laid one after another and every
        row's first slot included, and the positions there; with the tokens behind the rows, where those are read (see
        ``DocumentStarts``). None: they are read from ``positions``, for which the host waits on a GPU."""

    @property
    def sources(self) -> Tensor | None:
        """(b,) int64: the number of the source that each row is from; None where the engine has no ``num_sources``."""

    @property
    def soft_labels(self) -> Tensor | None:
        """(b, classes) fp32: distributions in place of labels of rows that are one document each; None: the labels."""

    @property
    def conditions(self) -> Tensor | None:
        """(b, 2) int64: timestep and class of each row's one noised image; None: nothing is noised."""

    @property
    def wanted(self) -> Tensor | None:
        """(b, n, p) fp32: what is predicted of noised pixels, the inputs."""

    @property
    def label_values(self) -> Tensor | None:
        """fp32: a stored value for each label, 0 where none counts, which an objective reads; None: there are none."""

    @property
    def places(self) -> Tensor | None:
        """(b,) int64: what tells each row from all others of a run, for adapters with dropout; None: they have none."""

    @property
    def lengths(self) -> Sequence[int] | None:
        """n of every sequence rank where they differ (only without tensor and pipeline ranks); None when equal."""


@dataclass(frozen=True, kw_only=True)
class GivenMicroBatch:
    """A ``MicroBatch`` of tensors that are given, not loaded from a store; most have only the first four."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    document_starts: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None] | None = None
    sources: Tensor | None = None
    soft_labels: Tensor | None = None
    conditions: Tensor | None = None
    wanted: Tensor | None = None
    label_values: Tensor | None = None
    places: Tensor | None = None
    lengths: Sequence[int] | None = None


def uncounted(batch: MicroBatch) -> MicroBatch:
    """``batch`` with no label that counts."""
    return replace(batch, loss_mask=batch.loss_mask.new_zeros(batch.loss_mask.shape))  # type: ignore[type-var]
