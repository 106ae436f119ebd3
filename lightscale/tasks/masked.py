"""Predict tokens that are hidden from those before and behind them: masked-language modelling, as BERT's.

    of the chosen tokens of a row   mask_replace_prob become the mask, random_replace_prob another token, the rest stay;
                                    all of them are predicted, and no other

(Devlin et al. 2019, arXiv 1810.04805, section 3.1.) Each word, or each token, is chosen by itself with probability
``mlm_probability``: a row has about that share of its tokens chosen, or with few tokens none. Nothing is drawn in
turn: what happens to a token is a hash of (seed, place of the row in the run's data, slot), so that every layout and a
run that resumes has the same masks, and a text that comes again in a later epoch others. The settings have the names of
transformers' DataCollatorForLanguageModeling.

The mask is the id behind the tokenizer's last one. No text has it, and it is no label: the model has a row of the
embedding for it, which takes no probability.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from lightscale.config.mixers import BIDIRECTIONAL
from lightscale.config.model import ModelConfig
from lightscale.config.schema import TaskConfig
from lightscale.config.section import Seed, Share, ZeroToOne
from lightscale.data_pipeline.loading.targets import Predicted, WholeRows
from lightscale.data_pipeline.splitmix import mixed
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.data_pipeline.tokenizers.words import WordEdges, word_edges
from lightscale.errors import UserError
from lightscale.tasks.interface import TrainingTask

_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)
# What is asked of the hash of a slot.
_IS_CHOSEN, _HOW, _WHICH, _NUM_QUESTIONS = range(4)


class MaskedConfig(TaskConfig):
    """[task] with name = "masked"."""

    name: Literal["masked"] = "masked"
    mlm_probability: Share = 0.15
    """Share of the tokens to predict."""
    validation_mlm_probability: Share | None = None
    """Share of the tokens to predict in validation, where masks never change; none: mlm_probability."""
    whole_word_mask: bool = False
    """Whether to mask whole words, found by the characters of the tokens; otherwise single tokens."""
    mask_replace_prob: ZeroToOne = 0.8
    """Share of the predicted tokens that the mask replaces."""
    random_replace_prob: ZeroToOne = 0.1
    """Share of the predicted tokens that a random token replaces; the model sees the remaining tokens unchanged."""
    seed: Seed = 0
    """Random seed of the masks and replacements."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError(
                f"task.mask_replace_prob = {self.mask_replace_prob} and task.random_replace_prob = "
                f"{self.random_replace_prob} add up to more than 1; use at most {1 - self.mask_replace_prob:g} for "
                "random_replace_prob"
            )
        return self


class Masked(TrainingTask):
    """Masked-language modelling; the loss is the mean over the chosen tokens."""

    options = MaskedConfig
    directions = BIDIRECTIONAL
    top = (1,)

    def __init__(self, config: MaskedConfig) -> None:
        self.config = config

    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """The embedding needs a row for the mask, and every source text."""
        ids = store.tokenizer.vocab_size
        if model.vocab_size <= ids:
            raise UserError(
                f'model.vocab_size = {model.vocab_size} leaves no id for the mask of task.name = "masked": '
                f"{store.tokenizer.name} in {store.path} has {ids} tokens, and the mask is the next id; use at least "
                f"{ids + 1}"
            )
        for source in map(store.source, sources):
            # Every document begins with an end-of-text token.
            if source.num_tokens == source.num_documents:
                raise UserError(
                    f"{store.path}: the documents of source {source.name} have no text to mask "
                    'for task.name = "masked"; use a store without this source'
                )

    def targets(self, store: TokenStore, *, validation: bool) -> "Masks":
        """Validation draws from other random numbers than training, of which the seed decides nothing."""
        config = self.config
        share = config.mlm_probability
        if validation and config.validation_mlm_probability is not None:
            share = config.validation_mlm_probability
        return Masks(
            share=share,
            mask_replace_prob=config.mask_replace_prob,
            random_replace_prob=config.random_replace_prob,
            # One set of validation masks for all runs: their losses can be compared.
            stream=0 if validation else config.seed + 1,
            num_ids=store.tokenizer.vocab_size,
            eot_id=store.tokenizer.eot_id,
            edges=_edges(store.path) if config.whole_word_mask else None,
        )


@functools.cache
def _edges(store: Path) -> WordEdges:
    """Of the tokenizer in ``store``; kept, because every token is looked at."""
    return word_edges(load_tokenizer(store))


@dataclass(frozen=True, kw_only=True)
class Masks:
    """What is chosen in rows, and what the model sees there: see ``Targets``."""

    share: float
    mask_replace_prob: float
    random_replace_prob: float
    stream: int
    """Of the random numbers."""
    num_ids: int
    """Of the tokenizer; the mask is this id."""
    eot_id: int
    """The end-of-text token: it is neither predicted nor put in."""
    edges: WordEdges | None
    """Of the tokens, where words are chosen; None: each token is."""

    def __call__(self, rows: WholeRows) -> Predicted:
        """See ``Targets``."""
        tokens, counted, places, _ = rows
        slots = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        units = slots if self.edges is None else self.edges.word_starts(tokens)
        is_text = (counted > 0) & (tokens != self.eot_id)
        chosen = is_text & (self._uniform(places, units, _IS_CHOSEN) < self.share)
        how = self._uniform(places, slots, _HOW)
        inputs = np.where(chosen & (how < self.mask_replace_prob), self.num_ids, tokens)
        random = chosen & (how >= self.mask_replace_prob) & (how < self.mask_replace_prob + self.random_replace_prob)
        others = (self._uniform(places, slots, _WHICH) * (self.num_ids - 1)).astype(np.int32)
        # All ids but the end-of-text token.
        others += others >= self.eot_id
        inputs = np.where(random, others, inputs)
        return Predicted(inputs.astype(np.int32), tokens, chosen.astype(np.float32))

    def description(self) -> str:
        """See ``Targets``."""
        words = "words" if self.edges is not None else "tokens"
        parts = (self.share, self.mask_replace_prob, self.random_replace_prob)
        return f"masked {words} {' '.join(map(repr, parts))} stream {self.stream}"

    def _uniform(self, places: NDArray[np.int64], slots: NDArray[np.int64], question: int) -> NDArray[np.float64]:
        """(b, n) numbers in [0, 1), a function of (stream, place, slot, question): SplitMix64 of each row's own."""
        own = mixed(places.astype(np.uint64) + mixed(np.array([self.stream], dtype=np.uint64) + _GAMMA))
        steps = (slots * _NUM_QUESTIONS + question + 1).astype(np.uint64)
        return (mixed(own[:, None] + steps * _GAMMA) >> np.uint64(11)).astype(np.float64) * 2.0**-53
