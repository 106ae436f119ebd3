"""Learn from preferences: of two answers to a prompt, the chosen one is to become more probable than the rejected one.

With the log-probabilities log π of the counted tokens of an answer, those of a frozen reference model log ρ, and
h = (log π - log ρ) of the chosen answer minus that of the rejected one:

    dpo     -log σ(beta h)                                      (Rafailov et al. 2023, arXiv 2305.18290, equation 7)
    ipo     (h - 1 / (2 beta))²; log-probabilities are means over tokens, as in TRL
                                                                (Azar et al. 2023, arXiv 2310.12036, equation 17)
    simpo   -log σ(beta h - gamma); means over tokens, and no reference
                                                                (Meng et al. 2024, arXiv 2405.14734, equation 6)

The loss of a step is the mean over its pairs. The reference is the checkpoint of ``train.init_from``: a second model,
or its log-probabilities in the store, which ``lightscale reference`` has written there. ``format = "preference"`` in a
corpus file writes the pairs. What is computed stands in ``training/preference.py``.
"""

from collections.abc import Collection
from typing import Literal, Self

from pydantic import model_validator

from lightscale.config.mixers import CAUSAL
from lightscale.config.model import ModelConfig
from lightscale.config.schema import TaskConfig
from lightscale.config.section import Positive, PositiveOrZero
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.tasks.interface import TrainingTask


class PreferenceConfig(TaskConfig):
    """[task] with name = "preference"."""

    name: Literal["preference"] = "preference"
    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    """Loss of a pair of answers."""
    beta: Positive = 0.1
    """Factor of the difference of log-probabilities; of ipo: half the inverse of its target."""
    gamma: PositiveOrZero = 0.5
    """Margin that simpo subtracts from beta times the difference."""
    reference: Literal["model", "stored"] = "model"
    """model: the reference computes at every step; stored: the store has its log-probabilities, by `lightscale
    reference`."""

    @model_validator(mode="after")
    def _check_gamma(self) -> Self:
        if self.loss != "simpo" and self.gamma != type(self).model_fields["gamma"].default:
            raise ValueError(f'gamma = {self.gamma} has no effect in loss = "{self.loss}"; remove it')
        if self.loss == "simpo" and self.reference == "stored":
            raise ValueError('reference = "stored" has no effect in loss = "simpo"; remove it')
        return self

    @property
    def has_reference(self) -> bool:
        """Whether a frozen model computes at every step, which answers are compared with."""
        return self.loss != "simpo" and self.reference == "model"

    @property
    def stored_reference(self) -> bool:
        """Whether answers are compared with log-probabilities in the store."""
        return self.reference == "stored"


class Preference(TrainingTask):
    """Causal language modelling whose loss compares two answers."""

    options = PreferenceConfig
    directions = CAUSAL
    writes_text = True
    keeps_documents_whole = True
    compares_answers = True
    top = (1,)

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config

    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """Every source holds pairs of answers."""
        for source in map(store.source, sources):
            if not source.has_preferences:
                raise UserError(
                    f'task.name = "preference": source {source.name} of {store.title} holds no pairs of answers; '
                    'prepare it with format = "preference" in the corpus file'
                )
            if self.config.stored_reference and source.reference is None:
                raise UserError(
                    f'task.reference = "stored": source {source.name} of {store.title} has no log-probabilities of a '
                    "reference; write a store that has them with `lightscale reference`, and name it in data.store"
                )

    def targets(self, store: TokenStore, *, validation: bool) -> None:
        """Labels are the loader's own: the text, shifted, with the loss mask of the source."""
