"""Predictions for whole documents, on any layout: fillings of masks, labels, and one vector per document.

Collective: every rank gives the same documents, in one order, and gets all predictions. Documents are packed into rows
of whole ones, as requests are (``packing.py``); none depends on the other documents of its row.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightscale.config.model import Pooling
from lightscale.evaluation.inference.forward import Forward, Rows
from lightscale.evaluation.inference.packing import Columns, ScoredDocument, TreeNode, columns, pack, share
from lightscale.evaluation.inference.requests import Ids
from lightscale.models.language_model import LanguageModel
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.mesh import Mesh

_Read = Callable[[Columns, Tensor], Tensor]


class Predictor:
    """A model that predicts.

    Args:
        model: this rank's layers, in evaluation mode.
        mesh: of the ranks that predict together.
        row_tokens: tokens per forward pass of the model; a longer document has its own row.
        advance: called after each pass.
    """

    def __init__(
        self, model: LanguageModel, mesh: Mesh, *, row_tokens: int = 8192, advance: Callable[[], None] = lambda: None
    ) -> None:
        self._model, self._mesh, self._row_tokens, self._advance = model, mesh, row_tokens, advance
        self._forward = Forward(model, mesh)

    def fill(self, documents: Sequence[Ids], mask: int, count: int) -> list[tuple[NDArray[np.float64], Ids]]:
        """For each document the ``count`` most probable ids of each of its m tokens ``mask``: (m, count) each.

        Log-probabilities in nats, most probable first, and ids.
        """

        def read(own: Columns, hidden: Tensor) -> Tensor:
            log_probability, ids = self._model.most_probable(hidden, self._forward.to_device(own.chosen), count)
            return torch.cat([log_probability.double(), ids.double()], dim=1)

        asked = [ids == mask for ids in documents]
        values = self._values(documents, asked, 2 * count, read)
        ends = np.cumsum([0, *(int(one.sum()) for one in asked)])
        return [
            (values[first:stop, :count], values[first:stop, count:].astype(np.int32))
            for first, stop in itertools.pairwise(ends.tolist())
        ]

    def classify(self, documents: Sequence[Ids], seconds: Sequence[int] | None = None) -> NDArray[np.float64]:
        """(documents, labels): the log-probability of each label.

        ``seconds``: where in each pair of documents the second one begins; None: they are single documents.
        """
        assert self._model.model.head is not None, "a model that predicts labels"
        width = self._model.model.head.num_labels
        return self._of_documents(documents, width, self._model.label_log_probability, seconds)

    def embed(self, documents: Sequence[Ids], pooling: Pooling) -> NDArray[np.float64]:
        """(documents, d): inputs of the output layer: their mean over a document's tokens, or that of one token."""
        return self._of_documents(
            documents,
            self._model.model.hidden_size,
            lambda hidden, positions: self._model.pooled(hidden, positions, pooling),
        )

    def embed_patches(self, images: Sequence[NDArray[Any]], first: int, channels: int) -> NDArray[np.float64]:
        """(images, n - first, channels): the first channels of the output layer's inputs, of tokens from ``first`` on.

        images: (n, p) each.
        """

        def read(own: Columns, hidden: Tensor) -> Tensor:
            return self._model.states_of(hidden[..., :channels], self._forward.to_device(own.chosen)).double()

        return self._of_images(np.stack(images), first, channels, read)

    def _of_documents(
        self,
        documents: Sequence[Ids],
        width: int,
        pool: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        seconds: Sequence[int] | None = None,
    ) -> NDArray[np.float64]:
        """(documents, width): what ``pool`` gives of each where it ends."""

        def read(own: Columns, hidden: Tensor) -> Tensor:
            # Also where no document ends: sequence ranks exchange what they have of each.
            values, last = pool(hidden, self._forward.to_device(own.positions))
            return values[torch.searchsorted(last, self._forward.to_device(own.chosen))].double()

        if self._model.model.patches is not None:
            images = np.stack(documents)
            return self._of_images(images, images.shape[1] - 1, width, read)[:, 0]
        is_last = [np.arange(len(ids)) == len(ids) - 1 for ids in documents]
        return self._values(documents, is_last, width, read, seconds)

    def _values(
        self,
        documents: Sequence[Ids],
        asked: Sequence[NDArray[np.bool_]],
        width: int,
        read: _Read,
        seconds: Sequence[int] | None = None,
    ) -> NDArray[np.float64]:
        """(m, width): what ``read`` makes of the m ``asked`` tokens of all documents, on every rank.

        ``read`` gets only these tokens as chosen ones, none on some ranks.
        """
        begins = np.cumsum([0, *map(len, documents)])
        every = np.concatenate([np.zeros(0, dtype=bool), *asked])
        rows = np.cumsum(every) - 1
        values = np.zeros((int(every.sum()), width))
        num_found = np.zeros((), dtype=np.int64)

        def wanted(own: Columns) -> Columns:
            keep = every[begins[own.numbers] + own.offsets]
            parts = (own.chosen, own.labels, own.numbers, own.offsets)
            return Columns(own.tokens, own.positions, *(part[keep] for part in parts))

        def find() -> None:
            for own, found in self._run(documents, lambda own, hidden: read(wanted(own), hidden), seconds):
                if self._forward.answers:
                    here = wanted(own)
                    values[rows[begins[here.numbers] + here.offsets]] = found.cpu().numpy()
                    num_found[...] += len(here.chosen)
                self._advance()

        self._collect(find, values, num_found)
        return values

    def _of_images(self, images: NDArray[Any], first: int, width: int, read: _Read) -> NDArray[np.float64]:
        """(m, n - first, width): what ``read`` makes of tokens from ``first`` on, on every rank.

        images: (m, n, p). A row is one image, as in training.
        """
        count, tokens = images.shape[:2]
        rows, asked = min(count, max(1, self._row_tokens // tokens)), np.arange(first, tokens)
        values = np.zeros((count * len(asked), width))
        num_found = np.zeros((), dtype=np.int64)

        positions = np.tile(np.arange(tokens), (rows, 1))

        def rows_from(begin: int) -> Rows:
            numbers = np.arange(begin, min(begin + rows, count), dtype=np.int32)
            # All passes have one shape: rows beyond the last image are read by nobody.
            inputs = images[np.minimum(np.arange(begin, begin + rows), count - 1)]
            chosen = (np.arange(len(numbers))[:, None] * tokens + asked).ravel()
            offsets = np.tile(np.arange(len(asked), dtype=np.int32), len(numbers))
            numbers = numbers.repeat(len(asked))
            return Rows(columns=Columns(inputs, positions, chosen, np.zeros_like(numbers), numbers, offsets))

        def find() -> None:
            self._model.eval()
            begins = range(self._mesh.data_rank * rows, count, self._mesh.data * rows)
            for start in range(0, len(begins), self._at_once):
                some = begins[start : start + self._at_once]
                for own, found in self._forward.run(list(map(rows_from, some)), read):
                    if self._forward.answers:
                        values[own.numbers.astype(np.int64) * len(asked) + own.offsets] = found.cpu().numpy()
                        num_found[...] += len(own.numbers)
                    self._advance()

        self._collect(find, values, num_found)
        return values.reshape(count, len(asked), width)

    def _collect(self, find: Callable[[], None], values: NDArray[np.float64], num_found: NDArray[np.int64]) -> None:
        """Run ``find`` on all ranks, and give each the ``values`` and their number that the others found."""
        # What fails on one rank is raised on all.
        Agreement(self._mesh.control).on_all(find)
        if self._mesh.world_size > 1:
            # By the control group, on the host, in place. Every token is one rank's, and nothing is added to it.
            for array in (values, num_found):
                dist.all_reduce(torch.from_numpy(array), group=self._mesh.control)
        assert num_found == len(values), "every token is one rank's"

    @property
    def _at_once(self) -> int:
        """Passes that are run together where stages would wait for one another."""
        return 4 * self._mesh.pipeline if self._mesh.pipeline > 1 else 1

    def _run(
        self, documents: Sequence[Ids], read: _Read, seconds: Sequence[int] | None
    ) -> Iterator[tuple[Columns, Tensor]]:
        """This data rank's documents through the model, packed."""
        self._model.eval()
        own = share([ScoredDocument(ids, 1) for ids in documents], self._mesh.data)[self._mesh.data_rank]
        # All tokens of a document are inputs, and any may be asked for: labels are nobody's.
        nodes = [TreeNode(inputs=documents[n], start=0, number=n, labels=documents[n]) for n in own]
        packed = sorted(pack(nodes, self._row_tokens), key=_length, reverse=True)
        # All of a shape: that of the longest of them.
        at_once = self._at_once
        for first in range(0, len(packed), at_once):
            batch = packed[first : first + at_once]
            align = self._forward.align
            width = -(-max(map(_length, batch)) // align) * align
            rows = [Rows(columns=columns([row], 0, width, filler=0)) for row in batch]
            if seconds is not None:
                for (node, column), made in ((one, made) for row, made in zip(batch, rows, strict=True) for one in row):
                    # Packed as one, read as two.
                    second = seconds[node.number]
                    made.columns.positions[0, column + second : column + len(node.inputs)] -= second
            yield from self._forward.run(rows, read)


def _length(row: Sequence[tuple[TreeNode, int]]) -> int:
    return sum(len(node.inputs) for node, _ in row)
