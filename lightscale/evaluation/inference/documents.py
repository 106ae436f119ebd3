"""Documents as a model has read them so far, fed together: each at its own position, with a state per layer.

Prompts pass through the model in chunks of bounded length; from then on a token of all documents costs one step of the
recurrence. For linear mixers neither memory nor the cost of a token depends on the positions.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightscale.evaluation.inference.packing import Placed, TreeNode, columns
from lightscale.models.language_model import LanguageModel
from lightscale.models.layers.context import MixerState
from lightscale.models.layers.states import chosen, joined
from lightscale.parallel.device.products import products_of

PREFILL_TOKENS = 1024
"""Tokens of prompts that pass through the model at once; bounds the memory of activations."""
ROOM_TOKENS = 64
"""Initial room, in tokens, of states that grow, if the number of further tokens is unknown."""


class Documents:
    """Some documents, none at first; no answer depends on the other documents.

    Collective over the tensor ranks of ``model``, all of which give the same tokens and get the same logits.

    Args:
        model: in evaluation mode, with all layers on this rank.
        prefill_tokens: of prompts that pass through the model at once.
    """

    def __init__(self, model: LanguageModel, *, prefill_tokens: int = PREFILL_TOKENS) -> None:
        self.model, self._prefill_tokens = model, prefill_tokens
        self.positions: list[int] = []
        """Tokens fed so far, of each document."""
        self.states: dict[str, MixerState] = {}
        """By layer, then by name; the documents are the rows."""
        self.run_tokens = 0
        """Tokens that have passed through the model, fillers included."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def state_bytes(self) -> int:
        """Memory that the states hold."""
        return sum(tensor.untyped_storage().nbytes() for state in self.states.values() for tensor in state.values())

    @torch.inference_mode()
    def begin(self, prompts: Sequence[Sequence[int]], *, room: int = ROOM_TOKENS) -> Tensor:
        """Read the beginnings of further documents, at least one token each, and append them to the present ones.

        ``room``: tokens that are expected to follow.

        Returns:
            The logits (prompts, vocab_size) of the token behind each.
        """
        assert all(len(prompt) for prompt in prompts), "a document begins with a token"
        logits, order = [], []
        new: list[dict[str, MixerState]] = []
        for batch in self._alike(prompts):
            states: dict[str, MixerState] = {}
            together = [prompts[number] for number in batch]
            logits.append(self._read(together, states))
            self.model.give_room(states, [len(prompt) for prompt in together], room)
            order += batch
            new.append(states)
        if not order:
            return self._device_tensor(np.empty((0, self.model.vocab_size), dtype=np.float32))
        self._join(new, order)
        self.positions += map(len, prompts)
        return torch.cat(logits)[np.argsort(order).tolist()]

    @torch.inference_mode()
    def begin_behind(self, prefix: "Documents", rests: Sequence[Sequence[int]], *, room: int = ROOM_TOKENS) -> Tensor:
        """As ``begin``, of documents that all begin with the tokens of ``prefix``, which stays unchanged.

        Args:
            prefix: one document, begun with no room.
            rests: the further tokens of each document, at least one.
            room: tokens that are expected to follow.
        """
        assert len(prefix) == 1, "one document that others begin with"
        (begun,) = prefix.positions
        order = sorted(range(len(rests)), key=lambda number: len(rests[number]))
        logits = []
        new: list[dict[str, MixerState]] = []
        # Their states must begin together, behind the prefix, and end together.
        for length, alike in itertools.groupby(order, key=lambda number: len(rests[number])):
            branch, batch = Documents(self.model, prefill_tokens=self._prefill_tokens), list(alike)
            branch.positions = [begun] * len(batch)
            branch.states = {name: chosen(state, [0] * len(batch)) for name, state in prefix.states.items()}
            self.model.give_room(branch.states, branch.positions, length + room)
            logits.append(branch.feed([rests[number] for number in batch]))
            new.append(branch.states)
            self.run_tokens += branch.run_tokens
        self._join(new, order)
        self.positions += [begun + len(rest) for rest in rests]
        return torch.cat(logits)[np.argsort(order).tolist()]

    @torch.inference_mode()
    def feed(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Read on, each document by the same number of tokens.

        Returns:
            The logits (b, vocab_size) of the token behind each.
        """
        tokens, positions = np.array(ids, dtype=np.int64), np.array(self.positions)[:, None]
        assert tokens.shape[0] == len(self) and tokens.size, "tokens for each document"
        # All of the rows' tokens at once, or fewer where they are many.
        step = max(1, self._prefill_tokens // len(self))
        for first in range(0, tokens.shape[1], step):
            part = tokens[:, first : first + step]
            where = positions + np.arange(first, first + part.shape[1])
            logits = self._forward(part, where, self.states)
        self.positions = [position + tokens.shape[1] for position in self.positions]
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all documents but those in ``rows``, which come in that order."""
        self.positions = [self.positions[row] for row in rows]
        self.states = {name: chosen(state, rows) for name, state in self.states.items()} if rows else {}

    def _alike(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """The numbers of ``prompts`` in batches of about one length, the longest first."""
        waiting = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        while waiting:
            longest = len(prompts[waiting[0]])
            # At most a fifth of a row, or a few tokens, are fillers.
            least = longest - max(8, longest // 5)
            most = max(1, self._prefill_tokens // longest)
            batch = [number for number in waiting[:most] if len(prompts[number]) >= least]
            waiting = waiting[len(batch) :]
            yield batch

    def _read(self, prompts: Sequence[Sequence[int]], states: dict[str, MixerState]) -> Tensor:
        """Logits (b, vocab_size) behind ``prompts``, whose ``states`` are left."""
        width = max(map(len, prompts))
        # They end together, so that all states are those behind the prompts: a document begins anew, whatever stands
        # before it in its row.
        rows = [
            [Placed(TreeNode(inputs=np.array(prompt, dtype=np.int32), start=0), width - len(prompt))]
            for prompt in prompts
        ]
        step = max(1, self._prefill_tokens // len(rows))
        for first in range(0, width, step):
            part = columns(rows, first, min(width, first + step), filler=0)
            logits = self._forward(part.tokens, part.positions, states)
        return logits

    def _forward(self, tokens: np.ndarray, positions: np.ndarray, states: dict[str, MixerState]) -> Tensor:
        self.run_tokens += tokens.size
        with products_of(tokens.size * self._weight.shape[1]):
            return self.model.next_logits(self._device_tensor(tokens), self._device_tensor(positions), states)

    def _join(self, new: Sequence[dict[str, MixerState]], order: Sequence[int]) -> None:
        """Put the rows of ``new``, which are the documents ``order``, behind those that are there."""
        before = len(self)
        rows = [*range(before), *(before + int(row) for row in np.argsort(order))]
        every = [self.states, *new] if self.states else new
        for name in new[0]:
            together = joined([states[name] for states in every])
            self.states[name] = together if rows == sorted(rows) else chosen(together, rows)

    def _device_tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._weight.device)

    @property
    def _weight(self) -> Tensor:
        """Of the embedding (vocabulary of this rank, hidden_size)."""
        return self.model.embedding.word_embeddings.weight
