"""Predict every token from those before it: language modelling, with which text can be generated."""

from collections.abc import Collection
from typing import Literal

from lightscale.config.mixers import CAUSAL
from lightscale.config.model import ModelConfig
from lightscale.config.schema import TaskConfig
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.tasks.interface import TrainingTask


class CausalConfig(TaskConfig):
    """[task] with name = "causal"."""

    name: Literal["causal"] = "causal"


class Causal(TrainingTask):
    """The label of a token is the next one of its document, behind the last one the end-of-text token."""

    options = CausalConfig
    directions = CAUSAL
    writes_text = True

    def __init__(self, config: CausalConfig) -> None:
        self.config = config

    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """Every store will do."""

    def targets(self, store: TokenStore, *, validation: bool) -> None:
        """Labels are the loader's own: the text, shifted."""
