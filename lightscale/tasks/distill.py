"""Learn from a frozen teacher, another run's model: distillation, as of softmax layers into linear ones.

    layers   each mixer that the teacher has not learns the output of the teacher's mixer in its place, from the same
             input: attention transfer (Zhang et al. 2024, LoLCATs, arXiv 2410.10254)
    logits   the whole model learns the teacher's distributions of the next token (Hinton et al. 2015, arXiv 1503.02531)

The two are runs, one after the other; the second begins from the first by ``train.init_from``. What is trained is built
in ``training/distillation.py``. The labels are those of causal models: the cross entropy of the next token is part of
the loss where ``cross_entropy_weight`` is above 0, and always the loss of validation.
"""

from collections.abc import Collection
from typing import Literal

from lightscale.config.mixers import CAUSAL
from lightscale.config.model import ModelConfig
from lightscale.config.schema import TaskConfig
from lightscale.config.section import Positive, PositiveOrZero, RunAtStep
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.tasks.interface import TrainingTask


class DistillConfig(TaskConfig):
    """[task] with name = "distill"."""

    name: Literal["distill"] = "distill"
    teacher: RunAtStep
    """RUN@STEP: checkpoint of the frozen teacher, a model that predicts the next token with the same tokenizer."""
    stage: Literal["layers", "logits"] = "logits"
    """layers: mixers that the teacher lacks learn its mixers' outputs; logits: all weights learn its distributions."""
    temperature: Positive = 1.0
    """Divisor of the logits of both models in the divergence, which is multiplied by its square; of logits."""
    cross_entropy_weight: PositiveOrZero = 0.0
    """Weight of the next token's cross entropy beside the divergence; of logits."""


class Distill(TrainingTask):
    """Causal language modelling whose loss is the difference from a teacher."""

    options = DistillConfig
    directions = CAUSAL
    writes_text = True

    def __init__(self, config: DistillConfig) -> None:
        self.config = config

    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """Every store with the teacher's tokenizer will do; the tokenizer is compared with the teacher's checkpoint."""

    def targets(self, store: TokenStore, *, validation: bool) -> None:
        """Labels are the loader's own: the text, shifted."""
