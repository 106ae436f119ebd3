"""``lightscale predict`` behind its checks: the model on its ranks, and its predictions, line by line."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.whole_files import whole_file
from lightscale.errors import counted
from lightscale.evaluation.inference.predictions import Predictor
from lightscale.evaluation.inference.requests import Ids
from lightscale.evaluation.model import LoadedModel, mesh_of, restore
from lightscale.evaluation.model_at_work import ModelAtWork
from lightscale.evaluation.prediction.request import Document, PredictionRequest
from lightscale.evaluation.prediction.token_texts import token_texts
from lightscale.models.resolution import set_grid
from lightscale.parallel.mesh import Mesh

BLOCK_TOKENS, _BLOCK_DOCUMENTS = 2**18, 2**12
"""Of a data rank, at most, whose predictions are held at once."""
Record = dict[str, Any]
_Values = Iterator[Record]


def predict(asked: PredictionRequest) -> None:
    """Predict and print the records that ``asked`` describes on stdout of rank 0 or to a file, the costs on its stderr.

    Called by every rank with torchrun's variables in the environment, or without them by one process.
    """
    with mesh_of(asked.chosen.config) as mesh:
        loaded = restore(asked.chosen, mesh)
        if asked.grid is not None:
            set_grid(loaded.model, asked.grid)
        PredictionWriter(asked, loaded, mesh).write()


class PredictionWriter(ModelAtWork):
    """A model and its request; collective over the ranks of ``mesh``."""

    def __init__(self, asked: PredictionRequest, loaded: LoadedModel, mesh: Mesh) -> None:
        super().__init__(asked.chosen, loaded, mesh)
        self.asked = asked
        self._predictor = Predictor(loaded.model, mesh, row_tokens=asked.row_tokens, advance=self.advance)

    def write(self) -> None:
        """See the function."""
        started_s, tokens = time.perf_counter(), 0
        make = {"fillings": self._fillings, "classes": self._classes, "embeddings": self._embeddings}[self.asked.kind]
        with ExitStack() as stack:
            out = self._output(stack)
            for block in blocks(self.asked.documents, BLOCK_TOKENS * self.mesh.data):
                tokens += sum(len(document.ids) for document in block)
                # On all ranks: they predict together.
                for document, found in zip(block, make([document.ids for document in block]), strict=True):
                    if out is not None:
                        out.write(self._shown(document, found))
        took_s, count = time.perf_counter() - started_s, len(self.asked.documents)
        what = "document" if self.asked.chosen.config.model.patches is None else "image"
        self._say(f"{counted(count, what)}, {tokens:,} tokens in {took_s:.2f} s, from {self.loaded.checkpoint}"
                  + (f"; wrote {self.asked.out}" if self.asked.out else ""))  # fmt: skip

    def _output(self, stack: ExitStack) -> TextIO | None:
        """Where records go; None on all ranks but the first."""
        if not self._is_main:
            return None
        if self.asked.out is None:
            return sys.stdout
        temporary = stack.enter_context(whole_file(self.asked.out))
        return stack.enter_context(temporary.open("w", encoding="utf-8"))

    def _fillings(self, documents: Sequence[Ids]) -> _Values:
        asked, tokenizer = self.asked, self.loaded.tokenizer
        assert asked.masks is not None, "checked before"
        of_token = token_texts(tokenizer)
        for log_probability, ids in self._predictor.fill(documents, asked.masks.id, asked.top):
            yield {
                "masks": [
                    [
                        {"token": of_token(number), "id": number, "probability": _rounded(math.exp(value))}
                        for value, number in zip(values.tolist(), numbers.tolist(), strict=True)
                    ]
                    for values, numbers in zip(log_probability, ids, strict=True)
                ]
            }

    def _classes(self, documents: Sequence[Ids]) -> _Values:
        head, seconds = self.asked.chosen.config.model.head, None
        if head is not None and head.pairs:
            # Each of the two begins with the token.
            seconds = [int(np.flatnonzero(ids == self.loaded.tokenizer.eot_id)[-1]) for ids in documents]
        for values in self._predictor.classify(documents, seconds):
            order = np.argsort(-values, kind="stable")[: self.asked.top].tolist()
            names = [self.asked.class_name(number) for number in order]
            shares = [_rounded(math.exp(values[number])) for number in order]
            yield {"class": names[0], "label": order[0], "classes": dict(zip(names, shares, strict=True))}

    def _embeddings(self, documents: Sequence[Ids]) -> _Values:
        assert self.asked.pooling is not None, "checked before"
        for values in self._predictor.embed(documents, self.asked.pooling):
            yield {"embedding": _as_list(values)}

    def _shown(self, document: Document, found: Record) -> str:
        record = {**document.record(), **found}
        if self.asked.as_json or self.asked.kind == "embeddings":
            # A text is as long as it likes, and whoever wants vectors has it.
            left_out = {"text", "text_pair"} if self.asked.kind == "embeddings" else set()
            kept = {name: value for name, value in record.items() if name not in left_out}
            return json.dumps(kept, ensure_ascii=False) + "\n"
        lines = [document.heading()]
        if self.asked.kind == "classes":
            lines.append("    " + ", ".join(f"{name} {share:.1%}" for name, share in record["classes"].items()))
        else:
            lines += ["    " + ", ".join(f"{one['token']!r} {one['probability']:.1%}" for one in mask)
                      for mask in record["masks"]]  # fmt: skip
        return "\n".join(lines) + "\n"


def blocks(documents: Sequence[Document], most_tokens: int) -> Iterator[list[Document]]:
    """``documents`` in order, in parts of about ``most_tokens`` that are held at once."""
    block: list[Document] = []
    tokens = 0
    for document in documents:
        block.append(document)
        tokens += len(document.ids)
        if tokens >= most_tokens or len(block) == _BLOCK_DOCUMENTS:
            yield block
            block, tokens = [], 0
    if block:
        yield block


def _rounded(value: float) -> float:
    """With seven digits, which is what fp32 has."""
    return float(f"{value:.7g}")


def _as_list(values: NDArray[np.float64]) -> list[float]:
    return [_rounded(value) for value in values.tolist()]
