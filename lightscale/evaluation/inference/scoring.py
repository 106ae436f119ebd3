"""Answers to requests, by a model on any layout: rows of packed documents, prefixes run once, long texts in parts.

Collective: every rank gives the same requests, in one order, and gets all answers.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.evaluation.inference.forward import Forward, Found, Rows, States
from lightscale.evaluation.inference.generate import BATCH, TextGenerator
from lightscale.evaluation.inference.packing import Placed, ScoredDocument, TreeNode, columns, forest, pack, share
from lightscale.evaluation.inference.prompts import Prompt, Sampling, check_generates
from lightscale.evaluation.inference.requests import (
    Answer,
    GenerateUntil,
    Generation,
    Likelihood,
    LogLikelihood,
    Request,
    RollingLogLikelihood,
    TokenLikelihoods,
    num_tokens,
    windows,
)
from lightscale.kernels.operators import state_grows
from lightscale.models.language_model import LanguageModel
from lightscale.models.registry import layer_operators
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.mesh import Mesh

STATE_BYTES = 2**30
"""Of the states that are kept for the rows of one batch, on each rank."""
_FIRST_ROWS = 8
"""Before it is known how large a state is."""
_Continued = tuple[TreeNode, int]
"""A node, and the row whose state it continues."""


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """How requests become rows. None of it changes an answer by more than rounding."""

    row_tokens: int = 8192
    """Tokens that pass through the model at once."""
    least_shared: int | None = 16
    """Tokens that requests must have in common for them to be run once; none: nothing is shared."""


@dataclass(kw_only=True)
class Work:
    """Costs of answering on this rank's model: tokens that passed through it."""

    asked_tokens: int = 0
    """Tokens of the documents of the requests, each counted separately."""
    run_tokens: int = 0
    """That were fed, fillers included."""


class Scorer:
    """A model that answers requests.

    Args:
        model: this rank's layers, in evaluation mode.
        tokenizer: the one it was trained with; None where no text is asked for.
        mesh: of the ranks that answer together.
        advance: called with the share of the work of ``answer`` that is done on this rank's model.
    """

    def __init__(
        self,
        model: LanguageModel,
        mesh: Mesh,
        *,
        tokenizer: Tokenizer | None = None,
        settings: ScoringSettings | None = None,
        advance: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.settings, self.work = settings or ScoringSettings(), Work()
        self._advance, self._total, self._done = advance, 0, 0
        self._model, self._mesh, self._tokenizer = model, mesh, tokenizer
        self._forward = Forward(model, mesh)
        self._grows = any(map(state_grows, layer_operators(model.model)))
        self._row_bytes: int | None = None
        # As models compute them: texts of many million tokens are held, and nothing is rounded.
        self._dtype = np.float64 if any(weight.dtype == torch.float64 for weight in model.parameters()) else np.float32

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers, in the order of the requests."""
        documents: list[ScoredDocument] = []
        of_request: list[range] = []
        for request in requests:
            first = len(documents)
            documents.extend(_documents(request))
            of_request.append(range(first, len(documents)))
        asked = [request for request in requests if isinstance(request, GenerateUntil)]
        own_texts = self._own_texts(asked)
        self._done, self._total = 0, sum(num_tokens(asked[number]) for number in own_texts)
        values = self._score(documents)
        written = self._generate(asked, own_texts)
        answers: list[Answer] = []
        for request, own in zip(requests, of_request, strict=True):
            match request:
                case GenerateUntil():
                    answers.append(next(written))
                case RollingLogLikelihood():
                    # Those of a text's windows stand one behind the other.
                    found = [values[number][0] for number in own]
                    whole = np.concatenate([np.empty(0), *found])
                    answers.append(TokenLikelihoods(log_probability=whole))
                case LogLikelihood():
                    log_probability, is_greedy = values[own[0]]
                    total = float(log_probability.sum(dtype=np.float64))
                    answers.append(Likelihood(log_probability=total, is_greedy=bool(is_greedy.all())))
        return answers

    def _score(self, documents: Sequence[ScoredDocument]) -> list[tuple[Any, Any]]:
        """(log-probabilities, whether greedy) of the scored tokens of each document, on every rank."""
        starts = np.cumsum([0, *(len(ids) - first for ids, first in documents)])
        # Of all tokens one after the other, and nothing else that grows with them. Each rank fills in its own.
        log_probability, is_greedy = np.zeros(starts[-1], self._dtype), np.zeros(starts[-1], np.bool_)
        num_found = np.zeros((), np.int64)

        def find() -> None:
            own = share(documents, self._mesh.data)[self._mesh.data_rank] if documents else []
            for found in self._run(documents, own):
                if self._forward.answers:
                    index = starts[found.numbers] + found.offsets
                    log_probability[index] = found.log_probability
                    is_greedy[index] = found.is_greedy
                    num_found[...] += len(index)

        # What fails on one rank is raised on all: a run in training, which evaluates between steps, goes on.
        Agreement(self._mesh.control).on_all(find)
        if self._mesh.world_size > 1:
            # By the control group, on the host, in place. Every token is one rank's, and nothing is added to it.
            for values in (log_probability, is_greedy.view(np.uint8), num_found):
                dist.all_reduce(torch.from_numpy(values), group=self._mesh.control)
        assert num_found == starts[-1], "every token is one rank's"
        return [
            (log_probability[first:stop], is_greedy[first:stop]) for first, stop in itertools.pairwise(starts.tolist())
        ]

    def _run(self, documents: Sequence[ScoredDocument], numbers: Sequence[int]) -> Iterator[Found]:
        """What this rank finds of the documents ``numbers``, which are those of its model."""
        self._model.eval()
        self.work.asked_tokens += sum(len(documents[number].ids) - 1 for number in numbers)
        # Sequence ranks exchange states of rows that begin and end by themselves: there nothing is shared.
        whole = self._mesh.sequence > 1
        least_shared = None if whole else self.settings.least_shared
        nodes = forest(documents, numbers, least_shared=least_shared, align=self._forward.align)
        most = self.settings.row_tokens
        self._total += sum(map(_total_tokens, nodes))

        def alone(node: TreeNode) -> bool:
            return not node.children and (whole or len(node.inputs) <= most)

        yield from self._packed(pack([node for node in nodes if alone(node)], most))
        yield from self._trees([node for node in nodes if not alone(node)])

    def _packed(self, rows: Sequence[Sequence[Placed]]) -> Iterator[Found]:
        """Rows of whole documents; some at a time where stages would wait for one another."""
        at_once = 4 * self._mesh.pipeline if self._mesh.pipeline > 1 else 1
        # All of a shape at once: of rows of about one length, the longest of them.
        for batch in _batches(sorted(rows, key=_length, reverse=True), at_once):
            width = self._aligned(max(map(_length, batch)))
            found = [Rows(columns=columns([row], 0, width, filler=self._filler)) for row in batch]
            yield from self._forward.score(found)
            self.work.run_tokens += len(batch) * width
            self._progress(sum(len(node.inputs) for row in batch for node, _ in row))

    def _trees(self, roots: Sequence[TreeNode]) -> Iterator[Found]:
        """Prefixes and what stands behind them, and documents that are longer than a row."""
        for alike in _alike([(node, 0) for node in roots], self._most_rows):
            batch = [node for node, _ in alike]
            width = self._aligned(max(len(node.inputs) for node in batch))
            # Their ends stand together, so that all states are those behind the prefixes: a document begins anew,
            # whatever stands before it.
            rows = [[Placed(node, width - len(node.inputs) if node.children else 0)] for node in batch]
            states: States = {}
            yield from self._through(rows, width, states)
            yield from self._below(states, batch, width)

    def _below(self, states: States, nodes: Sequence[TreeNode], depth: int) -> Iterator[Found]:
        """The children of ``nodes``, whose ``states`` are those of the rows in the same order.

        ``depth``: tokens that states which grow hold.
        """
        children = [(child, row) for row, node in enumerate(nodes) for child in node.children]
        ends = [pair for pair in children if not pair[0].children]
        inner = sorted((pair for pair in children if pair[0].children), key=lambda pair: len(pair[0].inputs))
        for batch in _alike(ends, lambda longest: self._most_rows(longest, depth)):
            width = self._aligned(max(len(node.inputs) for node, _ in batch))
            yield from self._through([[Placed(node, 0)] for node, _ in batch], width, _chosen(states, batch))
        # A state is wanted from each of these: they must end together, and begin together behind the states above.
        for length, alike in itertools.groupby(inner, key=lambda pair: len(pair[0].inputs)):
            for batch in _batches(list(alike), self._most_rows(length, depth)):
                behind = _chosen(states, batch)
                yield from self._through([[Placed(node, 0)] for node, _ in batch], length, behind)
                yield from self._below(behind, [node for node, _ in batch], depth + length)

    def _through(self, rows: Sequence[Sequence[Placed]], width: int, states: States) -> Iterator[Found]:
        """``rows`` of ``width`` tokens from ``states`` on, which are replaced; in parts of bounded size."""
        step = max(1, self.settings.row_tokens // len(rows) // self._forward.align) * self._forward.align
        for first in range(0, width, step):
            stop = min(width, first + step)
            part = columns(rows, first, stop, filler=self._filler)
            yield from self._forward.score([Rows(columns=part, states=states)])
            self.work.run_tokens += len(rows) * (stop - first)
        self._measure(states, len(rows))
        self._progress(sum(len(node.inputs) for row in rows for node, _ in row))

    def _most_rows(self, width: int, depth: int = 0) -> int:
        """Rows of about ``width`` tokens that pass at once, behind states that hold ``depth`` tokens."""
        held = width + (depth if self._grows else 0)
        by_states = _FIRST_ROWS if self._row_bytes is None else STATE_BYTES // max(1, self._row_bytes)
        return max(1, min(self.settings.row_tokens // max(1, held), by_states))

    def _measure(self, states: States, num_rows: int) -> None:
        """How much memory the state of a row takes; the same on all ranks of the model."""
        # States that grow are bounded by their tokens.
        if self._row_bytes is None and not self._grows:
            total = sum(_num_bytes(tensor) for state in states.values() for tensor in state.values())
            self._row_bytes = self._forward.largest(total // num_rows)
        elif self._grows:
            self._row_bytes = 1

    def _progress(self, tokens: int) -> None:
        self._done += tokens
        self._advance(min(1.0, self._done / max(1, self._total)))

    @property
    def _filler(self) -> int:
        return 0 if self._tokenizer is None else self._tokenizer.eot_id

    def _aligned(self, length: int) -> int:
        return -(-length // self._forward.align) * self._forward.align

    def _own_texts(self, requests: Sequence[GenerateUntil]) -> list[int]:
        """The numbers of the texts that this data rank writes, longest first; those that begin alike on one rank."""
        prompts = [ScoredDocument(request.context, len(request.context)) for request in requests]
        most = [request.max_tokens for request in requests]
        own = share(prompts, self._mesh.data, written=most)[self._mesh.data_rank] if requests else []
        # Those that are written together end together.
        return sorted(own, key=lambda number: -num_tokens(requests[number]))

    def _generate(self, requests: Sequence[GenerateUntil], own: Sequence[int]) -> Iterator[Answer]:
        """What the model writes; this data rank the texts ``own``."""
        if not requests:
            return iter(())
        mesh = self._mesh
        check_generates(mesh.pipeline, mesh.sequence)
        every = Agreement(mesh.control).on_all(
            lambda: list(zip(own, self._write([requests[number] for number in own]), strict=True))
        )
        # Equal ones from tensor ranks.
        return iter([answer for _, answer in sorted(dict(itertools.chain(*every)).items())])

    def _write(self, requests: Sequence[GenerateUntil]) -> list[Generation]:
        if not requests:
            return []
        assert self._tokenizer is not None, "text is generated by a tokenizer"
        greedy = Sampling(temperature=0)
        prompts = [
            Prompt(ids=request.context.tolist(), max_tokens=request.max_tokens, stop=request.until, sampling=greedy)
            for request in requests
        ]
        batch = min(BATCH, self._most_rows(1, max(map(num_tokens, requests))))
        found: dict[int, Generation] = {}
        self._model.eval()
        least_shared = self.settings.least_shared
        generator = TextGenerator(self._model, self._tokenizer, batch=batch, least_shared=least_shared)
        for one, _ in generator.write(prompts):
            if one.ended is not None:
                found[one.number] = Generation(text=one.text, num_tokens=len(one.ids))
                self.work.asked_tokens += len(one.prompt.ids) + len(one.ids)
                self._progress(num_tokens(requests[one.number]))
        self.work.run_tokens += generator.run_tokens
        return [found[number] for number in range(len(requests))]


def _documents(request: Request) -> Iterator[ScoredDocument]:
    match request:
        case LogLikelihood(context=context, continuation=continuation):
            yield ScoredDocument(np.concatenate([context, continuation]), len(context))
        case RollingLogLikelihood(ids=ids, window=window, stride=stride):
            for begin, scored, end in windows(len(ids) - 1, window, stride):
                yield ScoredDocument(ids[begin:end], scored - begin)


def _total_tokens(node: TreeNode) -> int:
    return len(node.inputs) + sum(map(_total_tokens, node.children))


def _chosen(states: States, batch: Sequence[_Continued]) -> States:
    """The states of the rows that the nodes of ``batch`` continue."""
    rows = [row for _, row in batch]

    def choose(tensor: Tensor) -> Tensor:
        return tensor[rows]

    return {name: {key: choose(tensor) for key, tensor in state.items()} for name, state in states.items()}


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _alike(nodes: Iterable[_Continued], most_rows: Callable[[int], int]) -> Iterator[Sequence[_Continued]]:
    """Batches of nodes of about one length, with the row of each; ``most_rows`` of a length go together."""
    waiting = deque(sorted(nodes, key=lambda pair: len(pair[0].inputs), reverse=True))
    while waiting:
        longest = len(waiting[0][0].inputs)
        most, batch = most_rows(longest), [waiting.popleft()]
        # At most a fifth of a row, or a few tokens, are fillers.
        while waiting and len(batch) < most and len(waiting[0][0].inputs) >= longest - max(8, longest // 5):
            batch.append(waiting.popleft())
        yield batch


def _length(row: Sequence[Placed]) -> int:
    return sum(len(node.inputs) for node, _ in row)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[first : first + size] for first in range(0, len(items), size))
