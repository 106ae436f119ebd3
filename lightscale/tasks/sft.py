"""Fine-tune on conversations: predict the next token where the store's loss mask counts it (supervised fine-tuning).

``format = "chat"`` in a corpus file writes the mask. The loss of a step is the mean over its counted tokens, on all
ranks and in all micro-batches. Sequences hold whole conversations, also in validation.
"""

from collections.abc import Collection
from typing import Literal

from lightscale.config.mixers import CAUSAL
from lightscale.config.model import ModelConfig
from lightscale.config.schema import TaskConfig
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore
from lightscale.errors import UserError
from lightscale.tasks.interface import TrainingTask

_TOKENS_AT_ONCE = 2**20


class SFTConfig(TaskConfig):
    """[task] with name = "sft"."""

    name: Literal["sft"] = "sft"


class SFT(TrainingTask):
    """Causal language modelling on the tokens that count."""

    options = SFTConfig
    directions = CAUSAL
    writes_text = True
    keeps_documents_whole = True

    def __init__(self, config: SFTConfig) -> None:
        self.config = config

    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """Every source has a loss mask, with a token that counts."""
        for source in map(store.source, sources):
            where = f'task.name = "sft": source {source.name} of {store.title}'
            if source.has_preferences:
                raise UserError(f'{where} holds pairs of answers, half of them rejected; use task.name = "preference"')
            if not source.has_loss_mask:
                raise UserError(
                    f'{where} has no loss mask; prepare it with format = "chat" in the corpus file, or use task.name = '
                    '"causal"'
                )
            if not _has_counted(source):
                raise UserError(f"{where} has a loss mask without a single token that counts; prepare it again")

    def targets(self, store: TokenStore, *, validation: bool) -> None:
        """Labels are the loader's own: the text, shifted, with the loss mask of the source."""


def _has_counted(source: TokenSource) -> bool:
    """Whether a token counts as a label; reads the mask up to the first."""
    # The first token of a source is no label.
    firsts = range(1, source.num_tokens, _TOKENS_AT_ONCE)
    return any(source.loss_mask(first, min(first + _TOKENS_AT_ONCE, source.num_tokens)).any() for first in firsts)
