"""Text from a model, one token at a time, in the recurrent form.

The prompt passes through the model in chunks of bounded length, each of which leaves a state per layer; from then on a
token costs one step of the recurrence. Neither memory nor the cost of a token depends on the position.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.models.language_model import LanguageModel
from lightscale.models.layers.context import MixerState

PREFILL_TOKENS = 1024
"""Tokens of the prompt that pass through the model at once; bounds the memory of activations and logits."""

_REPLACEMENT = "\ufffd"
_MAX_OPEN_BYTES = 3
"""A character that is not complete yet has at most three of its UTF-8 bytes."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the logits."""

    temperature: float = 0.8
    """Divides the logits; 0: always the most probable token."""
    top_k: int | None = None
    """Only the k most probable tokens are possible; none: all."""
    top_p: float | None = None
    """Only the fewest most probable tokens that together have this probability are possible; none: all."""
    seed: int = 0
    """Of the random choices."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature:g}: must be 0 (the most probable token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k {self.top_k}: must be at least 1 token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p:g}: must be above 0 and at most 1")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed {self.seed}: must fit into 64 bits")


class Document:
    """One document as a model has read it so far: a state per layer, whose size never changes, and a position."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.position = 0
        """Tokens fed so far."""
        self.states: dict[str, MixerState] = {}
        """By layer, then by name; empty before the first token."""

    @property
    def state_bytes(self) -> int:
        """Memory that the states hold."""
        return sum(tensor.untyped_storage().nbytes() for state in self.states.values() for tensor in state.values())

    @torch.inference_mode()
    def feed(self, ids: Sequence[int], *, chunk_tokens: int = PREFILL_TOKENS) -> Tensor:
        """Read on by ``ids``, at least one, in chunks of at most ``chunk_tokens``.

        Returns:
            The logits (vocab_size,) of the token that comes next; the padding of the vocabulary is not among them.
        """
        assert ids, "no token to feed"
        device = self.model.embedding.word_embeddings.weight.device
        for start in range(0, len(ids), chunk_tokens):
            tokens = torch.tensor([ids[start : start + chunk_tokens]], device=device)
            positions = self.position + torch.arange(tokens.size(1), device=device)[None]
            logits = self.model(tokens, positions, states=self.states, last_only=True)
            self.position += tokens.size(1)
        last: Tensor = logits[0, -1, : self.model.vocab_size]
        return last


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int = 200,
    sampling: Sampling | None = None,
) -> Iterator[int]:
    """The tokens with which ``model`` continues a document, as they are found.

    Args:
        model: in evaluation mode, whole on this process.
        tokenizer: the one that the model was trained with.
        prompt_ids: the document so far, its end-of-text token in front; see ``encode_prompt``.
        max_tokens: tokens at most; fewer where the model ends the text. The end-of-text token is not among them.
        sampling: none for ``Sampling()``. The same seed gives the same tokens on the same machine.
    """
    if not prompt_ids:
        raise UserError("the prompt has no token; a document begins with the end-of-text token")
    if max_tokens < 1:
        raise UserError(f"tokens {max_tokens}: must be at least 1")
    return _generate(Document(model), tokenizer.eot_id, prompt_ids, max_tokens, sampling or Sampling())


def _generate(
    document: Document, eot_id: int, prompt_ids: Sequence[int], max_tokens: int, sampling: Sampling
) -> Iterator[int]:
    logits = document.feed(prompt_ids)
    generator = torch.Generator(logits.device).manual_seed(sampling.seed)
    for remaining in reversed(range(max_tokens)):
        token = choose(logits, sampling, generator)
        if token == eot_id:
            return
        yield token
        if remaining:
            logits = document.feed([token])


@torch.inference_mode()
def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from ``logits`` (vocab_size,). top_k comes before top_p (nucleus sampling, arXiv 1904.09751)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    # In fp64 and from the largest, so that no temperature overflows.
    logits = logits.double()
    probabilities = ((logits - logits.max()) / sampling.temperature).softmax(dim=0)
    if sampling.top_k is None and sampling.top_p is None:
        return int(torch.multinomial(probabilities, 1, generator=generator))
    k = len(logits) if sampling.top_k is None else min(sampling.top_k, len(logits))
    probabilities, ids = probabilities.topk(k)
    if sampling.top_p is not None:
        probabilities = probabilities / probabilities.sum()
        more_probable = probabilities.cumsum(dim=0) - probabilities
        # The most probable token is always kept, whatever rounding does.
        num_kept = max(1, int((more_probable < sampling.top_p).sum()))
        probabilities = probabilities[:num_kept]
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a document that begins with ``text``."""
    return [tokenizer.eot_id, *map(int, tokenizer.encode(text))]


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of ``ids`` in parts, each as soon as its characters are complete; joined they are ``decode(ids)``."""
    # Tokens may end within a character: its bytes decode to replacement characters until the last one has come. They
    # are held back, at most as many as a character may lack, because a text may also hold a real replacement character.
    waiting: list[int] = []
    shown, text = 0, ""
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        num_open = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_OPEN_BYTES)
        final = len(text) - num_open
        if final > shown:
            yield text[shown:final]
            shown = final
        if not num_open:
            waiting, shown, text = [], 0, ""
    if text[shown:]:
        yield text[shown:]
