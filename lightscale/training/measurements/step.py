"""The numbers that a step records beside its loss, gradient norm and learning rate."""

import math
from collections.abc import Mapping, Sequence

import torch

from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.parallel.engine import Engine, LossSums
from lightscale.runs.metrics.logger import Scalar
from lightscale.training.health.memory import process_memory_bytes
from lightscale.training.measurements.gradient_noise import GradientNoise
from lightscale.training.measurements.parameter_norms import ParameterNorms

Groups = dict[str, Mapping[str, Scalar]]
_Numbers = tuple[dict[str, Scalar], Groups]


class StepMeasurements:
    """Of one step: made before its passes, told before its update, asked at its end.

    Every rank measures alike, and the step computes the same with and without.
    """

    def __init__(self, config: RunConfig, engine: Engine, batches: Sequence[Batch], *, step: int, is_due: bool) -> None:
        """`batches`: of this rank; `is_due`: whether the step is recorded when nothing unusual happens."""
        self._config, self._engine, metrics = config, engine, config.metrics

        def due(every: int) -> bool:
            return is_due and bool(every) and step % every == 0

        self.of_logits = due(metrics.attention_logits_every)
        """Whether the passes of the step have to measure attention logits."""
        self._noise = GradientNoise(engine, batches) if due(metrics.gradient_noise_every) else None
        self._of_norms = due(metrics.parameter_norms_every)
        self._norms: ParameterNorms | None = None

    def before_update(self) -> None:
        """Between ``engine.gradient_norm()`` and ``engine.apply()``, of a step that is not skipped."""
        if self._of_norms:
            self._norms = ParameterNorms(self._engine)

    def result(
        self,
        sums: LossSums,
        grad_norm: float,
        *,
        is_skipped: bool,
        sequence_length: int,
        tokens: int,
        sources: Sequence[str],
        planned_memory_bytes: int | None,
    ) -> _Numbers:
        """Single numbers, and groups of numbers; `tokens`: of the step, `sources`: names of those of `sums`."""
        config = self._config
        single: dict[str, Scalar] = {"sequence_length": sequence_length} if config.data.curriculum else {}
        if config.train.rampup_batch_size:
            single["global_batch_size"] = tokens // sequence_length
        if sums.z_loss is not None:
            single["z_loss"] = sums.z_loss / max(sums.tokens, 1)
        groups: Groups = {**_by_source(sums, sources), "memory_gib": _memory_gib(self._engine, planned_memory_bytes)}
        if self._norms is not None:
            groups |= self._norms.result()
        # The spike that a guard rejects is no part of what is trained.
        if self._noise is not None and not is_skipped:
            groups |= self._noise.result(sums.tokens, grad_norm, tokens=tokens)
        if config.optimizer.adaptive_clip is not None and not is_skipped:
            of_all, by_group = _clipping(self._engine)
            single, groups = single | of_all, groups | by_group
        if self.of_logits or config.optimizer.qk_clip is not None:
            groups["largest_logit"] = _logits_by_layer(self._engine, config.model.num_layers)
        return single, groups


def _by_source(sums: LossSums, names: Sequence[str]) -> Groups:
    """The mean loss and the tokens of each source in a step; nothing where there is one source."""
    if len(names) == 1:
        return {}
    found = {name: of for name, of in zip(names, sums.by_source, strict=True) if of[1]}
    return {
        "loss_by_source": {name: loss / tokens for name, (loss, tokens) in found.items()},
        "tokens_by_source": {name: tokens for name, (_, tokens) in found.items()},
    }


def _clipping(engine: Engine) -> _Numbers:
    """The limit of the step's norm, None while there is none, and whether it was clipped; and these by group."""
    assert engine.optimizer is not None
    found = engine.optimizer.clippings
    groups = {name: one for name, one in found.items() if name is not None}
    return (
        {"grad_clip_limit": found[None].known_limit, "grad_clipped": int(found[None].is_clipped)},
        {
            "grad_clip_limit_by_group": {name: one.known_limit for name, one in groups.items()},
            "grad_clipped_by_group": {name: int(one.is_clipped) for name, one in groups.items()},
        },
    )


def _logits_by_layer(engine: Engine, num_layers: int) -> dict[str, Scalar]:
    """The largest attention logit of each layer that has some, over the micro-batches of the step."""
    largest, digits = [max(of_heads) for of_heads in engine.largest_logits().tolist()], len(str(num_layers - 1))
    return {f"{layer:0{digits}}": logit for layer, logit in enumerate(largest) if logit > -math.inf}


def _memory_gib(engine: Engine, planned_bytes: int | None) -> dict[str, Scalar]:
    """What this rank holds, beside what planning expected."""
    device = engine.mesh.device
    # Of GPUs what the allocator knows: that waits for nothing.
    measured = (
        {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }
        if device.type == "cuda"
        else process_memory_bytes()
    )
    if planned_bytes is not None:
        measured["planned"] = planned_bytes
    return {name: value / 2**30 for name, value in measured.items()}
