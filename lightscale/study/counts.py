"""Size and cost of a cell: parameters N, tokens D, compute C, kept bytes."""

from dataclasses import dataclass
from math import prod

from lightscale.config.schema import RunConfig
from lightscale.models.accounting import EMBEDDING, parameter_terms
from lightscale.models.adapters import trained_shapes
from lightscale.models.flops import training_flops_per_token
from lightscale.planning.published import study_parameters, study_training_flops
from lightscale.runs.teacher import asked_model
from lightscale.study.fits.curves import PFLOP_DAY
from lightscale.training.optimizer.registry import full_checkpoint_bytes

_WEIGHT_BYTES = 4
# In bf16.
_EXPORT_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class CellCounts:
    """Size and cost of one run."""

    parameters: int
    """N: exact, without the embedding."""
    embedding: int
    paper_parameters: int | None
    """N as counted in arXiv 2406.16690; None: not an architecture of that paper."""
    flops_per_token: float
    """Training FLOPs: all matrix products of the model, including logits."""
    paper_flops_per_token: float | None
    """FLOPs as counted in arXiv 2406.16690, without logits; None: not an architecture of that paper."""
    tokens_per_step: int
    steps: int
    tokens: int
    """D at the end."""
    kept_bytes: int
    """Bytes of the checkpoints at the end."""

    @property
    def flops(self) -> float:
        """FLOPs of the whole run."""
        return self.flops_per_token * self.tokens

    @property
    def compute(self) -> float:
        """C at the end, PFLOP-days."""
        return self.flops / PFLOP_DAY

    @property
    def paper_compute(self) -> float | None:
        """C at the end by the paper's formulas, PFLOP-days."""
        return None if self.paper_flops_per_token is None else self.paper_flops_per_token * self.tokens / PFLOP_DAY


def count(config: RunConfig) -> CellCounts:
    """Count from the configuration alone."""
    model, length = config.model, config.data.sequence_length
    terms = parameter_terms(model)
    embedding = terms.pop(EMBEDDING)
    paper_flops = study_training_flops(model, sequence_length=length, batch_size=1)
    return CellCounts(
        parameters=sum(terms.values()),
        embedding=embedding,
        paper_parameters=study_parameters(model),
        flops_per_token=training_flops_per_token(model, length, teacher=asked_model(config), adapter=config.adapters),
        paper_flops_per_token=None if paper_flops is None else paper_flops / length,
        tokens_per_step=config.tokens_per_step,
        steps=config.total_steps,
        tokens=config.total_tokens,
        kept_bytes=_kept_bytes(config),
    )


def _kept_bytes(config: RunConfig) -> int:
    parameters = sum(prod(shape) for shape in trained_shapes(config).values())
    checkpoint = config.checkpoint
    full = config.num_kept(checkpoint.keep)
    weights, exports = map(config.own_multiples, (checkpoint.keep_weights_every, checkpoint.export_every))
    return full * full_checkpoint_bytes(config) + parameters * (weights * _WEIGHT_BYTES + exports * _EXPORT_BYTES)
