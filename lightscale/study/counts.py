"""What a cell has and takes: parameters N, tokens D, compute C, kept bytes."""

from dataclasses import dataclass

from lightscale.config.schema import RunConfig
from lightscale.models.accounting import EMBEDDING, parameter_terms
from lightscale.models.flops import training_flops_per_token
from lightscale.planning.published import study_parameters, study_training_flops
from lightscale.study.fits.curves import PFLOP_DAY
from lightscale.training.optimizer.registry import optimizer_spec

_WEIGHT_BYTES = 4
# In bf16.
_EXPORT_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class CellCounts:
    """Of one run."""

    parameters: int
    """N: exactly, without the embedding."""
    embedding: int
    paper_parameters: int | None
    """As the scaling-law study counts them; None: it has no such architecture."""
    flops_per_token: float
    """Training FLOPs: all matrix products that the model needs, logits too."""
    paper_flops_per_token: float | None
    """As the scaling-law study counts them, without logits; None: it has no such architecture."""
    tokens_per_step: int
    steps: int
    kept_bytes: int
    """Of the checkpoints that are there when it has ended."""

    @property
    def tokens(self) -> int:
        """D at its end."""
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        """Of the whole run."""
        return self.flops_per_token * self.tokens

    @property
    def compute(self) -> float:
        """C at its end, PFLOP-days."""
        return self.flops / PFLOP_DAY

    @property
    def paper_compute(self) -> float | None:
        """The same by the study's formulas."""
        return None if self.paper_flops_per_token is None else self.paper_flops_per_token * self.tokens / PFLOP_DAY


def count(config: RunConfig) -> CellCounts:
    """From the configuration alone."""
    model, length = config.model, config.data.sequence_length
    terms = parameter_terms(model)
    embedding = terms.pop(EMBEDDING)
    paper_flops = study_training_flops(model, sequence_length=length, batch_size=1)
    return CellCounts(
        parameters=sum(terms.values()),
        embedding=embedding,
        paper_parameters=study_parameters(model),
        flops_per_token=training_flops_per_token(model, length),
        paper_flops_per_token=None if paper_flops is None else paper_flops / length,
        tokens_per_step=config.tokens_per_step,
        steps=config.total_steps,
        kept_bytes=_kept_bytes(config, embedding + sum(terms.values())),
    )


def _kept_bytes(config: RunConfig, parameters: int) -> int:
    checkpoint, steps = config.checkpoint, config.total_steps
    every = checkpoint.every or steps
    # The newest; the last step is always saved.
    full = min(checkpoint.keep, -(-steps // every))
    if checkpoint.keep_every is not None:
        full += steps // checkpoint.keep_every
    weights = 0 if checkpoint.keep_weights_every is None else steps // checkpoint.keep_weights_every
    state_bytes = _WEIGHT_BYTES + optimizer_spec(config.optimizer).state_bytes
    exports = 0 if checkpoint.export_every is None else steps // checkpoint.export_every
    return parameters * (full * state_bytes + weights * _WEIGHT_BYTES + exports * _EXPORT_BYTES)
