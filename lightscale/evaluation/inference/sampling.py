"""How the next token is chosen from logits; without the training model, and so without Megatron."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.evaluation.inference.prompts import Sampling


class Chooser:
    """Chooses the tokens of one document.

    It has its own random numbers, one for each token, so that the document is the same alone and in any batch.

    Args:
        sampling: how.
        ids: the document so far.
    """

    def __init__(self, sampling: Sampling, ids: Sequence[int]) -> None:
        self.sampling = sampling
        # Those of the host: they do not depend on the device.
        self._random = np.random.default_rng(sampling.seed % 2**64)
        self._ids = list(ids)
        self._seen: Tensor | None = None

    @property
    def settings(self) -> Sampling:
        """Common settings of choosers that can choose together."""
        return replace(self.sampling, seed=0)

    def draw(self) -> float:
        """The next random number, in [0, 1)."""
        return float(self._random.random())

    def penalized(self, logits: Tensor) -> Tensor:
        """``logits`` (vocab_size,) after the penalty for repetition."""
        penalty = self.sampling.repetition_penalty
        if penalty == 1:
            return logits
        if self._seen is None:
            self._seen = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
            self._seen[self._ids] = True
        return torch.where(self._seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def saw(self, token: int) -> None:
        """The document goes on by ``token``."""
        if self._seen is not None:
            self._seen[token] = True


@torch.inference_mode()
def choose(logits: Tensor, choosers: Sequence[Chooser]) -> list[int]:
    """The next token of each document from its ``logits`` (b, vocab_size). UserError where they are no numbers."""
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise UserError("the model's weights contain NaN or infinity; use an earlier checkpoint (RUN@STEP)")
    tokens = [0] * len(choosers)
    for settings in dict.fromkeys(chooser.settings for chooser in choosers):
        rows = [row for row, chooser in enumerate(choosers) if chooser.settings == settings]
        of_rows = torch.stack([choosers[row].penalized(logits[row]) for row in rows])
        # Also where nothing is drawn, so that a change of temperature shifts no later number.
        draws = torch.tensor([choosers[row].draw() for row in rows], dtype=torch.float64, device=logits.device)
        for row, token in zip(rows, chosen_tokens(of_rows, settings, draws).tolist(), strict=True):
            tokens[row] = token
            choosers[row].saw(token)
    return tokens


def chosen_tokens(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """(b,) ids from ``logits`` (b, vocab_size) by the random numbers ``draws`` (b,) in [0, 1).

    top_k comes before top_p (nucleus sampling, arXiv 1904.09751).
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    # In fp64 and from the largest, so that no temperature overflows.
    logits = logits.double()
    probabilities = ((logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature).softmax(dim=-1)
    if sampling.top_k is None and sampling.top_p is None:
        return _drawn(probabilities, draws)
    k = logits.size(-1) if sampling.top_k is None else min(sampling.top_k, logits.size(-1))
    probabilities, ids = probabilities.topk(k)
    if sampling.top_p is not None:
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        more_probable = probabilities.cumsum(dim=-1) - probabilities
        possible = more_probable < sampling.top_p
        # The most probable token is always kept, whatever rounding does.
        possible[:, 0] = True
        probabilities = probabilities.where(possible, 0.0)
    return ids.gather(-1, _drawn(probabilities, draws)[:, None])[:, 0]


def _drawn(probabilities: Tensor, draws: Tensor) -> Tensor:
    """(b,) indices into ``probabilities`` (b, k), which need not sum to 1: the inverse of their distribution."""
    sums = probabilities.cumsum(dim=-1)
    total = sums[:, -1:].contiguous()
    found = torch.searchsorted(sums, draws[:, None] * total, right=True)
    # At most the first that reaches the total: those behind it have no probability, and rounding may lead there.
    return torch.minimum(found, torch.searchsorted(sums, total))[:, 0]
