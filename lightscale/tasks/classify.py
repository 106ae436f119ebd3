"""Predict one label for each document, or each pair: a number that the store has of it, such as a topic.

``StoreWriter.source(…, documents={"label": "int32"})`` writes labels; the output layer, ``model.head``, sees the mean
of the document's tokens, the first or the last one. A document that a window cuts is predicted from each part that a
sequence holds: ``data.packing`` = "whole" leaves all whole that fit. The loss is the mean over documents.

With ``model.head.pairs`` it sees two documents, which the store holds as a pair (``StoreWriter.source(…, pairs=True)``,
``text_pair_field`` in a corpus file) and sequences hold whole. Both have the pair's label; it counts once.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightscale.config.mixers import BIDIRECTIONAL, CAUSAL
from lightscale.config.model import ModelConfig
from lightscale.config.schema import TaskConfig
from lightscale.data_pipeline.loading.targets import PADDING, Predicted, WholeRows
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore
from lightscale.errors import UserError
from lightscale.tasks.interface import TrainingTask

_DOCUMENTS_AT_ONCE = 2**20


class ClassifyConfig(TaskConfig):
    """[task] with name = "classify"."""

    name: Literal["classify"] = "classify"
    label: str = "label"
    """Name of the array with the labels in every source of the store: whole numbers from 0 on, one a document."""


class Classify(TrainingTask):
    """Classification of documents; mixers may read either way."""

    options = ClassifyConfig
    directions = CAUSAL | BIDIRECTIONAL
    predicts_labels = True
    top = (1,)

    def __init__(self, config: ClassifyConfig) -> None:
        self.config = config

    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """Every document of ``sources`` has a label of the model's; reads them all."""
        assert model.head is not None, "checked with the configuration"
        for source in map(store.source, sources):
            if source.has_text_pairs != model.head.pairs:
                holds = "pairs of documents" if source.has_text_pairs else "single documents, no pairs"
                cure = "true" if source.has_text_pairs else "false, or prepare pairs with text_pair_field"
                raise UserError(
                    f"model.head.pairs = {str(model.head.pairs).lower()}: source {source.name} of {store.title} holds "
                    f"{holds}; use {cure}"
                )
            check_labels(self.config.label, store, source, model.head.num_labels)

    def targets(self, store: TokenStore, *, validation: bool) -> "DocumentLabels":
        """The same in validation."""
        return DocumentLabels(array=self.config.label)

    def class_names(self, store: TokenStore) -> list[str]:
        """Those of the array of labels."""
        return store.classes.get(self.config.label, [])


@dataclass(frozen=True, kw_only=True)
class DocumentLabels:
    """The label of a document stands at its last token in the row, that of a pair at its second document's: see
    ``Targets``."""

    array: str

    def __call__(self, rows: WholeRows) -> Predicted:
        """See ``Targets``."""
        tokens = rows.tokens
        labels, is_last = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=np.float32)
        for row, (source, slots, starts) in enumerate(rows.documents()):
            ends = [*(slots[1:] - 1).tolist(), tokens.shape[1] - 1]
            for end, start in zip(ends, starts.tolist(), strict=True):
                if start != PADDING:
                    # The end of a source counts as one document more: no token is there.
                    number = source.document_at(start)
                    if source.has_text_pairs and number % 2 == 0:
                        continue
                    labels[row, end] = source.document_values(self.array, number, number + 1)[0]
                    is_last[row, end] = 1
        return Predicted(tokens, labels, is_last)

    def description(self) -> str:
        """See ``Targets``."""
        return f"classify {self.array}"


def check_labels(name: str, store: TokenStore, source: TokenSource, num_labels: int) -> None:
    """``UserError`` unless the array ``name`` has a label below ``num_labels`` for each document of ``source``."""
    where = f"{store.path}, source {source.name}"
    dtype = source.document_arrays.get(name)
    if dtype is None:
        names = ", ".join(source.document_arrays) or "none"
        raise UserError(f'task.label = "{name}": {where} has no such document array; it has {names}')
    if dtype.subdtype is not None or dtype.kind not in "iu":
        raise UserError(f'task.label = "{name}": in {where} it is {dtype}; it must hold one whole number per document')
    for first in range(0, source.num_documents, _DOCUMENTS_AT_ONCE):
        last = min(first + _DOCUMENTS_AT_ONCE, source.num_documents)
        labels = source.document_values(name, first, last)
        wrong = np.flatnonzero((labels < 0) | (labels >= num_labels))
        if len(wrong):
            label = int(labels[wrong[0]])
            classes = store.classes.get(name, [])
            called = f" ({classes[label]})" if 0 <= label < len(classes) else ""
            advice = f"; the store has {len(classes)} classes" if classes else ""
            raise UserError(
                f"{where}: document {first + wrong[0]} has the label {label}{called}, but "
                f"model.head.num_labels = {num_labels} allows 0 to {num_labels - 1}{advice}"
            )
